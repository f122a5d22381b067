"""The bytes of a stored block, record format v1: a header, then the payload. Pure; no I/O.

The same record lies in a host slot and in a disk slot, so write-back and promotion are one copy
each. docs/formats.md describes every field. All integers are little-endian.

    0     fixed header, 256 bytes (HEADER below)
    256   token ids, int32 [block_tokens]
    ...   run checksums, XXH3-64 as uint64 [runs], aligned to 8
    ...   zeros up to header_bytes, a multiple of 4096
    header_bytes   payload, then zeros up to a multiple of 4096

`header_checksum` is XXH3-64 of all header_bytes with that field as zero, so each bit of the header
is covered. A key is served only after header and runs were checked; nothing here trusts a length.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.hashing.checksum import run_checksums
from kvstore.tiers.layout import Layout

MAGIC = b"KVBLOCK1"
VERSION = 1
ALIGN = 4096
FIXED_BYTES = 256
KEY_BYTES = 16
NAMESPACE_BYTES = 32

HEADER = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "flags",
            "header_bytes",
            "payload_bytes",
            "generation",
            "key",
            "parent",
            "namespace",
            "media",
            "group",
            "shard",
            "depth",
            "block_tokens",
            "runs",
            "created_s",
            "foreign_key",
            "header_checksum",
        ],
        "formats": [
            "S8",
            "<u2",
            "<u2",
            "<u4",
            "<u8",
            "<u8",
            "V16",
            "V16",
            "V32",
            "V32",
            "<u2",
            "<u2",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "V32",
            "<u8",
        ],
        "offsets": [0, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 130, 132, 136, 140, 144, 152, 248],
        "itemsize": FIXED_BYTES,
    }
)
CHECKSUM_AT = 248
# Places in a header seen as uint64, and as uint32: a structured view costs more than what it fills.
GENERATION_WORD, CREATED_WORD, CHECKSUM_WORD = 24 // 8, 144 // 8, CHECKSUM_AT // 8
DEPTH_HALF = 132 // 4
BATCH_MIN = 16  # Fewer headers are checksummed one by one: a batch costs tens of microseconds.

Bytes = npt.NDArray[np.uint8]


class HeaderFault(StrEnum):
    """What is wrong with a header; the first that applies."""

    MAGIC = "magic"
    VERSION = "version"
    CHECKSUM = "checksum"
    LENGTH = "length"
    NAMESPACE = "namespace"
    KEY = "key"
    PARENT = "parent"
    TOKENS = "tokens"
    GENERATION = "generation"


def align_up(size: int) -> int:
    """The next multiple of 4096: the unit of O_DIRECT."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class RecordFormat:
    """Where things lie in the records of one layout. Sizes in bytes."""

    block_tokens: int
    runs: int
    payload_bytes: int

    @classmethod
    def of(cls, layout: Layout) -> "RecordFormat":
        return cls(layout.block_tokens, layout.runs, layout.payload_bytes)

    @cached_property
    def checksums_at(self) -> int:
        return -(-(FIXED_BYTES + 4 * self.block_tokens) // 8) * 8

    @cached_property
    def header_bytes(self) -> int:
        return align_up(self.checksums_at + 8 * self.runs)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one record: header and payload, each padded."""
        return self.header_bytes + align_up(self.payload_bytes)

    def fixed(self, headers: Bytes) -> npt.NDArray[np.void]:
        """The fixed fields of headers [n, header_bytes], as a view [n]."""
        return headers[:, :FIXED_BYTES].view(HEADER)[:, 0]

    def tokens(self, headers: Bytes) -> npt.NDArray[np.int32]:
        """The token ids of headers [n, header_bytes], as a view int32 [n, block_tokens]."""
        end = FIXED_BYTES + 4 * self.block_tokens
        return headers[:, FIXED_BYTES:end].view(np.int32)

    def checksums(self, headers: Bytes) -> npt.NDArray[np.uint64]:
        """The run checksums of headers [n, header_bytes], as a view uint64 [n, runs]."""
        end = self.checksums_at + 8 * self.runs
        return headers[:, self.checksums_at : end].view(np.uint64)

    def build(
        self,
        *,
        keys: Bytes,
        parents: Bytes,
        namespace: bytes,
        first_depth: int,
        first_generation: int,
        tokens: npt.NDArray[np.int32],
        created_s: int,
    ) -> Bytes:
        """Headers of n consecutive blocks of one chain, unsealed: uint8 [n, header_bytes].

        keys, parents: uint8 [n, 16]. tokens: int32 [n, block_tokens]. The caller fills `checksums`
        and then calls `seal`.
        """
        count = len(keys)
        headers = np.zeros((count, self.header_bytes), np.uint8)
        headers[:, :FIXED_BYTES] = _common_fields(self, namespace)
        words = headers.view(np.uint64)
        words[:, GENERATION_WORD] = np.arange(first_generation, first_generation + count)
        words[:, CREATED_WORD] = created_s
        headers.view(np.uint32)[:, DEPTH_HALF] = np.arange(first_depth, first_depth + count)
        headers[:, 32:48] = keys
        headers[:, 48:64] = parents
        self.tokens(headers)[:] = tokens
        return headers

    def seal(self, headers: Bytes) -> None:
        """Write the header checksum of each header, in place. The last step before publishing."""
        headers.view(np.uint64)[:, CHECKSUM_WORD] = self._header_checksums(headers)

    def sealed(self, headers: Bytes) -> npt.NDArray[np.bool_]:
        """Whether each header [n, header_bytes] has the checksum that seal writes: bool [n].

        For many headers at once, C-contiguous; see check_header for what is wrong with one.
        """
        expected = self.fixed(headers)["header_checksum"].copy()
        good: npt.NDArray[np.bool_] = self._header_checksums(headers) == expected
        self.fixed(headers)["header_checksum"] = expected
        return good

    def _header_checksums(self, headers: Bytes) -> npt.NDArray[np.uint64]:
        """The checksum of each header; leaves the field zero."""
        headers.view(np.uint64)[:, CHECKSUM_WORD] = 0
        if len(headers) < BATCH_MIN:
            digests = [xxhash.xxh3_64_intdigest(header) for header in headers]
            return np.array(digests, np.uint64)
        offsets = np.arange(len(headers), dtype=np.int64) * self.header_bytes
        return run_checksums(headers.reshape(-1), offsets, np.full_like(offsets, self.header_bytes))

    def check_header(self, header: Bytes) -> HeaderFault | None:
        """Check a header by itself: uint8 [header_bytes]. Trusts no field before the checksum.

        Returns: None, or MAGIC, VERSION, CHECKSUM, LENGTH.
        """
        fixed = header[:FIXED_BYTES].view(HEADER)[0]
        if header[:8].tobytes() != MAGIC:
            return HeaderFault.MAGIC
        if fixed["version"] != VERSION:
            return HeaderFault.VERSION
        digest = xxhash.xxh3_64(header[:CHECKSUM_AT].data)
        digest.update(bytes(8))
        digest.update(header[FIXED_BYTES:].data)
        if digest.intdigest() != fixed["header_checksum"]:
            return HeaderFault.CHECKSUM
        same = (
            fixed["header_bytes"] == self.header_bytes
            and fixed["payload_bytes"] == self.payload_bytes
            and fixed["block_tokens"] == self.block_tokens
            and fixed["runs"] == self.runs
        )
        return None if same else HeaderFault.LENGTH

    def check_identity(
        self,
        header: Bytes,
        *,
        namespace: bytes,
        key: bytes,
        parent: bytes,
        generation: int,
        tokens: npt.NDArray[np.int32],
    ) -> HeaderFault | None:
        """Check that a header that passed check_header is this very block's.

        Returns: None, or NAMESPACE, KEY, PARENT, TOKENS, GENERATION.
        """
        if header[64:96].tobytes() != namespace:
            return HeaderFault.NAMESPACE
        if header[32:48].tobytes() != key:
            return HeaderFault.KEY
        if header[48:64].tobytes() != parent:
            return HeaderFault.PARENT
        end = FIXED_BYTES + 4 * self.block_tokens
        if not np.array_equal(header[FIXED_BYTES:end].view(np.int32), tokens):
            return HeaderFault.TOKENS
        if int.from_bytes(header[24:32].tobytes(), "little") != generation:
            return HeaderFault.GENERATION
        return None


@lru_cache(maxsize=64)
def _common_fields(record: RecordFormat, namespace: bytes) -> Bytes:
    """What all headers of a namespace have in common: uint8 [FIXED_BYTES]. Not to be written to."""
    fields = np.zeros(1, HEADER)
    fields["magic"] = MAGIC
    fields["version"] = VERSION
    fields["header_bytes"] = record.header_bytes
    fields["payload_bytes"] = record.payload_bytes
    fields["block_tokens"] = record.block_tokens
    fields["runs"] = record.runs
    common = fields.view(np.uint8)
    common[64:96] = np.frombuffer(namespace, np.uint8)
    return common
