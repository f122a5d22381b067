"""Text to tokens and back, from a model's own files; chat templates rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from kvstore.runtime.gguf_file import GgufFile
from kvstore.runtime.models.config import from_gguf, from_huggingface
from kvstore.runtime.weights import read_json
from kvstore.tiers.errors import ConfigError, TokenError

TEXT_BYTES_MAX = 64 << 20
CONTROL_TOKEN = 3  # GGUF's type of a token that is never text, such as <|im_end|>.

Message = Mapping[str, object]


class Tokenizer:
    """One model's tokenizer. Thread-safe; keeps no state between calls.

    `stop_ids` are the tokens that end a generation; `vocab_size` counts all ids.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        template: str | None,
        names: Mapping[str, str],
        stops: Sequence[int],
    ) -> None:
        self._fast = fast
        self._names = dict(names)
        self._template = template
        self.stop_ids = frozenset(stops)
        self.vocab_size: int = fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens spelt out in the text become those tokens.

        `add_special_tokens` puts the model's own first token before the text, where it has one;
        leave it out for the text of `chat`, which brings it along.
        Raises TokenError for text over TEXT_BYTES_MAX characters.
        """
        if len(text) > TEXT_BYTES_MAX:
            raise TokenError(
                f"Text of {len(text)} characters is over {TEXT_BYTES_MAX}; shorten it."
            )
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens. Raises TokenError for an id that is not in the vocabulary."""
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocab_size:
                raise TokenError(
                    f"Token {token} is not in 0..{self.vocab_size - 1}; check the model."
                )
        text: str = self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self) -> "TokenStream":
        """A decoder for tokens that arrive one by one."""
        return TokenStream(self._fast)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Renders messages ({"role": ..., "content": ...}) with the model's own template.

        Raises ConfigError for a model without a template or messages that its template refuses.
        """
        if self._template is None:
            raise ConfigError("This model has no chat template; give it a plain prompt.")
        try:
            return (
                _environment()
                .from_string(self._template)
                .render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    **self._names,
                )
            )
        except Exception as error:  # The template is a stranger's program: it may raise anything.
            raise ConfigError(f"The chat template refuses these messages: {error}.") from error


class TokenStream:
    """Decodes tokens as they arrive; a character that spans tokens appears with its last one."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes, often a word, sometimes nothing."""
        return self._stream.step(self._fast, token) or ""


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a .gguf file or of a Hugging Face directory (tokenizer.json).

    Raises ConfigError, with one sentence, when there is none or its kind is not supported.
    """
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_directory(path: Path) -> Tokenizer:
    source = path / "tokenizer.json"
    if not source.is_file():
        raise ConfigError(f"There is no tokenizer.json in {path}; fetch the whole model directory.")
    try:
        fast = FastTokenizer.from_file(str(source))
    except Exception as error:  # The library raises bare Exception for a file it cannot parse.
        raise ConfigError(f"{source} cannot be read; fetch the model again.") from error
    fast.no_truncation()
    fast.no_padding()
    settings = _optional_json(path / "tokenizer_config.json")
    names = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    own = path / "chat_template.jinja"
    template = own.read_text("utf-8") if own.is_file() else _template(settings.get("chat_template"))
    config = _optional_json(path / "config.json")
    generation = _optional_json(path / "generation_config.json")
    stops = from_huggingface(config, generation).stop_ids if config else ()
    return Tokenizer(fast, template, {k: v for k, v in names.items() if v is not None}, stops)


def _from_gguf(path: Path) -> Tokenizer:
    metadata = GgufFile(path).metadata
    kind, splitter = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens, merges = _texts(metadata, "tokens"), _texts(metadata, "merges")
    if kind != "gpt2" or splitter not in {"smollm", "gpt-2"}:
        raise ConfigError(
            f"Tokenizer {kind}/{splitter} in a GGUF file is not supported; "
            "use the model's Hugging Face directory."
        )
    fast = FastTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
        )
    )
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # SmolLM takes digits one at a time before GPT-2's rule splits the rest.
    steps = [pre_tokenizers.Digits(individual_digits=True)] if splitter == "smollm" else []
    fast.pre_tokenizer = pre_tokenizers.Sequence([*steps, words])
    fast.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = types if isinstance(types, list) else []
    special = [token for token, of in zip(tokens, kinds, strict=False) if of == CONTROL_TOKEN]
    fast.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    if fast.get_vocab_size() != len(tokens):
        raise ConfigError(f"Model file {path} names tokens twice; fetch it again.")
    names = {}
    for name in ("bos", "eos", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            names[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    stops = from_gguf(metadata, tied_embeddings=True).stop_ids
    return Tokenizer(fast, template if isinstance(template, str) else None, names, stops)


def _texts(metadata: Mapping[str, object], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"The GGUF file has no tokenizer {name}; fetch it again.")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _content(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(value: object) -> str | None:
    if isinstance(value, list):  # Several named templates: the one for plain chat.
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    # A template comes with the model, so from a stranger: it runs where it can reach nothing.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
