"""A store without an owner, opened by a command for the moment: its disk, and next to no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.clock import Clock
from kvstore.config import CAPACITY_MIN_BYTES, load_config
from kvstore.home import require_store
from kvstore.opening import Opened, open_parts
from kvstore.tiers.io import FileIo


@contextmanager
def opened_alone(directory: Path, io: FileIo, clock: Clock) -> Iterator[Opened]:
    """The parts of an existing store, started, and closed again at the end.

    Opening mends what a start mends: a damaged catalogue is rebuilt, blocks without a parent go.
    Blocks in the arena of an owner that was killed stay there for the next. Raises StoreBusyError
    where there is an owner, ConfigError or StoreError for what is not a store or cannot be opened.
    """
    facts = require_store(directory, io)
    config = load_config(directory, host=CAPACITY_MIN_BYTES, hash=facts.hash)
    parts = open_parts(config, io, clock)
    try:
        parts.start()
        if parts.starter.failure is not None:
            raise parts.starter.failure
        yield parts
    finally:
        parts.close()
