"""The same cases under ASan with UBSan, and under TSan; and ten and more bugs that must be seen."""

from dataclasses import dataclass

import pytest

from support import cuda_shim
from support.cuda_shim import Bug
from support.kernel_runner import all_cases, run_apart

TSAN_CASES = 100


@pytest.mark.slow
def test_no_access_out_of_bounds_and_nothing_undefined() -> None:
    done = run_apart(cuda_shim.build("asan"), "asan")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.strip() == f"ran {len(all_cases())}"


@pytest.mark.slow
def test_no_race_in_a_hundred_cases() -> None:
    library = cuda_shim.build("tsan", sources=SOURCES_64, head_dim=64)
    done = run_apart(library, "tsan", pattern=PATTERN_64, step=1)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= TSAN_CASES


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_race_in_any_case() -> None:
    done = run_apart(cuda_shim.build("tsan"), "tsan", seeds=range(5), timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.strip() == f"ran {len(all_cases())}"


SOURCES_64 = ("page_copy.cu", "rope_write.cu", "decode_tensor.cu", "decode_fp32.cu")
SOURCES_64 += ("decode_combine.cu",)
PATTERN_64 = "gather|scatter|rope|decode-(bf16|fp32)-64"


@dataclass(frozen=True)
class Planted:
    """A bug, the cases that must see it, and under what."""

    bug: Bug
    pattern: str
    mode: str = "plain"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


TENSOR, PART = "decode_tensor.cu", "decode_part.cuh"
DECODE = "decode-bf16-64"
PLANTED = {
    "page id is not checked": Planted(
        Bug("page_copy.cu", "page < 0 || page >= pool_pages", "page < 0"), "bad_page"
    ),
    "off by one vector": Planted(
        Bug("page_copy.cu", "for (; i < count; i += KV_WARP)", "for (; i <= count; i += KV_WARP)"),
        "gather-row(16|512|528|4112)",
    ),
    "the rest of a row is forgotten": Planted(
        Bug("page_copy.cu", "min(UNIT_BYTES, row_bytes - start)", "min(UNIT_BYTES, row_bytes)"),
        "scatter-row9000",
        "asan",
    ),
    "missing barrier": Planted(
        Bug(TENSOR, "    __syncthreads();\n    merge_warps", "    merge_warps"), DECODE
    ),
    "missing wait": Planted(
        Bug(TENSOR, "wait_copies<R::STAGES - 2>();", "wait_copies<R::STAGES - 1>();"), DECODE
    ),
    "missing order within a warp": Planted(
        Bug(TENSOR, "            __syncwarp();\n", ""), DECODE, "tsan", (1,)
    ),
    "reuse in flight": Planted(
        Bug(TENSOR, "ring + i % R::STAGES * 2", "ring + (i + 1) % R::STAGES * 2"), DECODE
    ),
    "shared memory is given out too early": Planted(
        Bug(TENSOR, "__syncthreads();  // The ring is free", "// The ring is free"), DECODE
    ),
    "divergent barrier": Planted(
        Bug(TENSOR, "__syncthreads();  // The ring", "if (lane) __syncthreads();  // The ring"),
        DECODE,
    ),
    "wrong stride of values": Planted(
        Bug(TENSOR, "page * v_page + place * v_token", "page * v_page + place * k_head"), DECODE
    ),
    "stale table": Planted(
        Bug(PART, "table[(i64)sequence * table_stride + nth]", "table[nth]"), DECODE
    ),
    "page out of the table": Planted(
        Bug(TENSOR, "nth = position / page_tokens", "nth = (position + 1) / page_tokens"), DECODE
    ),
    "window is one short": Planted(
        Bug(PART, "position >= stop - window", "position > stop - window"), DECODE
    ),
    "wrong merge of splits": Planted(
        Bug("decode_combine.cu", "if (weight > 0.f) value += weight *", "value +="), DECODE
    ),
    "wrong pair is rotated": Planted(
        Bug("rope_write.cu", "first + 1 : pair + pairs", "first + 1 : pair + pairs - 1"), "rope"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    planted = PLANTED[name]
    sources = {
        PART: (TENSOR, "decode_combine.cu"),
        TENSOR: (TENSOR, "decode_combine.cu"),
        "decode_combine.cu": (TENSOR, "decode_combine.cu"),
    }.get(planted.bug.file, (planted.bug.file,))
    library = cuda_shim.build(planted.mode, [planted.bug], sources=sources, head_dim=64)
    done = run_apart(library, planted.mode, pattern=planted.pattern, seeds=planted.seeds)
    assert done.returncode != 0, f"not seen: {done.stdout}"
    assert "no case matches" not in done.stderr and "undefined symbol" not in done.stderr
