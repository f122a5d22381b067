"""What `kvstore demo` found out, as build/demo.json and as a table. Pure: answers in, figures out.

With several questions, of each run: `ttft_s` and `decode_tokens_per_s` are medians over the
questions, `same_as_cold` speaks of all of them, and the counts, the bytes and the tokens are those
of the first question.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.sizes import format_size

NEAR_TIE = 1e-4  # of two logits this close, another rounding may choose the other
COLUMNS = ["", "first token", "speed-up", "computed", "reused", "moved", "tokens/s", "same"]
LABELS = {"disk_after_restart": "disk, restarted"}


@dataclass(frozen=True)
class Run:
    """One run of all questions: its entry in demo.json, and what only the table shows."""

    entry: dict[str, Any]
    tier_bytes: dict[str, int]
    forks: list[str]


def make_run(name: str, answers: Sequence[dict[str, Any]], cold: Sequence[dict[str, Any]]) -> Run:
    """One run from its answers, in the order of the questions, against the cold ones."""
    main = answers[0]
    pairs = list(zip(answers, cold, strict=True))
    entry = {
        "name": name,
        "ttft_s": statistics.median(answer["ttft_s"] for answer in answers),
        "computed_tokens": main["computed_tokens"],
        "reused_tokens": main["reused_tokens"],
        "tier_tokens": main["tier_tokens"],
        "bytes_moved": sum(main["tier_bytes"].values()),
        "decode_tokens_per_s": statistics.median(a["decode_tokens_per_s"] for a in answers),
        "tokens": main["tokens"],
        "same_as_cold": all(answer["tokens"] == other["tokens"] for answer, other in pairs),
    }
    forks = [fork for answer, other in pairs if (fork := _fork(answer, other))]
    return Run(entry, main["tier_bytes"], forks)


def make_document(model: str, prompt_tokens: int, runs: Sequence[Run]) -> dict[str, Any]:
    """The content of demo.json."""
    return {"model": model, "prompt_tokens": prompt_tokens, "runs": [run.entry for run in runs]}


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    """One row a run, under COLUMNS."""
    return [_row(run, runs[0]) for run in runs]


def summary(runs: Sequence[Run]) -> list[str]:
    """The outcome in a sentence, and one more for each answer that was not the cold one."""
    cold_s = runs[0].entry["ttft_s"]
    gains = [cold_s / run.entry["ttft_s"] for run in runs[1:]]
    speed = f"{min(gains):.1f} to {max(gains):.1f} times sooner"
    others = [f"  {_label(run)}: {fork}" for run in runs for fork in run.forks]
    if others:
        return [f"The first token {speed}, but not all answers were the cold ones:", *others]
    return [f"The same answers, token for token, and the first token {speed}."]


def _row(run: Run, cold: Run) -> list[str]:
    entry = run.entry
    return [
        _label(run),
        _seconds(entry["ttft_s"]),
        f"{cold.entry['ttft_s'] / entry['ttft_s']:.1f} x",
        str(entry["computed_tokens"]),
        _by_tier({tier: (n, str(n)) for tier, n in entry["tier_tokens"].items()}),
        _moved(run.tier_bytes),
        f"{entry['decode_tokens_per_s']:.1f}",
        "-" if run is cold else "no" if run.forks else "yes",
    ]


def _label(run: Run) -> str:
    name: str = run.entry["name"]
    return LABELS.get(name, name)


def _by_tier(amounts: dict[str, tuple[int, str]]) -> str:
    """Such as "1856 disk", or "512 host, 1344 disk"."""
    return ", ".join(f"{text} {tier}" for tier, (amount, text) in amounts.items() if amount) or "0"


def _moved(tier_bytes: dict[str, int]) -> str:
    """Such as "81.6 MiB"; the tiers are named where there are several."""
    moved = {tier: (n, format_size(n)) for tier, n in tier_bytes.items() if n}
    return _by_tier(moved) if len(moved) > 1 else format_size(sum(tier_bytes.values()))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _fork(answer: dict[str, Any], cold: dict[str, Any]) -> str:
    """Where an answer leaves the cold one, in words; empty when it does not."""
    ours, theirs = answer["tokens"], cold["tokens"]
    if ours == theirs:
        return ""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    near = at < len(cold["margins"]) and cold["margins"][at] < NEAR_TIE
    where = f"question {answer['question'] + 1} differs from token {at} on"
    return f"{where}, where the cold run had a near-tie" if near else where
