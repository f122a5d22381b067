"""The runtime in ten lines: load a model, give it a store, ask.

with Runtime.load("path/to/model", store="kv-cache") as runtime:
    answer = runtime.generate(document + question, max_tokens=64)
    print(answer.text, answer.reused_tokens, "tokens reused")
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from kvstore.planner import Planner
from kvstore.runtime.compute import Compute, open_device
from kvstore.runtime.engine import Engine
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.models.device_llama import DeviceLlama
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.models.model import Model
from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import FinishReason, Request, SamplingParams
from kvstore.runtime.scheduler import SEQUENCES_MAX, TOKEN_BUDGET
from kvstore.runtime.tokenizer import Message, Tokenizer, open_tokenizer
from kvstore.runtime.weights import open_checkpoint
from kvstore.sizes import parse_size
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError

KV_MEMORY = "1GiB"
PAGE_TOKENS = 16
THREADS_MAX = 1024
DEVICE_TOKEN_BUDGET = 8192  # A device computes hundreds of tokens in the time of one.
STOPS_MAX = 16

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Generation:
    """An answer and what it cost. Tokens are ids; times are seconds.

    tokens: the new ones. computed_tokens, reused_tokens: of the prompt. tier_tokens: where the
    reused ones came from. bytes_moved: loaded for this answer, by tier.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    tier_tokens: Mapping[TierName, int]
    bytes_moved: Mapping[TierName, int]
    ttft_s: float
    decode_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens a second after the first one; 0 for a single token."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0


class Stream:
    """An answer as it grows: iterate over pieces of text. `generation` is there at the end.

    Leaving it early, or `close`, aborts the request.
    """

    def __init__(self, runtime: "Runtime", request: Request, stops: Sequence[str]) -> None:
        self._request = request
        self._runtime = runtime
        self._pieces = self._run(stops)
        self._text: list[str] = []
        self.generation: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._pieces.close()
        self._runtime.engine.abort(self._request)

    def _run(self, stops: Sequence[str]) -> Generator[str]:
        runtime, request = self._runtime, self._request
        decoder, held, met = runtime.tokenizer.stream(), "", False
        for token in runtime.engine.tokens(request):
            held += decoder.push(token)
            ends = [at for at in map(held.find, stops) if at >= 0]
            if ends:
                held, met = held[: min(ends)], True
                runtime.engine.stop(request)
                break
            ready = len(held) - _could_begin(held, stops)
            if ready:
                self._text.append(held[:ready])
                yield held[:ready]
                held = held[ready:]
        if held:
            self._text.append(held)
            yield held
        # Without a stop string the whole is decoded again: its last character may be incomplete.
        text = "".join(self._text) if met else runtime.tokenizer.decode(request.output)
        self.generation = _generation(request, text)


