"""The tokenizer against transformers and against byte-pair encoding written out in plain Python."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from kvstore.runtime.tokenizer import Tokenizer, open_tokenizer
from kvstore.tiers.errors import ConfigError, TokenError
from support.smollm2 import save_directory_tokenizer, smollm2_metadata, smollm2_path

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLES = [
    "",
    " ",
    "  two  spaces ",
    "\n\n\t tabs\tand\r\nlines \u00a0 ",
    "It's we'll they've I'M don't 'quoted'",
    "Prices: 1234567 and 3.14159e-10, ١٢٣ ⅷ ²",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if v != 0}  # note\n",
    '<div class="a">&nbsp;</div><!-- x -->',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x_%';",
    "Grüße, naïve façade, Ærøskøbing, İstanbul",
    "e\u0301 against é, ﬁ ligature, ẞ",
    "日本語のテキストと漢字かな交じり文。",
    "Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ❤️ 🤷🏽‍♀️ \U0001f600",
    "zero\u200bwidth \u202eright-to-left\u202c \ufeffbom",
    "\x00\x01\x7f\x80 control",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    "almost <|im_start |> <|im_end|",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/path?q=1&r=%20#frag user@example.org",
]


def varied_strings(count: int) -> list[str]:
    """The samples, and random mixtures of their pieces and of characters of all planes."""
    rng, made = random.Random(3), list(SAMPLES)
    pieces = [piece for text in SAMPLES for piece in regex.findall(r"\X|\w+|\s+", text)]
    while len(made) < count:
        parts = rng.choices(pieces, k=rng.randrange(1, 40))
        for _ in range(rng.randrange(6)):
            point = rng.choice([rng.randrange(32, 0x3000), rng.randrange(0x10000, 0x20000)])
            parts.insert(rng.randrange(len(parts)), chr(point))
        made.append("".join(parts))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(smollm2_path())


def test_ids_equal_transformers_for_200_strings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reference = save_directory_tokenizer(tmp_path)
    directory = open_tokenizer(tmp_path)
    strings = varied_strings(200)
    assert len(set(strings)) == 200
    for text in strings:
        expected = reference(text)["input_ids"]
        assert tokenizer.encode(text) == expected, text
        assert directory.encode(text) == expected, text


def test_ids_equal_byte_pair_encoding_in_plain_python(tokenizer: Tokenizer) -> None:
    encode = plain_encoder()
    for text in varied_strings(200):
        assert tokenizer.encode(text) == encode(text), text


def plain_encoder():  # type: ignore[no-untyped-def]
    metadata = smollm2_metadata()
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    ids = {token: index for index, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): place for place, merge in enumerate(merges)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    split = "|".join(regex.escape(token) for token in sorted(special, key=len, reverse=True))

    def word_ids(word: str) -> list[int]:
        parts = [letter[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: rank.get(pair, 1 << 30))
            if best not in rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        found = []
        for piece in regex.split(f"({split})", text):
            if piece in ids and piece in special:
                found.append(ids[piece])
                continue
            for run in regex.findall(r"\p{N}|\P{N}+", piece):
                for word in regex.findall(GPT2_WORDS, run):
                    found += word_ids(word)
        return found

    return encode


def test_decoding_gives_the_text_back_whole_and_token_by_token(tokenizer: Tokenizer) -> None:
    for text in varied_strings(200):
        if "<|" in text:
            continue  # Special tokens leave no text.
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(stream.push(token) for token in ids) == text
    with pytest.raises(TokenError):
        tokenizer.decode([0, tokenizer.vocab_size])
    with pytest.raises(TokenError):
        tokenizer.decode([-1])


def test_chats_are_rendered_as_transformers_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reference = save_directory_tokenizer(tmp_path)
    chats = [
        [{"role": "user", "content": "Hello {{ 7 * 7 }} {% raw %}"}],
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Ünïcode?\n"}],
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        ],
    ]
    for chat in chats:
        for prompt in (True, False):
            expected = reference.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )
            assert tokenizer.chat(chat, prompt) == expected
            assert open_tokenizer(tmp_path).chat(chat, prompt) == expected


def test_stop_tokens_come_from_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.stop_ids == {2}
    assert tokenizer.vocab_size == 49152
    save_directory_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):  # A config.json that is not one of a model.
        (tmp_path / "config.json").write_text('{"model_type": "other"}')
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{% for x in range(999999999) %}x{% endfor %}",
    ],
)
def test_a_hostile_template_reaches_nothing(tmp_path: Path, template: str) -> None:
    save_directory_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError):
        open_tokenizer(tmp_path).chat([{"role": "user", "content": "x"}])


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        open_tokenizer(tmp_path)
