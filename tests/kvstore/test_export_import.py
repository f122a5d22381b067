"""From one store to another and exact by loading; damaged, hostile and cut archives cost blocks."""

import io
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.archive import FRAME_BYTES, HEADER_BYTES, ArchiveError, ArchiveReader, ArchiveWriter
from kvstore.disk_import import Refused
from kvstore.errors import ConfigError, StoreBusyError
from kvstore.exporting import Exported, Selection, export_store
from kvstore.hashing.chain import chain_function
from kvstore.hashing.checksum import run_checksums
from kvstore.hashing.namespace import root_key
from kvstore.importing import Imported, import_archive
from kvstore.inspect import list_blocks
from kvstore.scrub import verify_store
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import RecordFormat
from support.checks import assert_at_rest
from support.engine import Engine, prompt

LAYOUT = Layout.opaque(layers=2, run_bytes=(600, 77), dtype="fp8", format="e", block_tokens=4)
SIZES: dict[str, Any] = {"host": "4MiB", "disk_capacity": "8MiB"}
GOLDEN = Path(__file__).with_name("golden_export_v1.bin")
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


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("full") / "store")


@pytest.fixture(scope="module")
def archive(full: Path) -> bytes:
    return exported(full)[0]


def test_round_trip(full: Path, archive: bytes, tmp_path: Path) -> None:
    target = empty(tmp_path / "store")
    before = list(list_blocks(full))
    done = imported(target, archive)
    assert (done.imported, done.present, done.refused) == (len(before), 0, {})
    assert done.complete and not done.bad
    assert verify_store(target).bad == []
    labels = {(block.key, block.parent, block.label) for block in before}
    assert {(b.key, b.parent, b.label) for b in list_blocks(target)} == labels
    assert hits(target) == [BLOCKS, BLOCKS, BLOCKS, BLOCKS]
    # Once more: everything is there, and nothing is written over.
    places = {block.key: block.place for block in list_blocks(target)}
    again = imported(target, archive)
    assert (again.imported, again.present, again.refused) == (0, len(before), {})
    assert {block.key: block.place for block in list_blocks(target)} == places
    # What the second store exports is the same, but for the time.
    back, _ = exported(target)
    assert len(back) == len(archive)


def test_an_import_beside_what_is_there(full: Path, archive: bytes, tmp_path: Path) -> None:
    """A store that has the beginning of a prompt gets the rest."""
    target = tmp_path / "store"
    with kvstore.open(target, **SIZES) as store:
        engine_of(store, "a").save(prompts()[0][1][:13])
    done = imported(target, archive)
    assert (done.present, done.refused) == (3, {})
    assert hits(target) == [BLOCKS] * 4


def test_salts_stay(archive: bytes) -> None:
    assert b"a secret" not in archive


def test_a_part_of_a_store(full: Path, tmp_path: Path) -> None:
    data, done = exported(full, tenant="a")
    assert (done.namespaces, done.blocks) == (1, 2 * BLOCKS - 2)
    target = empty(tmp_path / "store")
    imported(target, data)
    assert hits(target) == [BLOCKS, BLOCKS, 0, 0]
    assert exported(full, model="m")[1].namespaces == 2
    assert exported(full, model="no such")[1].blocks == 0
    digest = Selection(namespace="0" * 64)
    assert export_store(full, io.BytesIO().write, digest).blocks == 0
    for wrong in ({"namespace": "abc"}, {"prefix": "12"}, {"namespace": "g" * 64}):
        with pytest.raises(ConfigError, match="hex digits"):
            Selection(**wrong)


def test_a_prefix(full: Path, tmp_path: Path) -> None:
    """The third block of the first prompt: what is before it, and what is below it."""
    with kvstore.open(full, **SIZES) as store:
        keys = engine_of(store, "a").space.sequence(prompts()[0][1]).keys
        third = keys[2].tobytes().hex()
    data, done = exported(full, prefix=third)
    assert done.blocks == BLOCKS
    target = empty(tmp_path / "store")
    imported(target, data)
    assert hits(target) == [BLOCKS, 2, 0, 0]
    with pytest.raises(ConfigError, match="no block on disk"):
        exported(full, prefix="00" * 16)


