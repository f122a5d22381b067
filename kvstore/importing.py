"""Import: an archive is read, checked, and what of it is whole goes to the disk of a store.

Without `partial` an archive that is cut off or damaged imports nothing: it is read once before.
With it everything is taken that is whole by itself, up to where it cannot be read any further.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvstore.alone import opened_alone
from kvstore.archive import ArchiveError, ArchiveReader, BlockFrame, check_archive
from kvstore.clock import Clock
from kvstore.disk_import import DiskImport, ImportSpace, Refused
from kvstore.hashing.chain import chain_function
from kvstore.home import owner_alive, require_store
from kvstore.opening import Opened
from kvstore.scrub import Progress
from kvstore.tiers.errors import StoreBusyError
from kvstore.tiers.io import FileIo

BAD_REASONS = frozenset(Refused) - {Refused.NO_ROOM, Refused.TOO_LARGE}


@dataclass
class Imported:
    """What became of an archive's blocks: each is under exactly one of the first three.

    refused: by reason.  complete: the archive was read to its end mark, and is whole.  fault: why
    it was not.
    """

    imported: int = 0
    present: int = 0
    refused: dict[Refused, int] = field(default_factory=dict)
    complete: bool = True
    fault: str = ""
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether some of it was not what an export writes."""
        return not self.complete or any(reason in BAD_REASONS for reason in self.refused)

    def document(self) -> dict[str, Any]:
        """As `kvstore import --json` prints it."""
        return {
            "imported": self.imported,
            "present": self.present,
            "refused": {str(reason): blocks for reason, blocks in self.refused.items()},
            "complete": self.complete,
            "fault": self.fault,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


def import_archive(
    directory: Path,
    source: BinaryIO,
    progress: Progress | None = None,
    io: FileIo | None = None,
    *,
    partial: bool = False,
    clock: Clock | None = None,
) -> Imported:
    """Import an archive into the store in `directory`, which has no owner.

    source: the archive, from where it stands; without `partial` it must be seekable, for it is read
    twice. Raises ArchiveError for what is no archive, of another version or hash, or without
    `partial` not whole: nothing was imported then. Raises StoreBusyError beside an owner,
    ConfigError or StoreError for what is not a store or cannot be written.
    """
    io, clock = io or FileIo(), clock or Clock()
    facts = require_store(directory, io)
    if owner_alive(directory, io):
        raise StoreBusyError(f"{directory} is in use; stop its owner, import, and start it again")
    began_s = clock.monotonic()
    start = 0 if partial else source.tell()
    reader = ArchiveReader(source.read)
    if reader.hash_name != facts.hash:
        raise ArchiveError(
            f"the archive's keys were made with {reader.hash_name!r:.40}, the store's with "
            f"{facts.hash}; import it into a store of that hash"
        )
    if not partial:
        source.seek(start)
        try:
            check_archive(source.read)
        except ArchiveError as fault:
            raise ArchiveError(
                f"{fault}; nothing was imported, and --partial imports what is whole of it"
            ) from None
        source.seek(start)
        reader = ArchiveReader(source.read)
    with opened_alone(directory, io, clock) as opened:
        done = _import(opened, reader, progress)
    done.seconds = clock.monotonic() - began_s
    return done


def _import(opened: Opened, reader: ArchiveReader, progress: Progress | None) -> Imported:
    """Read frames and hand them on."""
    target = DiskImport(opened, chain_function(opened.config.hash))
    spaces: list[ImportSpace | Refused] = []

    def length_of(number: int) -> int | None:
        space = spaces[number]
        return space.block_bytes if isinstance(space, ImportSpace) else None

    done = Imported()
    try:
        for frame in reader.frames(length_of):
            if not isinstance(frame, BlockFrame):
                spaces.append(target.space(frame.namespace))
                continue
            space = spaces[frame.number]
            if isinstance(space, Refused):
                target.refused[space] += 1
            elif frame.body is None:
                target.refused[Refused.LENGTH] += 1
            elif not frame.whole:
                target.refused[Refused.CHECKSUM] += 1
            else:
                target.add(space, frame.body)
            if progress is not None:
                progress(reader.bytes, reader.bytes)
    except ArchiveError as fault:
        # Without `partial` it was whole a moment ago: what is whole of it now was imported.
        done.fault = str(fault)
    target.flush()
    done.complete = reader.complete
    done.imported, done.present = target.imported, target.present
    done.refused = dict(sorted(target.refused.items()))
    done.bytes = reader.bytes
    return done
