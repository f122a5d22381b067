"""Page pools: every way an engine lays out its pages, and pools that are not what they claim."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.pool import PagePool
from kvstore.space import Space
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.errors import LayoutError
from kvstore.tiers.layout import CacheGroup, Layout
from support.engine import Engine, plain_array, prompt
from support.layouts import small_layout, uneven_layout

PAGES = 12
BLOCK = 4


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host="8MiB") as opened:
        yield opened
        assert opened.leaks() == {"leases": 0, "holds": 0}
        opened.check_integrity()


@pytest.fixture
def space(store: Store) -> Space:
    return store.namespace(small_layout(BLOCK), model="m")


def padded_pages(pages: int, page_bytes: int) -> Any:
    """Pages with a gap after each, as an aligned allocator makes them."""
    return np.zeros((pages, page_bytes + 24), np.uint8)[:, :page_bytes]


def shaped_pages(pages: int, page_bytes: int) -> Any:
    """[page][token][head][dim] in 2-byte numbers, as engines do."""
    return np.zeros((pages, 2, 2, page_bytes // 8), np.uint16)


def row_strided_pages(pages: int, page_bytes: int) -> Any:
    """Tokens of a page lie apart, as in a fused [page][token][K|V][heads * dim] array."""
    fused = np.zeros((pages, 2, 2, page_bytes // 2), np.uint8)
    return fused[:, :, 1]


def torch_pages(pages: int, page_bytes: int) -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros((pages, 2, page_bytes // 4), dtype=torch.bfloat16)


def wide_gap_pages(pages: int, page_bytes: int) -> Any:
    """Every second page of a larger pool."""
    return np.zeros((2 * pages, page_bytes), np.uint8)[::2]


@pytest.mark.parametrize("pages_per_block", [1, 2, 4])
@pytest.mark.parametrize(
    "make", [plain_array, padded_pages, row_strided_pages, wide_gap_pages], ids=lambda f: f.__name__
)
def test_round_trip_through_every_kind_of_pages(
    space: Space, make: Callable[[int, int], Any], pages_per_block: int
) -> None:
    engine = Engine(space, PAGES, pages_per_block, make)
    blocks = PAGES // pages_per_block
    tokens = prompt(blocks * BLOCK + 1)
    _, saved = engine.save(tokens)
    assert saved.saved == blocks
    assert engine.ask(tokens).tokens == blocks * BLOCK


@pytest.mark.parametrize("make", [shaped_pages, torch_pages], ids=lambda f: f.__name__)
def test_arrays_of_numbers(space: Space, make: Callable[[int, int], Any]) -> None:
    source = [make(PAGES, int(n)) for n in space.layout.run_lengths]
    target = [make(PAGES, int(n)) for n in space.layout.run_lengths]
    for run, array in enumerate(source):
        array[:] = 1
        for page in range(PAGES):
            array[page] *= run * PAGES + page + 1
    sequence = space.sequence(prompt(PAGES * BLOCK + 1))
    assert sequence.save(space.pool(source), range(PAGES)).result(60).saved == PAGES
    order = np.random.default_rng(3).permutation(PAGES)
    with sequence.lookup() as ticket:
        assert ticket.load(space.pool(target), order).result(60).tokens == PAGES * BLOCK
    for run, array in enumerate(target):
        for block, page in enumerate(order.tolist()):
            assert (array[page] == source[run][block]).all()


def test_one_fused_array_holds_all_runs(space: Space) -> None:
    """[page][layer][K|V][bytes]: each run is a view into one allocation."""
    runs, size = space.layout.runs, int(space.layout.run_lengths[0])
    fused = np.zeros((PAGES, runs, size), np.uint8)
    arrays = iter([fused[:, run] for run in range(runs)])
    engine = Engine(space, PAGES, make=lambda _pages, _bytes: next(arrays))
    tokens = prompt(PAGES * BLOCK + 1)
    engine.save(tokens)
    assert engine.ask(tokens).tokens == PAGES * BLOCK


def test_runs_of_odd_sizes_in_two_groups(store: Store) -> None:
    engine = Engine(store.namespace(uneven_layout(), model="m"), PAGES)
    tokens = prompt(PAGES * 4 + 1)
    engine.save(tokens)
    assert engine.ask(tokens).tokens == PAGES * 4


def test_the_self_test_leaves_the_pages_as_they_were(space: Space) -> None:
    engine = Engine(space, PAGES)
    for run, array in enumerate(engine.arrays):
        array[:] = run
    engine.pool.self_test()
    engine.pool.self_test(page=0)
    for run, array in enumerate(engine.arrays):
        assert (array == run).all()


class LyingTensor:
    """Looks like a tensor, but its pages lie elsewhere than its address says."""

    device = "cpu"

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape
        self.elsewhere = np.zeros_like(array)

    def data_ptr(self) -> int:
        return int(self.elsewhere.ctypes.data)

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return tuple(int(step) for step in self.array.strides)

    def __getitem__(self, page: int) -> Any:
        return self.array[page]


def test_the_self_test_catches_pages_that_lie_elsewhere(space: Space) -> None:
    arrays: list[Any] = [plain_array(PAGES, int(n)) for n in space.layout.run_lengths]
    arrays[3] = LyingTensor(arrays[3])
    with pytest.raises(LayoutError, match="array 3 does not read back"):
        space.pool(arrays)


def test_the_self_test_catches_arrays_that_share_memory(space: Space) -> None:
    arrays = [plain_array(PAGES, int(n)) for n in space.layout.run_lengths]
    arrays[5] = arrays[1]
    with pytest.raises(LayoutError, match=r"share memory|does not read back"):
        space.pool(arrays)


def _arrays(**change: Any) -> list[Any]:
    arrays: list[Any] = [plain_array(PAGES, int(n)) for n in small_layout(BLOCK).run_lengths]
    for run, array in change.items():
        arrays[int(run[1:])] = array
    return arrays


SIZE = int(small_layout(BLOCK).run_lengths[0])
FROZEN = plain_array(PAGES, SIZE)
FROZEN.setflags(write=False)
OVERLAP = np.lib.stride_tricks.as_strided(plain_array(PAGES, SIZE), (PAGES, SIZE), (1, 1))
REPEATED = np.broadcast_to(plain_array(PAGES, SIZE // 2)[:, None, :], (PAGES, 2, SIZE // 2))


@pytest.mark.parametrize(
    ("arrays", "needle"),
    [
        (_arrays()[:-1], "5 arrays"),
        ([], "0 arrays"),
        (_arrays(r2=plain_array(PAGES, SIZE + 1)), "array 2"),
        (_arrays(r2=plain_array(PAGES, SIZE // 2)), "check dtype"),
        (_arrays(r2=plain_array(PAGES - 1, SIZE)), "another number of pages"),
        (_arrays(r2=np.zeros((), np.uint8)), "another number of pages"),
        ([plain_array(0, SIZE)] * 6, "page"),
        (_arrays(r2=[[0] * SIZE] * PAGES), "NumPy arrays or torch tensors, not list"),
        (_arrays(r2=plain_array(PAGES, SIZE)[:, ::-1]), "array 2"),
        (_arrays(r2=plain_array(PAGES, SIZE)[::-1]), "negative strides"),
        (_arrays(r2=np.zeros((PAGES, 4, 6, SIZE), np.uint8)[:, ::2, ::3, :: SIZE // 8]), "array 2"),
        (_arrays(r2=FROZEN), "array 2 is read-only"),
        (_arrays(r2=OVERLAP), "overlap"),
        (_arrays(r2=REPEATED), "array 2"),
    ],
)
def test_arrays_that_do_not_fit(space: Space, arrays: list[Any], needle: str) -> None:
    with pytest.raises(LayoutError, match=needle) as caught:
        space.pool(arrays)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("page_tokens", [3, 8, -4])
def test_a_block_is_a_whole_number_of_pages(space: Space, page_tokens: int) -> None:
    with pytest.raises(LayoutError, match="whole number of pages"):
        space.pool(_arrays(), page_tokens)


def test_opaque_runs_do_not_divide_into_pages_they_have_no_room_for() -> None:
    layout = Layout.opaque(layers=1, run_bytes=(31,), dtype="x", format="e", block_tokens=4)
    with pytest.raises(LayoutError, match="does not divide"):
        PagePool(layout, [np.zeros((4, 16), np.uint8)], 2)


@pytest.mark.parametrize(
    ("table", "needle"),
    [
        ([0, 1], "3 blocks need 3 page ids; 2 were given"),
        ([0, 1, PAGES], r"outside the pool's 0\.\.11"),
        ([0, 1, -1], "outside"),
        ([0, 1, 2**70], "page ids"),
        ([0.0, 1.0, 2.5], "page ids"),
        (["a", "b", "c"], "page ids"),
        ([[0, 1], [2]], "page ids"),
    ],
)
def test_block_tables_that_cannot_be(space: Space, table: list[Any], needle: str) -> None:
    engine = Engine(space, PAGES)
    with pytest.raises(LayoutError, match=needle) as caught:
        engine.pool.block_pages(table, 3)
    assert "\n" not in str(caught.value)


def test_a_block_table_may_be_longer_and_of_any_integers(space: Space) -> None:
    engine = Engine(space, PAGES, pages_per_block=2)
    for table in (range(12), np.arange(12, dtype=np.int32), np.arange(12).reshape(6, 2)):
        assert engine.pool.block_pages(table, 2).tolist() == [[0, 1], [2, 3]]
    torch = pytest.importorskip("torch")
    assert engine.pool.block_pages(torch.arange(12), 1).tolist() == [[0, 1]]
    assert engine.pool.blocks_of(torch.arange(11)) == 5
    assert engine.pool.blocks_of(np.arange(12).reshape(6, 2)) == 6
    assert engine.pool.block_pages([], 0).shape == (0, 2)


def test_a_pool_of_another_layout_is_refused(store: Store, space: Space) -> None:
    other = Engine(store.namespace(small_layout(BLOCK, dtype="bfloat16"), model="m"), PAGES)
    sequence = space.sequence(prompt(9))
    with pytest.raises(LayoutError, match="another layout"):
        sequence.save(other.pool, [0, 1])
    with sequence.lookup() as ticket, pytest.raises(LayoutError, match="another layout"):
        ticket.load(other.pool, [0, 1])


@pytest.mark.parametrize("kind", ["window", "state"])
def test_groups_that_cannot_be_stored_yet_are_refused_at_start(store: Store, kind: Any) -> None:
    group = CacheGroup(kind, 2, (64,), "float16", window_tokens=16)
    with pytest.raises(LayoutError, match="not stored by this version"):
        store.namespace(Layout(4, (group,)), model="m")


def test_a_block_larger_than_a_segment_is_refused_at_start(store: Store) -> None:
    with pytest.raises(LayoutError, match="host tier at least"):
        store.namespace(small_layout(16, layers=4000), model="m")
