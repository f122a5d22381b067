"""The kernels' own source, run on this CPU: every case under five orders of its threads."""

import pytest

from kvstore.cuda.kernel_table import KERNELS, SOURCES
from support import cuda_shim
from support.cuda_shim import KernelError, Kernels
from support.kernel_cases import Case
from support.kernel_runner import all_cases

CASES = all_cases()
SEEDS = range(5)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels(cuda_shim.build())


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 300
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_gives_what_its_reference_says(kernels: Kernels, case: Case) -> None:
    for seed in SEEDS:
        case.run(kernels, seed)


@pytest.mark.slow
def test_table_and_code_have_the_same_parameters(kernels: Kernels) -> None:
    for name, kernel in KERNELS.items():
        assert kernels.sizes(name) == [p.kind.size_bytes for p in kernel.parameters], name


def test_every_source_is_in_the_table() -> None:
    assert {path.name for path in cuda_shim.CUDA.glob("*.cu")} == set(SOURCES)


@pytest.mark.slow
def test_a_launch_that_no_gpu_takes_is_refused(kernels: Kernels) -> None:
    with pytest.raises(KernelError, match="invalid launch"):
        kernels.launch("combine_fp32", (0,), 64, [0, 0, 0, 1, 64])
