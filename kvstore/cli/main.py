"""The `kvstore` command: one file for each group of commands, and here what they have in common.

Exit codes: 0 done; 1 `verify`, `export` or `import` found bad blocks, `invalidate` could not make
it durable, `resize` did not get there, or `pin` was refused; 2 wrong usage or input, and a sentence
on stderr.

A module of commands is imported for every command, `--help` included. So none imports the runtime
or torch at its top: a command that needs them imports them when it runs.
"""

import sys
from collections.abc import Sequence

import typer

import kvstore
from kvstore.cli import (
    bench,
    chat,
    demo,
    export,
    generate,
    import_,
    invalidate,
    ls,
    model,
    pin,
    resize,
    stats,
    verify,
)
from kvstore.tiers.errors import KvstoreError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="kvstore",
    help="A tiered store for the KV cache of language models: what is in it, and is it whole.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("stats")(stats.stats)
app.command("ls")(ls.ls)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("import")(import_.import_)
app.command("invalidate")(invalidate.invalidate)
app.command("pin")(pin.pin)
app.command("resize")(resize.resize)
app.command("bench")(bench.bench)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.add_typer(model.app, name="model")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvstore {kvstore.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """A tiered store for the KV cache of language models: what is in it, and is it whole."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. `arguments`: as on the command line, without the program's name.

    Returns: 0, 1 or 2 as the module says, or 130 after an interrupt.
    """
    try:
        code = app(args=arguments, prog_name="kvstore", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        sys.stderr.write(f"{sentence}\n")
        return EXIT_USAGE
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str | None:
    """What to tell the user, or None for a bug, whose traceback is wanted."""
    if isinstance(error, KvstoreError):
        return f"kvstore: {error}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"kvstore: {where}{error.strerror or error}"
    # Usage errors of typer: their class has moved between its versions, their methods have not.
    if hasattr(error, "format_message"):
        message = str(error.format_message())
        asked_for_help = type(error).__name__ == "NoArgsIsHelpError"
        return message if asked_for_help else f"kvstore: {message} Try kvstore --help."
    return None