def test_a_bad_block_is_left_out_with_all_below(full: Path, tmp_path: Path) -> None:
    target = fill(tmp_path / "store")
    with kvstore.open(target, **SIZES) as store:
        key = engine_of(store, "b").space.sequence(prompts()[2][1]).keys[5].tobytes().hex()
    (place,) = (block.place for block in list_blocks(target) if block.key == key)
    path, _, at = place.rpartition(":")
    with open(path, "r+b") as file:
        file.seek(int(at) + 4100)
        file.write(b"????")
    data, done = exported(target)
    assert (done.bad, done.below, done.gone) == (1, BLOCKS - 6, 0)
    other = empty(tmp_path / "other")
    assert imported(other, data).refused == {}
    assert hits(other) == [BLOCKS, BLOCKS, 5, BLOCKS]


def boundaries(data: bytes) -> list[int]:
    """Where each frame begins, and the end."""
    found, at = [], HEADER_BYTES
    while at < len(data):
        found.append(at)
        at += FRAME_BYTES + int.from_bytes(data[at + 8 : at + 16], "little")
    return [*found, at]


def test_a_cut_archive(full: Path, archive: bytes, tmp_path: Path) -> None:
    """At every boundary and inside: nothing without `partial`, with it what came before the cut."""
    target = empty(tmp_path / "store")
    places = boundaries(archive)
    cuts = sorted({*places[:-1], *(at + 7 for at in places[:-1]), *(at - 1 for at in places)})
    for cut in cuts:
        with pytest.raises(ArchiveError, match=r"ends too early|no archive"):
            imported(target, archive[:cut])
    assert list(list_blocks(target)) == []
    total = 0
    for cut in [cuts[0], *random.Random(1).sample(cuts, 12), cuts[-1]]:
        with_header = max(cut, HEADER_BYTES)
        done = imported(target, archive[:with_header], partial=True)
        total += done.imported
        assert not done.complete
        assert "ends too early" in done.fault
        kinds = [archive[at : at + 4] for at in places[:-1]]
        before = [at for at in places[1:] if at <= with_header]
        assert done.imported + done.present == kinds[: len(before)].count(b"BLCK")
    assert total == len(list(list_blocks(target))) == 4 * BLOCKS - 2
    assert hits(target) == [BLOCKS] * 4


def test_other_hashes_and_stores_in_use(full: Path, archive: bytes, tmp_path: Path) -> None:
    other = tmp_path / "sha"
    kvstore.open(other, hash="sha256", **SIZES).close()
    with pytest.raises(ArchiveError, match="xxh3-128"):
        imported(other, archive)
    busy = tmp_path / "busy"
    with (
        kvstore.open(busy, **SIZES),
        pytest.raises(StoreBusyError, match="stop its owner"),
    ):
        imported(busy, archive)
    with pytest.raises(ConfigError, match="not a store"):
        imported(tmp_path / "nothing", archive)


