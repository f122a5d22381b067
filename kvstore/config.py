"""Settings of a store: one frozen dataclass, from a TOML file and from arguments, validated once.

Every option has a default, a unit in its name or text, and a sentence. Nothing is read from the
environment.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.hashing.chain import HashName
from kvstore.sizes import parse_size
from kvstore.tiers.errors import ConfigError

HOST_DEFAULT_MAX_BYTES = 1 << 30
HOST_MEMORY_SHARE = 0.10
DISK_DEFAULT_MAX_BYTES = 10 << 30
DISK_FREE_SHARE = 0.5
SEGMENT_MIN_BYTES = 1 << 20
SEGMENT_MAX_BYTES = 64 << 20
SEGMENTS_AIM = 32
SEGMENTS_MAX = 256  # each is an open file on disk
CAPACITY_MIN_BYTES = 4 << 20
WRITES_MIN_BYTES = 16 << 20  # A day's; with less, pages of the catalogue would not stay within 5 %.
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Config:
    """What a store is and how much it may use. Sizes in bytes, times in seconds.

    host_capacity_bytes: host memory for blocks, headers included; 0 means the default.
    disk_paths: directories of the disk tier, one for each device; the first is the store's home.
    disk_capacity_bytes: bytes on disk over all paths, catalogue included; 0 means the default.
    disk_writes_per_day_bytes: what may be written to disk in a day, catalogue included; 0 means no
      limit. It is kept within 5 %; what is over it stays in host memory alone.
    persist: keep the host arena as a file on tmpfs, so that it outlives a killed owner.
    arena_directory: the tmpfs that a persistent arena lies in.
    direct: use O_DIRECT where the filesystem has it.
    io_threads: threads that read and write the disks.
    hash: how block keys are made; sha256 where a store is shared with those one does not trust.
    lease_s: how long a lookup keeps its blocks for a load that may follow.
    clean_fraction: share of host memory that write-back keeps clean or free.
    pin_fraction: share of each tier that pins may keep from eviction.
    dirty_age_s: a block older than this is written to disk even without pressure.
    save_queue_blocks: blocks that may wait to be copied into host memory; more are dropped.
    load_queue: loads that may wait or run at once; more are refused.
    """

    host_capacity_bytes: int = 0
    disk_paths: tuple[Path, ...] = ()
    disk_capacity_bytes: int = 0
    disk_writes_per_day_bytes: int = 0
    persist: bool = False
    arena_directory: Path = Path("/dev/shm")
    direct: bool = True
    io_threads: int = 8
    hash: HashName = "xxh3-128"
    lease_s: float = 30.0
    clean_fraction: float = 0.1
    pin_fraction: float = 0.25
    dirty_age_s: float = 5.0
    save_queue_blocks: int = 65_536
    load_queue: int = 1_024

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "io_threads": (1, 64),
            "lease_s": (0.001, 3600),
            "clean_fraction": (0.0, 0.9),
            "pin_fraction": (0.0, 1.0),
            "dirty_age_s": (0.0, 86_400),
            "save_queue_blocks": (1, 1 << 24),
            "load_queue": (1, 1 << 16),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must lie between {low} and {high}")
        if self.hash not in ("xxh3-128", "sha256"):
            raise ConfigError(f"hash is {self.hash!r}; use xxh3-128 or sha256")
        for name in ("host_capacity_bytes", "disk_capacity_bytes"):
            size = getattr(self, name)
            if size and size < CAPACITY_MIN_BYTES:
                raise ConfigError(f"{name} is {size}; give the tier at least {CAPACITY_MIN_BYTES}")
        writes = self.disk_writes_per_day_bytes
        if writes and writes < WRITES_MIN_BYTES:
            raise ConfigError(
                f"disk_writes_per_day_bytes is {writes}; give at least {WRITES_MIN_BYTES}, "
                "or 0 for no limit"
            )
        if len(set(self.disk_paths)) != len(self.disk_paths):
            raise ConfigError("a disk path is listed twice; list each device's directory once")

    @property
    def home(self) -> Path | None:
        """The store's directory: lock, store.toml and counters. None for a store without a disk."""
        return self.disk_paths[0] if self.disk_paths else None


