"""What a Llama-family model is, as numbers: sizes, rotary embedding, stop tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.tiers.errors import ConfigError

FAMILIES = ("llama", "mistral")
POSITIONS_MAX = 1 << 22  # Longest context a model may claim; the rotary table is sized by it.


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies, or the plain linear one (then only `factor`)."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one model. All counts; `norm_epsilon` and `rope_theta` as in the model's own file.

    `stop_ids` are the tokens that end a generation; `bos_id` is None for a model without one.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    bos_id: int | None
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.intermediate_size, self.layers, self.heads)
        more = (self.kv_heads, self.head_dim, self.vocab_size, self.context_length)
        if min(*sizes, *more) < 1 or self.context_length > POSITIONS_MAX:
            raise ConfigError("The model's sizes make no sense; fetch the model file again.")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"A model with {self.heads} heads over {self.kv_heads} key/value heads of "
                f"{self.head_dim} is not supported; choose a Llama-family model."
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize

    def inverse_frequencies(self) -> Tensor:
        """Rotary frequencies, float32 [head_dim / 2], with the model's scaling applied."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = 1.0 / (self.rope_theta**exponents)
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        wavelength = 2 * math.pi / plain
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        smooth = (scaling.original_context / wavelength - low) / (high - low)
        mixed = (1 - smooth) * plain / scaling.factor + smooth * plain
        scaled = torch.where(
            wavelength > scaling.original_context / low, plain / scaling.factor, mixed
        )
        return torch.where(wavelength < scaling.original_context / high, plain, scaled)


def from_huggingface(config: Mapping[str, object], generation: Mapping[str, object]) -> ModelConfig:
    """Reads config.json (either spelling of the rotary settings) and generation_config.json.

    Raises ConfigError for a model of another family or with a feature the runtime lacks.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"Model family {family!r} is not supported; use one of {FAMILIES}.")
    for name in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        if config.get(name):
            raise ConfigError(f"A model with {name} is not supported; use one without it.")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError("Only the SiLU activation is supported; use another model.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError("rope_scaling in config.json is not an object; fetch the model again.")
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
    bos = config.get("bos_token_id")
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        layers=_integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // max(heads, 1)),
        vocab_size=_integer(config, "vocab_size"),
        context_length=_integer(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", _number(config, "rope_theta", 10000.0)),
        rope_scaling=_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_id=bos if isinstance(bos, int) else None,
        stop_ids=_ids(stops),
    )


def from_gguf(metadata: Mapping[str, object], tied_embeddings: bool) -> ModelConfig:
    """Reads a GGUF file's metadata. Raises ConfigError for an architecture other than llama."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"GGUF architecture {architecture!r} is not supported; use a llama file.")
    sizes = {
        key.removeprefix("llama."): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    heads, hidden = _integer(sizes, "attention.head_count"), _integer(sizes, "embedding_length")
    head_dim = _integer(sizes, "attention.key_length", hidden // max(heads, 1))
    if _integer(sizes, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("A model that rotates only a part of each head is not supported.")
    scaling = sizes.get("rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        raise ConfigError(f"Rotary scaling {scaling!r} in a GGUF file is not supported.")
    factor = _number(sizes, "rope.scaling.factor", 1.0)
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    vocabulary = len(tokens) if isinstance(tokens, list | tuple) else 0
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=_integer(sizes, "feed_forward_length"),
        layers=_integer(sizes, "block_count"),
        heads=heads,
        kv_heads=_integer(sizes, "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_integer(sizes, "vocab_size", vocabulary),
        context_length=_integer(sizes, "context_length"),
        norm_epsilon=_number(sizes, "attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=_number(sizes, "rope.freq_base", 10000.0),
        rope_scaling=RopeScaling("linear", factor) if scaling == "linear" else None,
        tied_embeddings=tied_embeddings,
        bos_id=bos if isinstance(bos, int) else None,
        stop_ids=_ids(stops),
    )


def _scaling(rope: Mapping[str, object]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in {"default", None}:
        return None
    if kind not in {"llama3", "linear"}:
        raise ConfigError(f"Rotary scaling {kind!r} is not supported; use llama3, linear or none.")
    factor = _number(rope, "factor", 1.0)
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "llama3",
        factor,
        _number(rope, "low_freq_factor", 1.0),
        _number(rope, "high_freq_factor", 4.0),
        _integer(rope, "original_max_position_embeddings", 8192),
    )


def _integer(table: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = table.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"The model's file lacks a whole number {key!r}; fetch the model again.")
    return value


def _number(table: Mapping[str, object], key: str, default: float) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"The model's file has no usable number {key!r}; fetch the model again.")
    return float(value)


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int)))
