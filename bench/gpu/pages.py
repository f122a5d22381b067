"""Pages in the device's memory for the steps that copy: a pool, payloads, and a mover between."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.cuda.copy import RunTable
from kvstore.cuda.device import Buffer, Device


@dataclass
class Pages:
    """runs: (rows, row_bytes, gap after each row) of every run; `pages` pages in each."""

    runs: Sequence[tuple[int, int, int]]
    pages: int
    per_block: int
    memory: Buffer
    table: RunTable

    @classmethod
    def make(
        cls, device: Device, runs: Sequence[tuple[int, int, int]], pages: int, per_block: int = 1
    ) -> "Pages":
        """Uninitialised."""
        strides = [rows * (size + gap) for rows, size, gap in runs]
        begins = np.cumsum([0, *(-(-stride * pages // 256) * 256 for stride in strides)])
        memory = device.allocate(int(begins[-1]))
        pieces = np.array([rows * size * per_block for rows, size, _ in runs])
        table = RunTable(
            base=(memory.address + begins[:-1]).astype(np.uint64),
            page_stride=np.array(strides),
            rows=np.array([rows for rows, _, _ in runs]),
            row_bytes=np.array([size for _, size, _ in runs]),
            row_stride=np.array([size + gap for _, size, gap in runs]),
            payload_offset=np.concatenate([[0], np.cumsum(pieces)[:-1]]).astype(np.int64),
            pages=pages,
        )
        return cls(runs, pages, per_block, memory, table)

    @property
    def payload_bytes(self) -> int:
        """Of one block."""
        return sum(rows * size * self.per_block for rows, size, _ in self.runs)

    def payload(self, content: npt.NDArray[np.uint8], pages: Sequence[int]) -> bytes:
        """What a block of these pages is, where the memory holds `content`."""
        parts, begin = [], self.memory.address
        for run, (rows, size, gap) in enumerate(self.runs):
            start = int(self.table.base[run]) - begin
            stride = rows * (size + gap)
            for page in pages:
                piece = content[start + page * stride : start + (page + 1) * stride]
                parts.append(piece.reshape(rows, size + gap)[:, :size].tobytes())
        return b"".join(parts)