def test_export_beside_an_owner(full: Path, tmp_path: Path) -> None:
    target = empty(tmp_path / "store")
    with kvstore.open(full, **SIZES):
        command = [sys.executable, "-m", "kvstore.cli"]
        export = subprocess.run(
            [*command, "export", "-", "--store", str(full)], capture_output=True, check=False
        )
    assert export.returncode == 0
    assert export.stderr.startswith(b"30 blocks of 2 namespaces")
    ran = subprocess.run(
        [*command, "import", "-", "--store", str(target), "--json"],
        input=export.stdout,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0
    assert b"copying the archive" in ran.stderr
    assert json.loads(ran.stdout)["imported"] == 30
    assert hits(target) == [BLOCKS] * 4


def test_a_store_that_is_too_small(tmp_path: Path) -> None:
    """It takes the shallow blocks first and evicts nothing for the rest."""
    large: dict[str, Any] = {"host": "8MiB", "disk_capacity": "32MiB"}
    with kvstore.open(tmp_path / "large", **large) as store:
        for seed in range(40):
            engine = Engine(store.namespace(LAYOUT, model="m"), 64)
            engine.save(prompt(4 * 50 + 1, seed=100 + seed))
            store.flush()
    data, done = exported(tmp_path / "large")
    assert done.blocks == 2000
    target = tmp_path / "small"
    own = prompt(4 * 30 + 1, seed=7)
    with kvstore.open(target, **SIZES) as store:
        Engine(store.namespace(LAYOUT, model="own"), 32).save(own)
    found = imported(target, data)
    assert found.imported + found.refused[Refused.NO_ROOM] == 2000
    assert 100 < found.imported < 2000
    assert not found.bad
    assert verify_store(target).bad == []
    with kvstore.open(target, **SIZES) as store:
        assert Engine(store.namespace(LAYOUT, model="own"), 32).ask(own).tokens == 120
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        shares = [engine.ask(prompt(201, seed=100 + seed)).tokens for seed in range(40)]
        assert max(shares) - min(shares) <= 8
        assert_at_rest(store)


def test_the_golden_export(tmp_path: Path) -> None:
    """A file that this version, and every later one, must be able to import."""
    target = empty(tmp_path / "store")
    done = imported(target, GOLDEN.read_bytes())
    assert (done.imported, done.refused, done.complete) == (2, {}, True)
    with kvstore.open(target, **SIZES) as store:
        engine = Engine(store.namespace(LAYOUT, model="golden", tenant="t"), 4)
        assert engine.ask(np.arange(9, dtype=np.int32)).tokens == 8


# --- hostile archives


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
    names, blocks = [], []
    for frame in reader.frames(lambda _: size):
        if hasattr(frame, "namespace"):
            names.append(frame.namespace)
        else:
            blocks.append((frame.number, frame.body))
    return names, blocks


def reseal(body: bytearray) -> bytearray:
    """A header's checksum made right again."""
    shape = RecordFormat.of(LAYOUT)
    header = np.frombuffer(body, np.uint8)[: shape.header_bytes][None].copy()
    shape.seal(header)
    body[: shape.header_bytes] = header.tobytes()
    return body


def test_forged_records_are_refused(archive: bytes, tmp_path: Path) -> None:
    """Sealed anew after each change, so that only what a record means can give it away."""
    names, blocks = frames_of(archive)
    changes: list[tuple[int, bytes, Refused]] = [
        (32, b"\x55" * 16, Refused.KEY),
        (48, b"\x55" * 16, Refused.KEY),
        (64, b"\x55" * 32, Refused.HEADER),
        (96, b"\x55" * 32, Refused.KEY),
        (10, b"\x01\x00", Refused.HEADER),
        (132, b"\x07\x00\x00\x00", Refused.PARENT),
        (256, b"\x01\x02\x03\x00", Refused.KEY),
        (256, b"\x01\x02\x03\xff", Refused.HEADER),
        (16, b"\x01" * 8, Refused.HEADER),
        (136, b"\x08\x00\x00\x00", Refused.HEADER),
        (272, b"\x01" * 8, Refused.CHECKSUM),
    ]
    target = empty(tmp_path / "store")
    for at, data, reason in changes:
        forged = Forged()
        for name in names:
            forged.writer.namespace(name)
        body = bytearray(blocks[0][1])
        body[at : at + len(data)] = data
        forged.writer.block(0, memoryview(reseal(body)))
        found = imported(target, forged.data())
        assert (found.imported, found.refused) == (0, {reason: 1}), (at, reason)
        assert found.bad
    assert list(list_blocks(target)) == []


def test_forged_frames_are_refused(archive: bytes, tmp_path: Path) -> None:
    names, blocks = frames_of(archive)
    target = empty(tmp_path / "store")
    other = Layout.opaque(layers=1, run_bytes=(64,), dtype="x", format="e", block_tokens=4)
    huge = Layout.opaque(layers=1, run_bytes=(1 << 30,), dtype="x", format="e", block_tokens=4)
    for layout, reason in (
        (b"[" * 60_000, Refused.NAMESPACE),
        (b"", Refused.NAMESPACE),
        (b'["layout",1,4,[["full",1,[1],7,"none",0,""]]]', Refused.NAMESPACE),
        (huge.canonical(), Refused.TOO_LARGE),
        (other.canonical(), Refused.LENGTH),
    ):
        forged = Forged()
        forged.writer.namespace(Namespace(names[0].digest, layout, "m\0a"))
        forged.writer.block(0, memoryview(blocks[0][1]))
        done = imported(target, forged.data())
        assert (done.imported, done.refused) == (0, {reason: 1})
    imported(target, archive)
    # A second layout for a namespace that the store knows.
    forged = Forged()
    forged.writer.namespace(Namespace(names[0].digest, other.canonical(), "m\0a"))
    forged.writer.block(0, memoryview(blocks[0][1]))
    assert imported(target, forged.data()).refused == {Refused.NAMESPACE: 1}
    assert hits(target) == [BLOCKS] * 4


def test_a_claimed_namespace_does_not_stop_its_engine(archive: bytes, tmp_path: Path) -> None:
    """Somebody claims an engine's namespace for blocks of another size, before it ever saved."""
    (names, _), target = frames_of(archive), empty(tmp_path / "store")
    other = Layout.opaque(layers=1, run_bytes=(64,), dtype="x", format="e", block_tokens=2)
    forged = Forged()
    for name in names:
        number = forged.writer.namespace(replace(name, layout=other.canonical()))
        forged.writer.block(number, memoryview(first_block(other, name.digest)))
    assert imported(target, forged.data()).imported == len(names)
    assert hits(target) == [0] * 4
    fill(target)
    assert hits(target) == [BLOCKS] * 4
    assert verify_store(target).bad == []


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


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_random_mutations(archive: bytes, shared: Path, data: st.DataObject) -> None:
    """Bytes changed, cut out, doubled or moved: a clear error, or fewer blocks; never another."""
    mutated = bytearray(archive)
    for _ in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, len(mutated) - 1))
        size = data.draw(st.sampled_from([1, 8, FRAME_BYTES, 5000]))
        kind = data.draw(st.sampled_from(["flip", "cut", "double", "zero", "splice"]))
        part = bytes(mutated[first : first + size])
        if kind == "flip":
            mutated[first] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del mutated[first : first + size]
        elif kind == "double":
            mutated[first:first] = part
        elif kind == "zero":
            mutated[first : first + size] = bytes(len(part))
        else:
            place = data.draw(st.sampled_from(boundaries(archive)))
            mutated[place:place] = part
        if not mutated:
            return
    try:
        done = imported(shared, bytes(mutated), partial=data.draw(st.booleans()))
    except ArchiveError as error:
        assert str(error).startswith(("the archive", "this is no archive"))
    else:
        assert done.imported + done.present <= 2 * (4 * BLOCKS - 2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, archive: bytes) -> Any:
    """One store for all mutated archives; in the end whatever got in is exact."""
    directory = empty(tmp_path_factory.mktemp("shared") / "store")
    yield directory
    known = {key for _, body in frames_of(archive)[1] for key in (bytes(body[32:48]).hex(),)}
    assert {block.key for block in list_blocks(directory)} <= known
    assert verify_store(directory).bad == []
    hits(directory)


