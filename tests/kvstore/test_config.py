"""Settings: what is accepted, and that what is wrong is said in one sentence that helps."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import (
    CAPACITY_MIN_BYTES,
    HOST_DEFAULT_MAX_BYTES,
    Config,
    load_config,
    memory_limit_bytes,
    segment_bytes,
    with_defaults,
)
from kvstore.tiers.errors import ConfigError

FULL = """
[host]
capacity = "1.5GiB"
persist = true
directory = "/dev/shm"
[disk]
paths = ["/var/cache/a", "/var/cache/b"]
capacity = "100 GB"
direct = false
threads = 4
[store]
hash = "sha256"
lease_s = 3
clean_fraction = 0.2
save_queue_blocks = 77
"""


def refused(text: str, *needles: str) -> None:
    """One sentence, and it names what is wrong."""
    assert "\n" not in text and text
    for needle in needles:
        assert needle in text


def test_toml_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(FULL)
    config = load_config(path, disk_capacity="1GiB", lease_s=5)
    assert config.host_capacity_bytes == 3 << 29
    assert config.persist and not config.direct
    assert config.disk_paths == (Path("/var/cache/a"), Path("/var/cache/b"))
    assert config.disk_capacity_bytes == 1 << 30  # the argument wins
    assert (config.io_threads, config.hash, config.lease_s) == (4, "sha256", 5.0)
    assert (config.clean_fraction, config.save_queue_blocks) == (0.2, 77)
    assert config.home == Path("/var/cache/a")


def test_a_directory_is_short_for_its_disk(tmp_path: Path) -> None:
    assert load_config(tmp_path).disk_paths == (tmp_path,)
    assert load_config(str(tmp_path / "not-made-yet")).home == tmp_path / "not-made-yet"


def test_an_argument_that_is_none_counts_as_not_given() -> None:
    assert load_config(host=None, disk=None) == Config()


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("[hots]\ncapacity = 1", ("hots", "did you mean host?")),
        ("[host]\ncapcity = 1", ("capcity", "did you mean capacity?")),
        ("host = 3", ("host", "[host]")),
        ("[host]\ncapacity = 'lots'", ("host.capacity", "8GiB")),
        ("[host]\ncapacity = -1", ("host.capacity", "negative")),
        ("[host]\ncapacity = 1.5", ("host.capacity", "8GiB")),
        ("[host]\npersist = 'yes'", ("host.persist", "bool")),
        ("[disk]\npaths = 3", ("disk.paths", "paths")),
        ("[disk]\npaths = ['/a', 3]", ("disk.paths", "paths")),
        ("[disk]\npaths = ['/a', '/a']", ("listed twice",)),
        ("[disk]\nthreads = true", ("disk.threads", "int")),
        ("[disk]\nthreads = 0", ("io_threads", "between 1 and 64")),
        ("[store]\nhash = 'md5'", ("md5", "xxh3-128", "sha256")),
        ("[store]\nlease_s = 0", ("lease_s", "between")),
        ("[store]\nlease_s = nan", ("lease_s", "between")),
        ("[store]\nclean_fraction = 2.0", ("clean_fraction", "between")),
        ("[host]\ncapacity = 1000", ("host_capacity_bytes", str(CAPACITY_MIN_BYTES))),
        ("[host", ("cannot be read as TOML",)),
        ("\x00", ("cannot be read as TOML",)),
    ],
)
def test_wrong_toml(tmp_path: Path, text: str, needles: tuple[str, ...]) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    refused(str(caught.value), *needles)


def test_toml_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "absent.toml")
    refused(str(caught.value), "absent.toml", "does not exist")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("binary.toml", "folder.toml"):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        refused(str(caught.value), name, "cannot be read")


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        ({"hosts": "1GiB"}, ("hosts", "did you mean host?")),
        ({"zzz": 1}, ("zzz", "known are")),
        ({"host": 3.5}, ("host", "8GiB")),
        ({"host": "9" * 400 + "GiB"}, ("host", "too large")),
        ({"host": True}, ("host", "8GiB")),
        ({"disk": {"a": 1}}, ("disk", "paths")),
        ({"lease_s": "long"}, ("lease_s", "float")),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], needles: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**arguments)
    refused(str(caught.value), *needles)


def test_defaults_are_bounded_by_the_memory_of_this_process() -> None:
    config = with_defaults(Config(disk_paths=(Path("/d"),)), free_bytes=8 << 30)
    assert 0 < config.host_capacity_bytes <= HOST_DEFAULT_MAX_BYTES
    assert config.host_capacity_bytes <= memory_limit_bytes() // 10
    assert config.disk_capacity_bytes == 4 << 30
    given = Config(host_capacity_bytes=5 << 20, disk_capacity_bytes=6 << 20)
    assert with_defaults(given, free_bytes=None) == given
    assert with_defaults(Config(), free_bytes=None).disk_capacity_bytes == 0


@pytest.mark.parametrize("capacity", [4 << 20, 100 << 20, 1 << 30, 1 << 40])
def test_a_segment_holds_whole_blocks_of_a_power_of_two(capacity: int) -> None:
    size = segment_bytes(capacity)
    assert size % 4096 == 0
    assert size * 2 <= capacity
    block = size // 65 * 16  # a quarter of the power of two below
    assert size // (block + 4096) == 4
