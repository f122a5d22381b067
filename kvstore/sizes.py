"""Sizes and times as people write them ("8GiB", "15m"), and as programs need them."""

import re
from fractions import Fraction

from kvstore.tiers.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SIZE_MAX_BYTES = 1 << 62
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, option: str) -> int:
    """Bytes of "8GiB", "1.5 TB", "4096" or 4096. `option` names the setting in the error.

    Returns: a number of bytes; raises ConfigError for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"{option} is {text}; a size cannot be negative")
        return _bounded(text, option)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ConfigError(f'{option} is {text!r}; write a size such as "8GiB", "500MB" or 4096')
    return _bounded(int(Fraction(match[1]) * units[match[2].lower()]), option)


def format_size(size_bytes: float) -> str:
    """A size for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def parse_duration(text: str, option: str) -> float:
    """Seconds of "90s", "15m", "1.5h" or "2d". `option` names the setting in the error.

    Returns: seconds; raises ConfigError for anything else.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f'{option} is {text!r:.100}; write a time such as "90s", "15m" or "2d"')
    return float(Fraction(match[1]) * SECONDS[match[2]])


def format_duration(seconds: float) -> str:
    """A time for people, in its two largest units: 5400 -> "1h 30m"."""
    left, parts = max(0, round(seconds)), []
    for unit, size in reversed(SECONDS.items()):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def _bounded(size_bytes: int, option: str) -> int:
    if size_bytes > SIZE_MAX_BYTES:
        raise ConfigError(f"{option} is too large; a size is at most {SIZE_MAX_BYTES} bytes")
    return size_bytes
