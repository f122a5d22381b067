"""Cases for the helpers that are PTX on a GPU, each alone: asynchronous copies, streaming loads,
and the tensor core's product. They come first there, for all other kernels stand on them."""

import numpy as np

from support.kernel_cases import Case, Device, exact, rounded


def run_copy_async(device: Device, seed: int) -> None:
    rng = np.random.default_rng(7)
    threads = 64
    source = rng.integers(0, 1 << 32, (2 * threads, 4), np.uint32)
    inside = rng.integers(0, 2, 2 * threads).astype(np.int32)
    target = np.full_like(source, 7)
    device.launch("probe_copy_async", (1,), threads, [source, target, inside], seed=seed)
    kept = np.where(inside[:, None] != 0, source, 0).reshape(2, threads, 4)
    np.testing.assert_array_equal(target, kept[:, ::-1].reshape(2 * threads, 4))


def run_load_stream(device: Device, seed: int) -> None:
    source = np.random.default_rng(8).integers(0, 1 << 32, (256, 4), np.uint32)
    target = np.zeros_like(source)
    device.launch("probe_load_stream", (1,), 256, [source, target], seed=seed)
    np.testing.assert_array_equal(target, source)


def run_multiply_add(dtype: str, device: Device, seed: int) -> None:
    """d += a * b, of random matrices whose fragments are laid out as kv_device.cuh says."""
    rng = np.random.default_rng(9)
    a, b = (rounded(rng.standard_normal(shape), dtype) for shape in ((16, 16), (16, 8)))
    before = rng.standard_normal((16, 8)).astype(np.float32)
    lanes = np.arange(32)
    g, t = lanes // 4, lanes % 4

    def pairs(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Two neighbours in a row as one word, the first in the low half."""
        low, high = (matrix.view(np.uint16)[rows, columns + n].astype(np.uint32) for n in (0, 1))
        return low | high << 16

    ours = [pairs(a, g + row, 2 * t + part) for part in (0, 8) for row in (0, 8)]
    theirs = [pairs(b.T.copy(), g, 2 * t + part) for part in (0, 8)]
    sums = np.stack([before[g + row, 2 * t + n] for row in (0, 8) for n in (0, 1)], 1)
    device.launch(
        f"probe_mma_{dtype}",
        (1,),
        32,
        [np.stack(ours, 1).copy(), np.stack(theirs, 1).copy(), sums],
        seed=seed,
    )
    wanted = before + exact(a, dtype) @ exact(b, dtype)
    found = np.zeros((16, 8))
    for place, (row, n) in enumerate((row, n) for row in (0, 8) for n in (0, 1)):
        found[g + row, 2 * t + n] = sums[:, place]
    # fp32 sums of sixteen exact products, in any order.
    assert np.abs(found - wanted).max() < 1e-4, np.abs(found - wanted).max()


def probe_cases() -> list[Case]:
    return [
        Case("probe-copy_async", run_copy_async),
        Case("probe-load_stream", run_load_stream),
        Case("probe-mma-bf16", lambda device, seed: run_multiply_add("bf16", device, seed)),
        Case("probe-mma-fp16", lambda device, seed: run_multiply_add("fp16", device, seed)),
    ]
