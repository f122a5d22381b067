"""A small random Llama with a tokenizer and a chat template: what the commands can be run on."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstore.cli.demo_questions import document

VOCAB, CONTEXT = 1024, 8192
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 3, 128, 4, 2, 32, 256
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4  # keys and values, float32
START, END = "<|start|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_chat_model(path: Path, seed: int = 0, vocab: int = VOCAB, template: bool = True) -> Path:
    """A Hugging Face folder. With a `vocab` below VOCAB the tokenizer knows more than the model."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"chat_template": TEMPLATE} if template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    _tokenizer().save(str(path / "tokenizer.json"))
    save_file(_weights(seed, vocab), str(path / "model.safetensors"))
    return path


def _weights(seed: int, vocab: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, scale: float = 1.5) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale * columns**-0.5

    tensors = {
        "model.embed_tokens.weight": weight(vocab, HIDDEN, 6.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, (rows, columns) in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            # Attention that really looks at the past, so that a wrong page changes the answer.
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(rows, columns, 2.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return tensors


def _tokenizer() -> Tokenizer:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        show_progress=False,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    fast.train_from_iterator([document()], trainer)
    return fast
