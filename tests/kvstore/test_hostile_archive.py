"""Archives that are cut, damaged or forged cost blocks, and never bring a wrong one."""

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.archive import FRAME_BYTES, HEADER_BYTES, ArchiveError
from kvstore.disk_import import Refused
from kvstore.importing import import_archive
from kvstore.inspect import list_blocks
from kvstore.scrub import verify_store
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.layout import Layout
from support.archives import (
    BLOCKS,
    Forged,
    boundaries,
    empty,
    exported,
    fill,
    first_block,
    frames_of,
    hits,
    imported,
    reseal,
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return exported(fill(tmp_path_factory.mktemp("full") / "store"))[0]


def test_a_cut_archive(archive: bytes, tmp_path: Path) -> None:
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
