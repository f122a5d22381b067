"""Prints golden.json with every result computed by kvstore.hashing; a script for test_golden.py.

usage: product.py GOLDEN [plain]     plain: without the compiled helper
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.hashing.chain import chain_function
from kvstore.hashing.checksum import run_checksums
from kvstore.hashing.namespace import namespace_digest, root_key
from kvstore.native import build


def namespace_row(row: dict[str, Any]) -> dict[str, Any]:
    digest = namespace_digest([(name, bytes.fromhex(value)) for name, value in row["fields"]])
    return row | {"digest": digest.hex(), "root": root_key(digest).hex()}


def chain_row(row: dict[str, Any]) -> dict[str, Any]:
    count = row["blocks"] * row["block_tokens"]
    flat = np.array([i * 2654435761 % (1 << 31) for i in range(count)], np.int32)
    media = {int(block): bytes.fromhex(value) for block, value in row["media"].items()}
    extend = chain_function(row["hash"])
    keys = extend(bytes.fromhex(row["parent"]), flat.reshape(row["blocks"], -1), media)
    return row | {"keys": [key.tobytes().hex() for key in keys]}


def checksum_row(row: dict[str, Any]) -> dict[str, Any]:
    size = row["length"]
    payload = np.array([(i * i + 31 * i) % 251 for i in range(size)], np.uint8)
    found = run_checksums(payload, np.zeros(1, np.int64), np.array([size], np.int64))
    return row | {"xxh3_64": f"{int(found[0]):016x}"}


def main() -> None:
    golden = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plain = build.forced_fallback() if sys.argv[2:] == ["plain"] else contextlib.nullcontext()
    with plain:
        computed = {
            "namespaces": [namespace_row(row) for row in golden["namespaces"]],
            "chains": [chain_row(row) for row in golden["chains"]],
            "checksums": [checksum_row(row) for row in golden["checksums"]],
        }
    print(json.dumps(computed))


if __name__ == "__main__":
    main()
