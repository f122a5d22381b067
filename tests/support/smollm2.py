"""The real small model, fetched once a machine, and its tokenizer as other people build it."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2
from kvstore.runtime.gguf_file import GgufFile


@functools.cache
def smollm2_path() -> Path:
    return fetch_smollm2(default_cache_dir())


@functools.cache
def smollm2_metadata() -> dict[str, object]:
    return GgufFile(smollm2_path()).metadata


def save_directory_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """tokenizer.json and friends as a Hugging Face directory has them, and transformers' reading.

    The recipe is that of the model's own tokenizer.json: digits one by one, then byte-level BPE.
    """
    metadata = smollm2_metadata()
    tokens, merges, kinds = (
        metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")
    )
    assert isinstance(tokens, list) and isinstance(merges, list) and isinstance(kinds, list)
    fast = FastTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            fuse_unk=False,
            byte_fallback=False,
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
