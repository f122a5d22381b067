"""Sizes and times as people write them."""

import pytest

from kvstore.sizes import format_duration, format_size, parse_duration, parse_size
from kvstore.tiers.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        (" 1.5 TB ", 1_500_000_000_000),
        ("500MB", 500_000_000),
        ("2KiB", 2048),
        ("9007199254740993", 9_007_199_254_740_993),  # not a number a float can hold
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text, "host") == size


@pytest.mark.parametrize("text", ["", "GiB", "8 Gibibytes", "-3GiB", "1e9", "8GiB!", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^disk_capacity is [^\n]*$"):
        parse_size(text, "disk_capacity")


def test_sizes_for_people() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1536) == "1.5 KiB"
    assert format_size(3 << 40) == "3.0 TiB"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), (" 15 m ", 900), ("1h", 3600), ("1.5h", 5400), ("2d", 172_800), ("0s", 0)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text, "--ttl") == seconds


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 week", "1h30m", "1H", "9" * 400 + "s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--ttl is [^\n]*$"):
        parse_duration(text, "--ttl")


def test_times_for_people() -> None:
    assert format_duration(-3) == format_duration(0.2) == "0s"
    assert format_duration(90) == "1m 30s"
    assert format_duration(3600) == "1h"
    assert format_duration(90_061) == "1d 1h"
