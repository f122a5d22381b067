"""What becomes of a wish to pin: values, never exceptions."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class PinRefusal(StrEnum):
    """Why a prefix was not pinned. Nothing has changed then."""

    OVER_BUDGET = "over_budget"  # all pins together would cover more than their share
    NOT_STORED = "not_stored"  # no block of the prefix is in any tier
    TOO_MANY = "too_many"  # as many pins, or keys under pins, as there may be
    STARTING = "starting"  # the disk's catalogue is still being read
    NOT_WRITTEN = (
        "not_written"  # the pin would not outlive this process: its file cannot be written
    )


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin as it is now.

    blocks, bytes: what it covers, shared blocks included; stored_blocks: those in some tier now.
    expires_at: seconds since 1970, moved on by every hit to `ttl_s` after it.
    key: of its last block, in hex.  label: model and tenant, "" where they are not known.
    """

    pin_id: int
    blocks: int
    bytes: int
    expires_at: float
    stored_blocks: int
    ttl_s: float
    key: str
    label: str


@dataclass(frozen=True, slots=True)
class PinRefused:
    """A prefix that was not pinned, and why."""

    reason: PinRefusal


def document(answer: Pinned | PinRefused) -> dict[str, Any]:
    """As `kvstore pin --prefix --json` prints it: the pin, or why there is none."""
    if isinstance(answer, PinRefused):
        return {"pin": None, "refused": str(answer.reason)}
    return {"pin": asdict(answer), "refused": None}
