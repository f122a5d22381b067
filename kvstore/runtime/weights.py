"""A model's weights, read tensor by tensor from a GGUF file or a Hugging Face directory.

Both kinds answer to the names of Hugging Face's Llama, so that the model is written once.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvstore.runtime.gguf_file import GgufFile
from kvstore.runtime.models.config import ModelConfig, from_gguf, from_huggingface
from kvstore.tiers.errors import ConfigError

JSON_BYTES_MAX = 64 << 20
DIGEST_CHUNK_BYTES = 4 << 20

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_GGUF_NAMES = {
    EMBEDDING: "token_embd.weight",
    NORM: "output_norm.weight",
    HEAD: "output.weight",
}
_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class GgufCheckpoint:
    """Weights in one GGUF file of the llama architecture, dequantised as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(path)
        tied = _GGUF_NAMES[HEAD] not in self.file.tensors
        self.config: ModelConfig = from_gguf(self.file.metadata, tied)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name, float32. Raises ConfigError if it is missing."""
        stored = _gguf_name(name)
        if stored not in self.file.tensors:
            raise ConfigError(f"Model file {self.path} has no tensor {stored!r}; fetch it again.")
        values = torch.from_numpy(self.file.tensor(stored))
        if ".q_proj." in name:
            return _split_halves(values, self.config.heads)
        if ".k_proj." in name:
            return _split_halves(values, self.config.kv_heads)
        return values

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies, float32 [head_dim / 2]; Llama 3's factors are one of the tensors."""
        plain = self.config.inverse_frequencies()
        if "rope_freqs.weight" not in self.file.tensors:
            return plain
        factors = torch.from_numpy(self.file.tensor("rope_freqs.weight"))
        if factors.shape != plain.shape:
            raise ConfigError(f"Model file {self.path} has odd rotary factors; fetch it again.")
        return plain / factors

    def digest(self) -> bytes:
        """SHA-256 of the file: what names these weights in a namespace."""
        return _digest([self.path])


class DirectoryCheckpoint:
    """Weights in a Hugging Face directory: config.json and safetensors, whole or in shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        generation = path / "generation_config.json"
        self.config: ModelConfig = from_huggingface(
            read_json(path / "config.json"), read_json(generation) if generation.is_file() else {}
        )
        self._shard_of = self._index()

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name in its stored type. Raises ConfigError if it is missing."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise ConfigError(f"Model {self.path} has no tensor {name!r}; fetch it again.")
        try:
            with safe_open(shard, framework="pt") as file:
                values: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"Model file {shard} cannot be read; fetch it again.") from error
        return values

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies, float32 [head_dim / 2]."""
        return self.config.inverse_frequencies()

    def digest(self) -> bytes:
        """SHA-256 over config.json and all shards: what names these weights in a namespace."""
        return _digest([self.path / "config.json", *sorted(set(self._shard_of.values()))])

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict):
                raise ConfigError(f"{index} has no weight_map; fetch the model again.")
            # Only the last part of a name counts: an index must not lead out of its directory.
            return {str(name): self.path / Path(str(shard)).name for name, shard in table.items()}
        whole = self.path / "model.safetensors"
        try:
            with safe_open(whole, framework="pt") as file:
                return dict.fromkeys(file.keys(), whole)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"Model file {whole} cannot be read; fetch it again.") from error


Checkpoint = GgufCheckpoint | DirectoryCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .gguf file or a Hugging Face directory; reads headers only.

    Raises ConfigError, with one sentence, for anything that is neither.
    """
    if path.is_dir():
        return DirectoryCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise ConfigError(f"There is no model at {path}; run `kvstore model fetch smollm2`.")


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of bounded size. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(JSON_BYTES_MAX + 1)
        value = json.loads(data) if len(data) <= JSON_BYTES_MAX else None
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror}; give a GGUF file or a model's folder."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON; fetch the model again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; fetch the model again.")
    return value


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF stores the two rotary halves of each head interleaved; the model wants them apart."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()


def _digest(paths: list[Path]) -> bytes:
    total = hashlib.sha256()
    buffer = memoryview(bytearray(DIGEST_CHUNK_BYTES))
    for path in paths:
        part = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    part.update(buffer[:count])
        except OSError as error:
            raise ConfigError(
                f"Cannot read model file {path}: {error.strerror}; fetch it again."
            ) from error
        total.update(part.digest())
    return total.digest()
