"""Model files: what is read is what was written; what is damaged or foreign is refused."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.weights import EMBEDDING, open_checkpoint
from kvstore.tiers.errors import ConfigError
from support.random_llama import prefill, save_random, stub_pages

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 40
PARTS = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": ("mlp.gate_proj", INNER, HIDDEN),
    "ffn_up": ("mlp.up_proj", INNER, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INNER),
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:  # type: ignore[type-arg]
    """What converting to GGUF does to the rows of q and k: the two halves of a head, in turn."""
    halves = weight.reshape(heads, 2, HEAD_DIM // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path: Path, quantization: GGMLQuantizationType) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """A small llama file; gives back the matrices as they are after quantisation, by HF name."""
    rng = np.random.default_rng(7)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(3)
    writer.add_array("test.nested", ["a", "b"])
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    expected = {}
    table = {"token_embd": (EMBEDDING, VOCAB, HIDDEN)}
    table |= {
        f"blk.0.{part}": (f"model.layers.0.{name}.weight", rows, columns)
        for part, (name, rows, columns) in PARTS.items()
    }
    for part, (name, rows, columns) in table.items():
        plain = rng.normal(0, 0.2, (rows, columns)).astype(np.float32)
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(part)
        packed = quantize(interleaved(plain, heads) if heads else plain, quantization)
        # Quantisation works row by row, so it commutes with the order of the rows.
        expected[name] = dequantize(quantize(plain, quantization), quantization)
        writer.add_tensor(f"{part}.weight", packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_1", "BF16"])
def test_gguf_tensors_come_back_dequantised_and_in_order(tmp_path: Path, quantization: str) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, GGMLQuantizationType[quantization])
    checkpoint = open_checkpoint(path)
    assert len(expected) == 8
    for name, values in expected.items():
        assert np.array_equal(checkpoint.tensor(name).numpy(), values), name
    config = checkpoint.config
    assert (config.hidden_size, config.kv_heads, config.head_dim) == (HIDDEN, KV_HEADS, HEAD_DIM)
    assert (config.rope_theta, config.stop_ids, config.tied_embeddings) == (5000.0, (3,), True)
    assert config.token_bytes(torch.bfloat16) == 2 * KV_HEADS * HEAD_DIM * 2


def test_a_damaged_gguf_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Cut anywhere, or with bytes of its header replaced: a ConfigError or a whole read."""
    path, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    write_gguf(path, GGMLQuantizationType.Q8_0)
    data = path.read_bytes()
    rng = random.Random(5)
    for length in [0, 3, 4, 23, 24, *(rng.randrange(len(data)) for _ in range(60)), len(data) - 1]:
        broken.write_bytes(data[:length])
        with pytest.raises(ConfigError):
            open_checkpoint(broken)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 8])):
            damaged[rng.randrange(1400)] = rng.choice([0, 1, 127, 128, 255])
        broken.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(broken)
            checkpoint.tensor(EMBEDDING)
        except ConfigError as error:
            assert str(error).endswith(".")


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gemma")
    writer.add_tensor("a", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="gemma"):
        open_checkpoint(path)


def split_into_shards(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    where = {
        name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)
    }
    for shard in set(where.values()):
        part = {name: tensors[name] for name in names if where[name] == shard}
        save_file(part, path / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    save_random(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "sharded")
    split_into_shards(tmp_path / "sharded")
    tokens, logits = torch.arange(20), []
    for name in ("whole", "sharded"):
        model = LlamaModel(open_checkpoint(tmp_path / name), torch.float32)
        logits.append(prefill(model, stub_pages(model.config, 2), tokens, torch.arange(2), [20]))
    assert torch.equal(*logits)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    save_random(tmp_path / "other", seed=1)
    save_random(tmp_path / "model")
    where = dict.fromkeys(load_file(tmp_path / "model/model.safetensors"), "../other/x.safetensors")
    (tmp_path / "other/model.safetensors").rename(tmp_path / "other/x.safetensors")
    index = tmp_path / "model/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "model").tensor(EMBEDDING)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"hidden_size": "many"},
        {"num_key_value_heads": 5},
        {"num_hidden_layers": 0},
        {"vocab_size": None},
    ],
)
def test_a_model_the_runtime_cannot_run_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)


def test_the_older_spelling_of_rope_is_read(tmp_path: Path) -> None:
    """Before transformers 5: rope_theta beside rope_scaling, `type` for `rope_type`."""
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = open_checkpoint(tmp_path).config
    assert read.rope_theta == 500000.0
    assert read.rope_scaling is not None
    assert float(read.inverse_frequencies()[0]) == 0.5


def test_missing_and_damaged_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model fetch"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)
    save_random(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)


def test_weights_of_other_shapes_than_the_config_says_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 201}))
    with pytest.raises(ConfigError, match="shape"):
        LlamaModel(open_checkpoint(tmp_path), torch.float32)


def test_the_digest_changes_with_any_byte_of_the_weights(tmp_path: Path) -> None:
    save_random(tmp_path)
    before = open_checkpoint(tmp_path).digest()
    assert open_checkpoint(tmp_path).digest() == before
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert open_checkpoint(tmp_path).digest() != before
