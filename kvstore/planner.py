"""Load or compute: the planner, first form. Costs are measured here, never configured.

Each tier has a model (bytes, blocks) -> seconds, fitted to the transfers really made; the engine
has one for prefill, (new tokens, context) -> seconds, linear plus attention's quadratic part. A
plan takes the prefix that saves most time: it stops at the block from which computing is cheaper.

A tier without a measured cost is never trusted with a whole prompt: the plan asks for a probe of a
few blocks and says so (`again`), and the caller plans the rest with the cost that the probe showed.
The planner does no I/O and has no lock: it belongs to the engine's thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvstore.tiers.errors import ConfigError

PROBE_BLOCKS = 8  # a probe of an unknown tier moves at most this much
EXPLORE_EVERY = 64  # of so many refusals of a tier one is spent on measuring it again
LOAD_MEMORY = 0.8  # weight of the last transfer but one, against the last: about 5 count
PREFILL_MEMORY = 0.95  # about 20 steps count: the engine's speed changes slowly
SURPRISE_MAX = 4.0
SURPRISES_MAX = 3
TRUSTED_AFTER = 3  # measurements, before which any surprise is taken as it is
COST_MAX_S = 3600.0  # a predicted cost above an hour is absurd, and treated as unknown

Floats = npt.NDArray[np.float64]


class Decision(StrEnum):
    """What a plan decided. Every plan is counted under exactly one of these."""

    LOAD = "loaded"  # loading wins for at least one block
    DECLINE = "declined"  # found, but computing is cheaper, or the cost is unknown
    EXPLORE = "explored"  # loads a few blocks to learn what the tier costs
    NOTHING = "nothing"  # the store has nothing that the device lacks


@dataclass(frozen=True)
class Plan:
    """What to load of a prompt.

    tokens: load the prefix up to this token; equal to `have` when nothing is to be loaded.
    again: the load is a probe; plan once more after it, with what it showed.
    load_s, saved_s: predicted seconds of the load, and of the prefill it replaces.
    """

    decision: Decision
    tokens: int
    again: bool = False
    load_s: float = 0.0
    saved_s: float = 0.0


class CostModel:
    """Seconds as a sum of non-negative weights times features, fitted as observations arrive.

    Least squares over a fading memory. An error counts relative to the cost, so a small transfer
    teaches as much as a large one. A surprise counts as SURPRISE_MAX times the expected cost at
    most, so that one stall does not undo what was learnt; SURPRISES_MAX in a row are no accident:
    what was learnt before is forgotten.
    """

    def __init__(self, features: int, memory: float) -> None:
        self._memory = memory
        self._normal = np.zeros((features, features))
        self._moment = np.zeros(features)
        self._weights: Floats | None = None
        self._surprises = 0
        self.observations = 0

    def observe(self, features: Floats, seconds: float) -> None:
        """Learn from one measurement; a time that no clock gives is ignored."""
        if not 0.0 < seconds < COST_MAX_S or not np.isfinite(features).all():
            return
        expected = self.predict(features)
        if expected is None:
            expected = seconds
        elif self.observations >= TRUSTED_AFTER:
            usual = min(max(seconds, expected / SURPRISE_MAX), expected * SURPRISE_MAX)
            self._surprises = 0 if seconds == usual else self._surprises + 1
            if self._surprises >= SURPRISES_MAX:
                self._normal[:], self._moment[:], self._surprises = 0.0, 0.0, 0
                usual = expected = seconds
            seconds = usual
        scale = 1.0 / (expected * min(seconds, expected))
        self._normal = self._memory * self._normal + scale * np.outer(features, features)
        self._moment = self._memory * self._moment + scale * seconds * features
        self._weights = None
        self.observations += 1

    def predict(self, features: Floats) -> float | None:
        """Seconds for one row of features, or None while the cost is unknown or absurd."""
        seconds = self.predict_many(features[None])
        return None if seconds is None else float(seconds[0])

    def predict_many(self, features: Floats) -> Floats | None:
        """Seconds for rows of features [n, k], or None while the cost is unknown or absurd."""
        weights = self.weights()
        if weights is None:
            return None
        seconds = features @ weights
        return seconds if ((seconds > 0) & (seconds < COST_MAX_S)).all() else None

    def weights(self) -> Floats | None:
        """The fitted weights, all non-negative; None before the first observation."""
        if self.observations == 0:
            return None
        if self._weights is None:
            self._weights = _non_negative(self._normal, self._moment)
        return self._weights


def _non_negative(normal: Floats, moment: Floats) -> Floats:
    """Solve the normal equations; features with a negative weight are dropped, worst first."""
    keep = np.arange(len(moment))
    weights = np.zeros(len(moment))
    while len(keep):
        # The least-norm solution: features seen only together share their cost.
        part = np.linalg.lstsq(normal[np.ix_(keep, keep)], moment[keep], rcond=1e-9)[0]
        if (part >= 0).all():
            weights[keep] = part
            break
        keep = np.delete(keep, int(part.argmin()))
    return weights


# Scales keep the features near 1 in ordinary use, and say how a cost is split until measurements of
# several sizes tell its parts apart: of a probe's time about half is taken to be fixed (it is the
# first transfer of its kind), of a large transfer's nearly nothing; likewise for prefill.
def _load_features(size_bytes: Floats, blocks: Floats) -> Floats:
    return np.stack([np.full_like(blocks, 0.3), blocks / 64, size_bytes / 16e6], axis=-1)


def _prefill_features(new: Floats, context: Floats) -> Floats:
    pairs = new * context + new * (new + 1) / 2
    return np.stack([np.full_like(new, 0.05), new / 256, pairs / 4e6], axis=-1)


def _floats(*numbers: float) -> tuple[Floats, ...]:
    return tuple(np.float64(number) * np.ones(()) for number in numbers)


class Planner:
    """Decides for each prompt how much of a found prefix to load. Belongs to one thread.

    deadline_s: no load is planned that is predicted to take longer.
    eager: load whatever is found, whatever it costs: for experiments and tests.
    """

    def __init__(self, *, deadline_s: float = 30.0, eager: bool = False) -> None:
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, not {deadline_s}")
        self.deadline_s = deadline_s
        self.eager = eager
        self._prefill = CostModel(3, PREFILL_MEMORY)
        self._tiers: dict[str, CostModel] = {}
        self._refusals: dict[str, int] = {}
        self._decisions = dict.fromkeys(Decision, 0)
        self._tokens = dict.fromkeys(Decision, 0)
        self._joined = 0
        self._saved_s = 0.0

    # Costs

    def observe(self, new: int, context: int, seconds: float) -> None:
        """The engine computed `new` tokens over `context` earlier ones in `seconds`."""
        if new > 0 and context >= 0:
            self._prefill.observe(_prefill_features(*_floats(new, context)), seconds)

    def observe_load(
        self, bytes_by_tier: Mapping[str, int], blocks_by_tier: Mapping[str, int], seconds: float
    ) -> None:
        """A load moved these bytes and blocks in `seconds`. Of a load from several tiers, what the
        faster ones are known to take is subtracted, and the rest is the slowest one's."""
        moved = [tier for tier, blocks in blocks_by_tier.items() if blocks > 0]
        if not moved:
            return
        slowest = max(moved, key=lambda tier: self.load_s(tier, 1 << 24, 16) or COST_MAX_S)
        rest = seconds
        for tier in moved:
            if tier != slowest:
                rest -= self.load_s(tier, bytes_by_tier[tier], blocks_by_tier[tier]) or 0.0
        features = _load_features(*_floats(bytes_by_tier[slowest], blocks_by_tier[slowest]))
        self._tier(slowest).observe(features, max(rest, seconds / 10))

    def prefill_s(self, new: int, context: int) -> float | None:
        """Predicted seconds to compute `new` tokens over `context` earlier ones, if known."""
        return self._prefill.predict(_prefill_features(*_floats(new, context))) if new > 0 else 0.0

    def load_s(self, tier: str, size_bytes: int, blocks: int) -> float | None:
        """Predicted seconds to load from a tier; None if unknown."""
        if blocks <= 0:
            return 0.0
        return self._tier(tier).predict(_load_features(*_floats(size_bytes, blocks)))

    def _tier(self, tier: str) -> CostModel:
        return self._tiers.setdefault(tier, CostModel(3, LOAD_MEMORY))

    # Plans

    def plan(
        self,
        *,
        have: int,
        total: int,
        spans: Sequence[tuple[str, int]],
        block_tokens: int,
        block_bytes: int,
        deadline_s: float | None = None,
        probed: bool = False,
    ) -> Plan:
        """Which prefix of a prompt of `total` tokens to load, when the device has `have` of them.

        spans: (tier, blocks) in the order of the prompt, from token `have` on.
        probed: this is the plan after a probe; it never asks for another one.

        Returns: a Plan with decision LOAD, EXPLORE, DECLINE or NOTHING.
        """
        spans = [span for span in spans if span[1] > 0]
        found = sum(blocks for _, blocks in spans)
        if found == 0:
            return self._decided(Plan(Decision.NOTHING, have), 0, probed)
        if self.eager:
            whole = Plan(Decision.LOAD, have + found * block_tokens)
            return self._decided(whole, found * block_tokens, probed)
        reach = have + block_tokens * np.arange(found + 1)
        saved = self._savings(reach, total)
        load = self._loading(spans, block_bytes)  # shorter than `reach` where a tier is unknown
        gain = np.where(load <= min(deadline_s or self.deadline_s, self.deadline_s), 0.0, -np.inf)
        gain += saved[: len(load)] - load
        best = len(gain) - 1 - int(gain[::-1].argmax())  # the longest of equally good prefixes
        plan = Plan(
            Decision.LOAD if best else Decision.DECLINE,
            int(reach[best]),
            load_s=float(load[best]),
            saved_s=float(saved[best]),
        )
        if best + 1 == len(load) and best < found:  # everything up to an unknown tier wins
            if not probed and self._prefill.observations:
                probe = min(found, best + PROBE_BLOCKS)
                plan = Plan(Decision.EXPLORE, int(reach[probe]), again=probe < found)
        elif not best and not probed and self._due(spans[0][0]):
            plan = Plan(Decision.EXPLORE, int(reach[min(found, PROBE_BLOCKS)]))
        return self._decided(plan, found * block_tokens, probed)

    def _savings(self, reach: npt.NDArray[np.int64], total: int) -> Floats:
        """Seconds of prefill that each prefix replaces; 0 while prefill's cost is unknown."""
        tokens = reach.astype(np.float64)
        rest = self._prefill.predict_many(_prefill_features(total - tokens, tokens))
        return np.zeros(len(reach)) if rest is None else rest[0] - rest

    def _loading(self, spans: Sequence[tuple[str, int]], block_bytes: int) -> Floats:
        """Seconds to load 0, 1, 2, ... blocks; ends before the first block of an unknown tier."""
        parts = [np.zeros(1)]
        for tier, blocks in spans:
            counts = np.arange(1, blocks + 1, dtype=np.float64)
            seconds = self._tier(tier).predict_many(_load_features(counts * block_bytes, counts))
            if seconds is None:
                break
            parts.append(parts[-1][-1] + seconds)
        return np.concatenate(parts)

    def _due(self, tier: str) -> bool:
        self._refusals[tier] = self._refusals.get(tier, 0) + 1
        return self._refusals[tier] % EXPLORE_EVERY == 0

    def _decided(self, plan: Plan, found_tokens: int, probed: bool) -> Plan:
        if not probed:  # A prompt's probe and the plan after it are one decision.
            self._decisions[plan.decision] += 1
            self._tokens[plan.decision] += found_tokens
        self._saved_s += max(0.0, plan.saved_s - plan.load_s) if plan.tokens else 0.0
        return plan

    def joined(self) -> None:
        """Count a request that waits for blocks another request is already loading or computing."""
        self._joined += 1

    def counters(self) -> dict[str, int | float]:
        """Decisions so far (requests), the tokens found in them, and predicted seconds saved."""
        counts: dict[str, int | float] = {str(kind): n for kind, n in self._decisions.items()}
        counts |= {f"{kind}_tokens": n for kind, n in self._tokens.items()}
        return counts | {"joined": self._joined, "seconds_saved": self._saved_s}