# TOML table and key -> (field, kind). Arguments of kvstore.open are the names in ARGUMENTS.
TOML_OPTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "host": {
        "capacity": ("host_capacity_bytes", "size"),
        "persist": ("persist", "bool"),
        "directory": ("arena_directory", "path"),
    },
    "disk": {
        "paths": ("disk_paths", "paths"),
        "capacity": ("disk_capacity_bytes", "size"),
        "writes_per_day": ("disk_writes_per_day_bytes", "size"),
        "direct": ("direct", "bool"),
        "threads": ("io_threads", "int"),
    },
    "store": {
        "hash": ("hash", "str"),
        "lease_s": ("lease_s", "float"),
        "clean_fraction": ("clean_fraction", "float"),
        "pin_fraction": ("pin_fraction", "float"),
        "dirty_age_s": ("dirty_age_s", "float"),
        "save_queue_blocks": ("save_queue_blocks", "int"),
        "load_queue": ("load_queue", "int"),
    },
}
ARGUMENTS: dict[str, tuple[str, str]] = {
    "host": ("host_capacity_bytes", "size"),
    "disk": ("disk_paths", "paths"),
    "disk_capacity": ("disk_capacity_bytes", "size"),
    "disk_writes_per_day": ("disk_writes_per_day_bytes", "size"),
    **{
        name: pair
        for table in TOML_OPTIONS.values()
        for name, pair in table.items()
        if name not in ("capacity", "paths", "directory", "threads", "writes_per_day")
    },
    "arena_directory": ("arena_directory", "path"),
    "io_threads": ("io_threads", "int"),
}


def load_config(source: str | Path | None = None, **arguments: Any) -> Config:
    """The configuration from a TOML file, a store's directory or neither, with arguments on top.

    source: a `.toml` file, or the directory of a store (short for disk=[directory]).
    arguments: host, disk, disk_capacity, persist, hash, lease_s, ...: see ARGUMENTS.
    Raises ConfigError, in one sentence, for whatever is unknown, of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    if source is not None:
        path = Path(source).expanduser()
        if path.suffix == ".toml" or _is_file(path):
            values.update(_from_toml(path))
        else:
            values["disk_paths"] = (path,)
    for name, value in arguments.items():
        if name not in ARGUMENTS:
            raise ConfigError(_unknown("argument", name, ARGUMENTS))
        if value is not None:
            field, kind = ARGUMENTS[name]
            values[field] = _convert(value, kind, name)
    return Config(**values)


def with_defaults(config: Config, *, free_bytes: int | None) -> Config:
    """Fill in the capacities that were left to the store. `free_bytes`: free at the home path."""
    host = config.host_capacity_bytes
    if not host:
        host = min(HOST_DEFAULT_MAX_BYTES, int(HOST_MEMORY_SHARE * memory_limit_bytes()))
    disk = config.disk_capacity_bytes
    if config.disk_paths and not disk:
        disk = min(DISK_DEFAULT_MAX_BYTES, int(DISK_FREE_SHARE * (free_bytes or 0)))
    return replace(config, host_capacity_bytes=host, disk_capacity_bytes=disk)


def segment_bytes(capacity_bytes: int) -> int:
    """Size of a segment in a tier of this capacity.

    A 64th more than a power of two: a block of 2^n bytes and its header would otherwise lose a slot
    in every segment.
    """
    base = SEGMENT_MIN_BYTES
    while base < SEGMENT_MAX_BYTES and base * SEGMENTS_AIM * 2 <= capacity_bytes:
        base *= 2
    while base * SEGMENTS_MAX < capacity_bytes:
        base *= 2
    return base + base // 64


def memory_limit_bytes() -> int:
    """Memory this process may use: the cgroup's limit where there is one, else the machine's."""
    from kvstore.tiers.io import read_text  # noqa: PLC0415

    limits = []
    for path in CGROUP_LIMITS:
        text = read_text(path).strip()
        if text.isdigit():
            limits.append(int(text))
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=HOST_DEFAULT_MAX_BYTES)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # Whoever opens it as a directory says what is wrong.


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a TOML file or a directory") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    values: dict[str, Any] = {}
    for table, options in document.items():
        if table not in TOML_OPTIONS:
            raise ConfigError(f"{path}: " + _unknown("table", table, TOML_OPTIONS))
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: {table} must be a table, [{table}]")
        for name, value in options.items():
            if name not in TOML_OPTIONS[table]:
                raise ConfigError(f"{path}: " + _unknown("option", name, TOML_OPTIONS[table]))
            field, kind = TOML_OPTIONS[table][name]
            values[field] = _convert(value, kind, f"{table}.{name}")
    return values


def _convert(value: Any, kind: str, option: str) -> Any:
    if kind == "size":
        return parse_size(value, option)
    if kind == "path" and isinstance(value, str | Path):
        return Path(value).expanduser()
    if kind == "paths":
        listed = [value] if isinstance(value, str | Path) else value
        if isinstance(listed, list | tuple) and all(isinstance(p, str | Path) for p in listed):
            return tuple(Path(p).expanduser() for p in listed)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind == "str" and isinstance(value, str):
        return value
    raise ConfigError(f"{option} is {value!r}; it must be a {kind}")


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return f"{what} {name!r} is unknown; {hint}"
