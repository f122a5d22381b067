"""A small random Llama: real files, the real model code, a few milliseconds a step."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.pages import PagePool
from kvstore.runtime.weights import open_checkpoint

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 3, 64, 4, 2, 16, 96, 257
CONTEXT = 2048
END = 256  # ends an answer; the tokens before it are the bytes of text
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"

torch.set_num_threads(1)  # the tests run two at a time on two cores


def write_model(path: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors of a random model."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": END,
    }
    (path / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale * columns**-0.5

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN, 8.0),
        "lm_head.weight": weight(VOCAB, HIDDEN, 4.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, (rows, columns) in shapes.items():
            # Attention that really looks at the past, so that a wrong page changes the answer.
            scale = 3.0 if name in ("self_attn.q_proj", "self_attn.k_proj") else 1.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(rows, columns, scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, str(path / "model.safetensors"))
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """One token a byte, and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return LlamaModel(open_checkpoint(path), dtype)


def make_pool(pages: int, page_tokens: int = 16, dtype: torch.dtype = torch.float32) -> PagePool:
    return PagePool(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        pages=pages,
        page_tokens=page_tokens,
        dtype=dtype,
    )