class Runtime:
    """A model, its tokenizer, and an engine. Belongs to one thread. Made by `Runtime.load`.

    engine, model, tokenizer: the parts, for those who want to drive them. compute: the device
    that the model is on; None for the CPU.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        engine: Engine,
        owned: Store | None,
        compute: Compute | None = None,
    ) -> None:
        self.model = model
        self.compute = compute
        self.tokenizer = tokenizer
        self.engine = engine
        self._owned = owned

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        store: Store | str | Path | None = None,
        device: str | Compute | None = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        kv_memory: str | int = KV_MEMORY,
        page_tokens: int = PAGE_TOKENS,
        tenant: str = "",
        salt: bytes = b"",
        planner: Planner | None = None,
        share: bool = False,
        device_reuse: bool = True,
        token_budget: int | None = None,
        sequences_max: int = SEQUENCES_MAX,
        graphs: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Runtime":
        """Load a GGUF file or a Hugging Face directory of the Llama family.

        store: an open store, or a directory to open one in, closed by `close`; None for none.
        device: "cpu" or "cuda", or one that is open: see compute.open_device.
        dtype: "float32", exact to the token, or "bfloat16"; on a device "float16" too.
        threads: of the computation on the CPU. graphs: capture decode steps, on a device that can.
        share: the store may hold blocks of other models, or of this one in another dtype; without
        it that is an error, for such a store would never give a hit.
        kv_memory: bytes of the device tier's pages. progress: gets (layers loaded, layers).
        token_budget: tokens a step computes at most; TOKEN_BUDGET or DEVICE_TOKEN_BUDGET unless
        told.
        Raises ConfigError and StoreError, each with one sentence that says what to do.
        """
        compute = open_device(device) if isinstance(device, str) else device
        number = _dtype_of(dtype, compute)
        _use_threads(threads)
        checkpoint = open_checkpoint(Path(path))
        tokenizer = open_tokenizer(Path(path))
        pool = _pool(checkpoint.config, number, kv_memory, page_tokens, compute)
        model: Model
        if compute is None:
            model = LlamaModel(checkpoint, number, progress)
        else:
            model = DeviceLlama(checkpoint, number, compute, progress, graphs=graphs)
        owned = open_store(store) if isinstance(store, str | Path) else None
        space = None
        if (used := owned or (store if isinstance(store, Store) else None)) is not None:
            identity = f"sha256:{checkpoint.digest().hex()}"
            if not share:
                _refuse_other_model(used, identity)
            space = used.namespace(
                pool.layout,
                model=identity,
                mixed=share,
                tenant=tenant,
                salt=salt,
                attributes=_attributes(checkpoint.config, dtype),
            )
        engine = Engine(
            model,
            pool,
            space=space,
            planner=planner,
            device_reuse=device_reuse,
            token_budget=token_budget or (DEVICE_TOKEN_BUDGET if compute else TOKEN_BUDGET),
            sequences_max=sequences_max,
        )
        return cls(model, tokenizer, engine, owned, compute)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Answer a prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).

        stop: the answer ends before the first of these strings.
        Raises RequestError for a prompt that the model or its pages cannot hold.
        """
        stream = self._submit(prompt, max_tokens, temperature, seed, stop)
        for _ in stream:
            pass
        assert stream.generation is not None
        return stream.generation

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Stream:
        """Answer chat messages as a stream of text. The next turn finds this one's tokens."""
        return self._submit(messages, max_tokens, temperature, seed, stop)

    def _submit(
        self,
        prompt: Prompt,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop: Sequence[str],
    ) -> Stream:
        if isinstance(stop, str) or len(stop) > STOPS_MAX or "" in stop:
            raise ConfigError(f"stop= takes a list of at most {STOPS_MAX} strings, none empty")
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_ids=frozenset(self.tokenizer.stop_ids),
        )
        return Stream(self, self.engine.submit(self.encode(prompt), params), stop)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt as `generate` uses them."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            text = self.tokenizer.chat(cast(Sequence[Message], prompt))
            return self.tokenizer.encode(text, add_special_tokens=False)
        return cast(list[int], list(prompt))

    def close(self) -> None:
        """Close the store if this runtime opened it: what was saved is written to disk."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dtype_of(name: str, compute: Compute | None) -> torch.dtype:
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if compute is not None:
        types["float16"] = torch.float16
    if name not in types:
        raise ConfigError(f"dtype is {name!r}; use {' or '.join(types)}")
    return types[name]


def _use_threads(threads: int | None) -> None:
    if threads is None:
        return
    if not 1 <= threads <= THREADS_MAX:
        raise ConfigError(f"threads is {threads}; use 1 to {THREADS_MAX}")
    torch.set_num_threads(threads)


def _refuse_other_model(store: Store, identity: str) -> None:
    labels = store.labels()
    if labels and not any(label.startswith(identity) for label in labels):
        raise ConfigError(
            f"the store was made for another model ({labels[0][:20]}...); give this one another "
            "store, or let them share it with --share (share=True)"
        )


def _pool(
    config: ModelConfig,
    dtype: torch.dtype,
    kv_memory: str | int,
    page_tokens: int,
    compute: Compute | None,
) -> PagePool:
    page = config.token_bytes(dtype) * page_tokens
    pages = parse_size(kv_memory, "kv_memory") // page
    if pages < 1:
        raise ConfigError(f"kv_memory holds no page; a page of this model takes {page} bytes")
    return PagePool(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        pages=pages,
        page_tokens=page_tokens,
        dtype=dtype,
        compute=compute,
    )


def _attributes(config: ModelConfig, dtype: str) -> dict[str, str]:
    """What gives KV bytes their meaning beside weights and layout."""
    return {
        "rope": f"theta={config.rope_theta!r} scaling={config.rope_scaling!r}",
        "attention": f"heads={config.heads} norm_epsilon={config.norm_epsilon!r}",
        "compute": dtype,
    }


def _could_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string could begin."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _generation(request: Request, text: str) -> Generation:
    assert request.finish_reason is not None
    return Generation(
        text=text,
        tokens=list(request.output),
        finish_reason=request.finish_reason,
        prompt_tokens=request.prompt_tokens,
        computed_tokens=request.computed_tokens,
        reused_tokens=request.reused_tokens,
        tier_tokens=dict(request.tier_tokens),
        bytes_moved=dict(request.bytes_moved),
        ttft_s=request.ttft_s,
        decode_s=request.decode_s,
    )