@pytest.mark.slow
def test_kill_in_the_middle_of_an_import(full: Path, tmp_path: Path) -> None:
    """At instants spread over the import: afterwards the store is sound, and takes the rest."""
    with kvstore.open(tmp_path / "large", host="8MiB", disk_capacity="32MiB") as store:
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        for seed in range(12):
            engine.save(prompt(4 * 50 + 1, seed=100 + seed))
            store.flush()
    file = tmp_path / "archive"
    with open(file, "wb") as sink:
        export_store(tmp_path / "large", sink.write)
    target = tmp_path / "store"
    kvstore.open(target, host="4MiB", disk_capacity="32MiB").close()
    ended = []
    for kill in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(target), str(file)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.01 * kill)
        process.send_signal(signal.SIGKILL)
        ended.append(process.wait())
        process.stdout.close()
    assert -signal.SIGKILL in ended
    with kvstore.open(target, host="4MiB", disk_capacity="32MiB") as store:
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        kept = sum(engine.ask(prompt(201, seed=100 + seed)).tokens // 4 for seed in range(12))
        assert kept > 0
        assert_at_rest(store)
    assert verify_store(target).bad == []
    with open(file, "rb") as source:
        done = import_archive(target, source)
    assert (done.present, done.imported) == (kept, 600 - kept)


# Imports, says so when some blocks are in, and goes on.
KILLED = """
import os, pathlib, sys
from kvstore.hashing.chain import chain_function
from kvstore.hashing.checksum import run_checksums
from kvstore.hashing.namespace import root_key
from kvstore.importing import import_archive
said = []
def progress(done, total):
    if done > 400_000 and not said:
        said.append(os.write(1, b"."))
with open(sys.argv[2], "rb") as source:
    import_archive(pathlib.Path(sys.argv[1]), source, progress, partial=True)
os.write(1, b".")
"""


def test_a_source_that_fails(archive: bytes, tmp_path: Path) -> None:
    """What the file's device says comes through; the store stays sound."""

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 40_000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    target = empty(tmp_path / "store")
    source: BinaryIO = Failing(archive)
    with pytest.raises(OSError, match="Input/output error"):
        import_archive(target, source, partial=True)
    assert verify_store(target).bad == []
