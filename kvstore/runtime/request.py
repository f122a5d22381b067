"""One request: its tokens, its place in the engine, and what it was given for free."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from torch import Tensor

from kvstore.runtime.sampler import Sampling
from kvstore.sequence import Sequence
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import KvstoreError

if TYPE_CHECKING:
    from kvstore.loading import Load

TOKENS_MAX = 1 << 20  # most new tokens that one request may ask for


class RequestError(KvstoreError):
    """A request that this engine can never serve: too long, empty, or tokens it does not know."""


class QueueFullError(KvstoreError):
    """The waiting queue is full; the request was not taken."""


class State(StrEnum):
    """Where a request is. It ends in FINISHED or ABORTED; preemption puts it back to WAITING."""

    WAITING = "waiting"  # holds no page
    LOADING = "loading"  # pages are its own, and the store is copying into them
    RUNNING = "running"  # takes part in steps
    FINISHED = "finished"
    ABORTED = "aborted"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, or a stop string of the caller
    LENGTH = "length"  # max_tokens
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for.

    max_tokens: new tokens at most. temperature: 0 is greedy. seed: equal seeds give equal tokens,
    whatever else is in the batch. stop_ids: tokens that end the answer; the one met is kept.
    cuts: token positions at which a prefill chunk ends, whatever the budget: for comparing runs.
    keep_logits: keep the logits of every new token on the request: for comparing runs.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    cuts: tuple[int, ...] = ()
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= TOKENS_MAX:
            raise RequestError(f"max_tokens must lie in 1..{TOKENS_MAX}, not {self.max_tokens}")
        Sampling(self.temperature, self.seed)  # raises ConfigError for values that make no sense

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.seed)


def _no_tokens() -> dict[TierName, int]:
    return dict.fromkeys(TierName, 0)


@dataclass(eq=False)
class Request:
    """A request from submission to its end. The engine writes it; callers read it.

    tokens, text positions: `sequence` holds the prompt and all new tokens, `output` the new ones.
    computed: tokens whose KV lies in `pages` (or will, once `load` is through).
    offered: full blocks that were offered to the device tier.
    """

    number: int
    sequence: Sequence
    prompt_tokens: int
    params: SamplingParams
    submitted: float = field(default_factory=time.perf_counter)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (start, length) of prefill steps
    # Places
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    offered: int = 0
    sound: int = 0  # tokens whose KV does not depend on `load`
    load: "Load | None" = None
    probing: bool = False  # `load` is a probe; the rest is planned after it
    stalled: bool = False  # a layer of `load` did not come in time
    patience_s: float = 0.0
    load_until: float = 0.0
    bypass: bool = False  # the store let it wait too long once: it is not asked again
    joins: "tuple[Request, int] | None" = None  # (who is producing, which block)
    # What it was given and what it cost. Counted once: preemption and retries change nothing.
    tier_tokens: dict[TierName, int] = field(default_factory=_no_tokens)
    bytes_moved: dict[TierName, int] = field(default_factory=_no_tokens)
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens computed again, after a preemption
    reached: int = 0  # the furthest that `computed` ever was
    failed_loads: int = 0
    joined: bool = False
    first_token: float | None = None
    last_token: float | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in (State.FINISHED, State.ABORTED)

    @property
    def pending(self) -> int:
        """Tokens that still have no KV: the rest of the prompt, or the token sampled last."""
        return self.sequence.length - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its next step computes the one token that was sampled last."""
        return bool(self.output) and self.pending == 1

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return sum(self.tier_tokens.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed; what preemption computes again is not in."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token; 0 before it."""
        return self.first_token - self.submitted if self.first_token else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last one."""
        return self.last_token - self.first_token if self.first_token and self.last_token else 0.0
