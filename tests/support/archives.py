"""Archives for tests: of small stores with known prompts, and forged ones."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.archive import FRAME_BYTES, HEADER_BYTES, ArchiveReader, ArchiveWriter, NameFrame
from kvstore.exporting import Exported, Selection, export_store
from kvstore.hashing.chain import chain_function
from kvstore.hashing.checksum import run_checksums
from kvstore.hashing.namespace import root_key
from kvstore.importing import Imported, import_archive
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import RecordFormat
from support.checks import assert_at_rest
from support.engine import Engine, prompt

LAYOUT = Layout.opaque(layers=2, run_bytes=(600, 77), dtype="fp8", format="e", block_tokens=4)
SIZES: dict[str, Any] = {"host": "4MiB", "disk_capacity": "8MiB"}
BLOCKS = 8
MEDIA = {1: bytes(range(32))}
Tokens = npt.NDArray[np.int32]


def prompts() -> list[tuple[str, Tokens]]:
    """Tenant and tokens: two prompts that share two blocks, and one of another tenant."""
    first = prompt(4 * BLOCKS + 1)
    other = np.concatenate([first[:8], prompt(4 * BLOCKS - 7, seed=2)])
    return [("a", first), ("a", other), ("b", prompt(4 * BLOCKS + 1, seed=3))]


def engine_of(store: kvstore.Store, tenant: str) -> Engine:
    space = store.namespace(LAYOUT, model="m", tenant=tenant, salt=b"a secret")
    return Engine(space, 2 * BLOCKS)


def fill(directory: Path) -> Path:
    with kvstore.open(directory, **SIZES) as store:
        for tenant, tokens in prompts():
            engine_of(store, tenant).save(tokens)
        engine_of(store, "b").save(prompts()[0][1], media=MEDIA)
    return directory


def empty(directory: Path, **sizes: str) -> Path:
    kvstore.open(directory, **{**SIZES, **sizes}).close()
    return directory


def exported(directory: Path, **selection: str) -> tuple[bytes, Exported]:
    sink = io.BytesIO()
    done = export_store(directory, sink.write, Selection(**selection))
    return sink.getvalue(), done


def imported(directory: Path, data: bytes, *, partial: bool = False) -> Imported:
    return import_archive(directory, io.BytesIO(data), partial=partial)


def hits(directory: Path) -> list[int]:
    """Blocks of each prompt that are there; every byte of them is compared."""
    with kvstore.open(directory, **SIZES) as store:
        found = [engine_of(store, tenant).ask(tokens).tokens // 4 for tenant, tokens in prompts()]
        found.append(engine_of(store, "b").ask(prompts()[0][1], media=MEDIA).tokens // 4)
        assert_at_rest(store)
    return found


def boundaries(data: bytes) -> list[int]:
    """Where each frame begins, and the end."""
    found, at = [], HEADER_BYTES
    while at < len(data):
        found.append(at)
        at += FRAME_BYTES + int.from_bytes(data[at + 8 : at + 16], "little")
    return [*found, at]


@dataclass
class Forged:
    """An archive with right checksums around whatever it is told to hold."""

    sink: io.BytesIO = field(default_factory=io.BytesIO)

    def __post_init__(self) -> None:
        self.writer = ArchiveWriter(self.sink.write, "xxh3-128", 1)

    def data(self) -> bytes:
        self.writer.end()
        return self.sink.getvalue()


def frames_of(archive: bytes) -> tuple[list[Namespace], list[tuple[int, bytearray]]]:
    """What an archive holds."""
    reader = ArchiveReader(io.BytesIO(archive).read)
    size = 4096 + LAYOUT.payload_bytes
    names: list[Namespace] = []
    blocks: list[tuple[int, bytearray]] = []
    for frame in reader.frames(lambda _: size):
        if isinstance(frame, NameFrame):
            names.append(frame.namespace)
        else:
            blocks.append((frame.number, frame.body or bytearray()))
    return names, blocks


def reseal(body: bytearray) -> bytearray:
    """A header's checksum made right again."""
    shape = RecordFormat.of(LAYOUT)
    header = np.frombuffer(body, np.uint8)[: shape.header_bytes][None].copy()
    shape.seal(header)
    body[: shape.header_bytes] = header.tobytes()
    return body


def first_block(layout: Layout, digest: bytes) -> bytes:
    """A record that is right in every way, under a namespace that it has no business in."""
    shape, root = RecordFormat.of(layout), root_key(digest)
    tokens = np.ones((1, layout.block_tokens), np.int32)
    headers = shape.build(
        keys=chain_function("xxh3-128")(root, tokens, None),
        parents=np.frombuffer(root, np.uint8)[None],
        namespace=digest,
        first_depth=0,
        first_generation=1,
        tokens=tokens,
        created_s=1,
    )
    payload = np.zeros(shape.payload_bytes, np.uint8)
    shape.checksums(headers)[0] = run_checksums(payload, layout.run_offsets, layout.run_lengths)
    shape.seal(headers)
    return headers[0].tobytes() + payload.tobytes()
