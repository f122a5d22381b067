"""Our XXH3 equals the standard one on every length, in each form a CPU may get."""

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.native import build

CHAIN = build.SOURCES_DIR / "chain.cpp"
X86 = platform.machine() == "x86_64"
FORMS = {
    "this CPU": [],
    "AVX2": ["-mno-avx512f"],
    "scalar": ["-mno-avx512f", "-mno-avx2"],
}
LARGE = (4097, 6144, 9999, 32768, 65537, 1 << 20, (1 << 20) + 63)


@pytest.fixture(params=list(FORMS) if X86 else ["this CPU"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    path = build.compile_library("xxh3-test", [CHAIN], FORMS[request.param])
    if path is None:
        pytest.skip("no C++ compiler: the store runs on xxhash itself")
    return ctypes.CDLL(str(path))


def test_equal_to_the_standard_on_every_length(library: ctypes.CDLL) -> None:
    data = np.random.default_rng(3).integers(0, 256, LARGE[-1] + 8).astype(np.uint8)
    lengths = np.array([*range(4097), *LARGE], np.int64)
    offsets = np.arange(len(lengths), dtype=np.int64) % 8
    found = np.zeros(len(lengths), np.uint64)
    library.kv_xxh3_64_many(
        ctypes.c_void_p(data.ctypes.data),
        ctypes.c_void_p(offsets.ctypes.data),
        ctypes.c_void_p(lengths.ctypes.data),
        ctypes.c_int64(len(lengths)),
        ctypes.c_void_p(found.ctypes.data),
    )
    library.kv_xxh3_64.restype = ctypes.c_uint64
    for at, size, checksum in zip(offsets.tolist(), lengths.tolist(), found.tolist(), strict=True):
        piece = data[at : at + size]
        assert xxhash.xxh3_64_intdigest(piece) == checksum, size
        single = library.kv_xxh3_64(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(size))
        assert single == checksum, size


def test_128_bits_equal_the_standard_for_every_block_size(library: ctypes.CDLL) -> None:
    tokens = np.random.default_rng(4).integers(-(2**31), 2**31, 2 * 4096).astype(np.int32)
    parent, keys = bytes(range(16)), np.zeros((2, 16), np.uint8)
    for block_tokens in [*range(1, 600), 1024, 4096]:
        library.kv_chain(
            parent,
            ctypes.c_void_p(tokens.ctypes.data),
            ctypes.c_int64(2),
            ctypes.c_int64(block_tokens),
            ctypes.c_void_p(keys.ctypes.data),
        )
        first = xxhash.xxh3_128_digest(parent + tokens[:block_tokens].tobytes())
        second = xxhash.xxh3_128_digest(first + tokens[block_tokens : 2 * block_tokens].tobytes())
        assert keys.tobytes() == first + second, block_tokens


def test_the_forms_tested_are_different_code() -> None:
    if not X86:
        pytest.skip("one form on this machine")
    paths = {build.compile_library("xxh3-test", [CHAIN], flags) for flags in FORMS.values()}
    if None in paths:
        pytest.skip("no C++ compiler: the store runs on xxhash itself")
    assert len({Path(str(path)).read_bytes() for path in paths}) >= 2
