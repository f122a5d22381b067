"""What `kvstore demo` asks: a long document that ships with the package, and questions over it."""

from importlib.resources import files

DOCUMENT_NAME = "demo_document.txt"
DOCUMENT_TITLE = "The Cold Library of Varrin Sound"
QUESTIONS = (
    "Who is the keeper since 2011, and what was her former profession?",
    "What does the third rule on the board say?",
    "Who founded the library, and in which year did she return to Great Varrin?",
)


def document() -> str:
    """The document: original text, about 1,850 tokens."""
    return files("kvstore.cli").joinpath(DOCUMENT_NAME).read_text("utf-8")


def chat_prompt(question: str) -> list[dict[str, str]]:
    """The messages that ask a question: the document first, so that all prompts begin alike."""
    text = f"{document()}\nAnswer this question about the text above: {question}"
    return [{"role": "user", "content": text}]
