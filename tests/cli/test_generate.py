"""`kvstore generate`: one process saves, the next one reuses; wrong input is one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.demo_questions import document
from kvstore.cli.main import main
from support.stored import Ran, assert_one_sentence, run
from support.tiny_chat_model import VOCAB, write_chat_model

FIELDS = {
    *("tokens", "text", "prompt_tokens", "computed_tokens", "reused_tokens", "tier_tokens"),
    *("ttft_s", "decode_s"),
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(document()[:3000], encoding="utf-8")
    return path


def arguments(model: Path, prompt: Path, *more: str | Path) -> list[str]:
    fixed = ["generate", "--model", model, "--prompt-file", prompt, "--max-tokens", "8"]
    # Eager: so small a model computes faster than a busy machine's disk reads.
    usual = ("--threads", "1", "--kv-memory", "16MiB", "--eager")
    return [str(part) for part in (*fixed, *usual, *more)]


def here(capsys: Capture, command: list[str]) -> Ran:
    """The command in this process, which has torch loaded already."""
    capsys.readouterr()
    code = main(command)
    said = capsys.readouterr()
    return Ran(code, said.out, said.err)


@pytest.mark.slow
def test_a_second_process_reuses_what_the_first_one_saved(
    model: Path, prompt: Path, tmp_path: Path
) -> None:
    command = arguments(model, prompt, "--store", tmp_path / "kv", "--json")
    first, second = run(*command), run(*command)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.err == second.err == ""
    one, two = first.document, second.document
    assert set(one) == set(two) == FIELDS
    assert one["tokens"] == two["tokens"] and one["text"] == two["text"]
    assert len(one["tokens"]) == 8
    length = one["prompt_tokens"]
    assert (one["computed_tokens"], one["reused_tokens"]) == (length, 0)
    reused = (length - 1) // 16 * 16
    assert (two["computed_tokens"], two["reused_tokens"]) == (length - reused, reused)
    assert two["tier_tokens"] == {"device": 0, "host": 0, "disk": reused}
    assert one["ttft_s"] > 0 and one["decode_s"] > 0
    checked = run("verify", "--store", tmp_path / "kv", "--json")
    assert checked.code == 0 and checked.document["blocks"] >= reused // 16


def test_no_store_saves_nothing(model: Path, prompt: Path, tmp_path: Path, capsys: Capture) -> None:
    command = arguments(model, prompt, "--store", tmp_path / "kv", "--no-store", "--json")
    ran = here(capsys, command)
    assert ran.code == 0 and ran.document["reused_tokens"] == 0
    assert not (tmp_path / "kv").exists()


def test_for_people_the_text_is_all_of_stdout(model: Path, prompt: Path, capsys: Capture) -> None:
    machine = here(capsys, arguments(model, prompt, "--no-store", "--json"))
    person = here(capsys, arguments(model, prompt, "--no-store"))
    assert person.out == machine.document["text"] + "\n"
    assert f"0 of {machine.document['prompt_tokens']} prompt tokens reused" in person.err


def test_a_seed_decides_the_tokens(model: Path, prompt: Path, capsys: Capture) -> None:
    def tokens(seed: int) -> list[int]:
        more = ("--no-store", "--json", "--temperature", "0.9", "--seed", str(seed))
        found: list[int] = here(capsys, arguments(model, prompt, *more)).document["tokens"]
        return found

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_settings_come_from_a_file(
    model: Path, prompt: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = tmp_path / "kvstore.toml"
    store = tmp_path / "from-file"
    settings.write_text(
        f'[host]\ncapacity = "32MiB"\n[disk]\npaths = ["{store}"]\ncapacity = "64MiB"\n',
        encoding="utf-8",
    )
    command = arguments(model, prompt, "--config", settings, "--json")
    assert [here(capsys, command).document["reused_tokens"] > 0 for _ in range(2)] == [False, True]
    stats = run("stats", "--store", store, "--json").document
    assert stats["tiers"]["disk"]["capacity_bytes"] == 64 << 20


def test_a_store_made_for_another_model_is_refused_or_shared_and_keeps_what_it_has(
    model: Path, prompt: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = write_chat_model(tmp_path / "other", seed=1)
    store = ("--store", tmp_path / "kv", "--json")
    for path, dtype, share, hits in [
        (model, "float32", (), False),
        (other, "float32", ("--share",), False),
        (model, "bfloat16", ("--share",), False),
        (model, "float32", (), True),
        (other, "float32", (), True),
    ]:
        options = (*store, "--dtype", dtype)
        if share:
            refused = here(capsys, arguments(path, prompt, *options))
            assert refused.code == 2
            assert "another" in refused.err and len(refused.err.strip().splitlines()) == 1
        ran = here(capsys, arguments(path, prompt, *options, *share))
        assert ran.code == 0, ran.err
        assert (ran.document["reused_tokens"] > 0) == hits


# --- wrong input: what is given, and a word that the sentence must have


def _no_model(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--model", folder / "none.gguf"], "model fetch"


def _not_a_model(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "junk.gguf").write_bytes(b"no model at all" * 100)
    return ["--model", folder / "junk.gguf"], "junk.gguf"


def _truncated_header(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + (100).to_bytes(8, "little") * 2)
    return ["--model", folder / "cut.gguf"], "cut.gguf"


def _truncated_weights(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    cut = write_chat_model(folder / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return ["--model", cut], "model.safetensors"


def _empty_folder(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "empty").mkdir()
    return ["--model", folder / "empty"], "empty"


def _other_family(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    other = write_chat_model(folder / "other")
    config = other / "config.json"
    config.write_text(config.read_text("utf-8").replace('"llama"', '"gpt2"'), encoding="utf-8")
    return ["--model", other], "gpt2"


def _missing_prompt(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--prompt-file", folder / "nothing.txt"], "nothing.txt"


def _folder_for_a_prompt(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--prompt-file", folder], "cannot be read"


def _not_utf8(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    return ["--prompt-file", folder / "latin.txt"], "UTF-8"


def _empty_prompt(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "empty.txt").write_text("", encoding="utf-8")
    return ["--prompt-file", folder / "empty.txt"], "empty"


def _longer_than_the_pool(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--kv-memory", "64KiB"], "pool"


def _longer_than_the_context(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "long.txt").write_text(document() * 5, encoding="utf-8")
    return ["--prompt-file", folder / "long.txt"], "context"


def _token_out_of_range(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--model", write_chat_model(folder / "narrow", vocab=VOCAB // 2)], "tokenizer"


def _foreign_folder(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "mine").mkdir()
    (folder / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    return ["--store", folder / "mine"], "mine"


def _file_for_a_store(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "file").write_text("not a store", encoding="utf-8")
    return ["--store", folder / "file"], "file"


def _config_missing(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    return ["--config", folder / "none.toml"], "none.toml"


def _config_wrong(model: Path, folder: Path) -> tuple[list[str | Path], str]:
    (folder / "wrong.toml").write_text("[host]\ncapacities = 3\n", encoding="utf-8")
    return ["--config", folder / "wrong.toml"], "capacity"


WRONG = [
    *(_no_model, _not_a_model, _truncated_header, _truncated_weights, _empty_folder),
    *(_other_family, _missing_prompt, _folder_for_a_prompt, _not_utf8, _empty_prompt),
    *(_longer_than_the_pool, _longer_than_the_context, _token_out_of_range, _foreign_folder),
    *(_file_for_a_store, _config_missing, _config_wrong),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__.strip("_"))
def test_wrong_input_is_one_sentence_that_helps(
    case: Callable[[Path, Path], tuple[list[str | Path], str]],
    model: Path,
    prompt: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    wrong, word = case(model, tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    store = [] if "--store" in wrong else ["--store", tmp_path / "kv"]
    ran = here(capsys, arguments(model, prompt, *store, *wrong))
    assert_one_sentence(ran)
    assert word in ran.err
    after = sorted(str(p) for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "kv"))
    assert after == before  # nothing of the user's is gone, and nothing else was made


@pytest.mark.parametrize(
    "wrong",
    [
        ("--max-tokens", "0"),
        ("--max-tokens", "many"),
        ("--temperature", "-1", "--store", "x"),
        ("--seed", "-1"),
        ("--dtype", "float8"),
        ("--threads", "0"),
        ("--kv-memory", "much", "--no-store"),
        (),
    ],
)
def test_wrong_options_are_one_sentence(
    wrong: tuple[str, ...], model: Path, prompt: Path, capsys: Capture
) -> None:
    assert_one_sentence(here(capsys, arguments(model, prompt, *wrong)))


def test_a_wrong_model_loses_nothing_and_makes_no_store(
    model: Path, prompt: Path, tmp_path: Path, capsys: Capture
) -> None:
    store = ("--store", tmp_path / "kv", "--json")
    assert here(capsys, arguments(tmp_path / "none", prompt, *store)).code == 2
    assert not (tmp_path / "kv").exists()
    assert here(capsys, arguments(model, prompt, *store)).code == 0
    assert here(capsys, arguments(tmp_path / "none", prompt, *store)).code == 2
    assert here(capsys, arguments(model, prompt, *store)).document["reused_tokens"] > 0


@pytest.mark.slow
def test_a_store_in_use_is_one_sentence(model: Path, prompt: Path, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "kv", host="8MiB", disk_capacity="16MiB"):
        ran = run(*arguments(model, prompt, "--store", tmp_path / "kv", "--json"))
    assert_one_sentence(ran)
    assert "in use" in ran.err


@pytest.mark.slow
def test_the_real_model_answers_and_is_found_again(tmp_path: Path) -> None:
    fetched = run("model", "fetch", "smollm2")
    assert fetched.code == 0, fetched.err
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(document()[:1500] + "\nThe islands are called Great", encoding="utf-8")
    command = ["generate", "--model", fetched.out.splitlines()[-1], "--prompt-file", prompt]
    command += ["--store", tmp_path / "kv", "--max-tokens", "3", "--json"]
    first, second = run(*command), run(*command)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.document["text"].startswith(" Varrin")
    assert second.document["tokens"] == first.document["tokens"]
    assert second.document["tier_tokens"]["disk"] > 200
