"""The real model: the tokens transformers chooses with the same weights."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.runtime.attention import Batch
from kvstore.runtime.fetch import MODEL_NAME, fetch_smollm2
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.sampler import Sampling, margins, sample
from kvstore.runtime.tokenizer import open_tokenizer
from kvstore.runtime.weights import GgufCheckpoint, open_checkpoint
from kvstore.tiers.errors import ConfigError
from support.random_llama import StubPages, prefill, stub_pages
from support.smollm2 import smollm2_path

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
NEAR_TIE = 1e-4
CHATS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Explain why the sky is blue to a child.",
    "List five uses for a paperclip.",
]
PLAIN = [
    "Once upon a time",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "| name | age |\n| --- | --- |\n",
    "Les prévisions météo pour demain :",
    "A" * 40,
]


def reference(checkpoint: GgufCheckpoint) -> LlamaForCausalLM:
    """transformers' model with the weights that the checkpoint gives, by its own names."""
    sizes = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.context_length,
            rms_norm_eps=sizes.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(checkpoint.tensor(name))
    return model


def generate(
    model: LlamaModel, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy, all prompts as one batch; also how far the best logit lay above the next."""
    longest = max(len(prompt) for prompt in prompts) + NEW_TOKENS
    each = -(-longest // 16)
    pages: StubPages = stub_pages(model.config, each * len(prompts))
    tables = torch.randperm(each * len(prompts)).view(len(prompts), each)
    starts, lengths = [0] * len(prompts), [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    chosen: list[list[int]] = [[] for _ in prompts]
    leads: list[list[float]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        batch = Batch(tokens, starts, lengths, tables, [True] * len(prompts))
        logits = model.forward(batch, pages)
        following = sample(logits, [Sampling()] * len(prompts), [step] * len(prompts))
        for row, lead in enumerate(margins(logits).tolist()):
            chosen[row].append(int(following[row]))
            leads[row].append(lead)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        lengths, tokens = [1] * len(prompts), torch.from_numpy(following)
    return chosen, leads


def test_greedy_tokens_equal_transformers_for_12_prompts() -> None:
    checkpoint = open_checkpoint(smollm2_path())
    assert isinstance(checkpoint, GgufCheckpoint)
    tokenizer = open_tokenizer(smollm2_path())
    prompts = [tokenizer.encode(text) for text in PLAIN]
    for text in CHATS:
        chat = tokenizer.chat([{"role": "user", "content": text}])
        prompts.append(tokenizer.encode(chat, add_special_tokens=False))
    chosen, leads = generate(LlamaModel(checkpoint, torch.float32), prompts)
    model = reference(checkpoint)
    for prompt, ours, lead in zip(prompts, chosen, leads, strict=True):
        # One pass over our own tokens gives the reference's choice at every step of its own run, up
        # to the first that differs.
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
        theirs = logits.argmax(-1).tolist()
        differing = [step for step in range(NEW_TOKENS) if theirs[step] != ours[step]]
        if differing:
            assert lead[differing[0]] < NEAR_TIE, (prompt, differing[0], lead[differing[0]])


def test_bfloat16_answers_sensibly_and_the_same_however_it_is_cut() -> None:
    model = LlamaModel(open_checkpoint(smollm2_path()), torch.bfloat16)
    tokenizer = open_tokenizer(smollm2_path())
    chat = tokenizer.chat([{"role": "user", "content": CHATS[0]}])
    tokens = torch.tensor(tokenizer.encode(chat, add_special_tokens=False))
    length, logits = len(tokens), []
    for cuts in ([length], [10, length - 10], [1] * length):
        pages = stub_pages(model.config, 8, torch.bfloat16)
        logits.append(prefill(model, pages, tokens, torch.randperm(8), cuts)[-1])
    assert tokenizer.decode([int(logits[0].argmax())]).strip() == "The"
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    """And one that is whole is used without any download (there is nothing to download it with)."""
    whole = smollm2_path()
    (tmp_path / MODEL_NAME).symlink_to(whole)
    said: list[str] = []
    assert fetch_smollm2(tmp_path, said.append) == tmp_path / MODEL_NAME
    assert said == []
    (tmp_path / MODEL_NAME).unlink()
    (tmp_path / MODEL_NAME).write_bytes(whole.read_bytes()[:-1] + b"\0")
    fetch_smollm2(tmp_path, said.append)
    assert said and (tmp_path / MODEL_NAME).read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        fetch_smollm2(tmp_path / "file" / "below")
