// Blocks between an engine's pages and contiguous payloads, by a run table (kvstore/cuda/copy.py).
//
// Addresses come from the caller, who has checked page ids against the pool; nothing is allocated.
#include "xxh3.hpp"

namespace {

struct Table {
    const uint64_t* base;
    const int64_t* page_stride;
    const int64_t* rows;
    const int64_t* row_bytes;
    const int64_t* row_stride;
    const int64_t* payload_offset;

    uint8_t* piece(int64_t run, int64_t page) const {
        return reinterpret_cast<uint8_t*>(base[run]) + page * page_stride[run];
    }
    size_t piece_bytes(int64_t run) const {
        return static_cast<size_t>(rows[run]) * static_cast<size_t>(row_bytes[run]);
    }
};

// The rows of one page's piece of a run, `stride` apart on each side.
void copy_rows(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride,
               int64_t rows, int64_t bytes) {
    for (int64_t row = 0; row < rows; row++) {
        memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
    }
}

void gather_run(const Table& t, int64_t run, const int64_t* pages, int64_t count, uint8_t* payload,
                uint64_t* checksum) {
    uint8_t* const start = payload + t.payload_offset[run];
    const size_t piece = t.piece_bytes(run);
    const size_t length = piece * static_cast<size_t>(count);
    const bool streams = checksum != nullptr && length > xxh3::MIDSIZE_MAX;
    xxh3::Long hash(start, streams ? length : 1);
    for (int64_t i = 0; i < count; i++) {
        copy_rows(start + piece * i, t.row_bytes[run], t.piece(run, pages[i]), t.row_stride[run],
                  t.rows[run], t.row_bytes[run]);
        // What was just written is still in the first cache: hashing it now reads no memory again.
        if (streams) hash.advance(piece * (i + 1));
    }
    if (checksum != nullptr) *checksum = streams ? hash.finish().low : xxh3::hash64(start, length);
}

}  // namespace

extern "C" {

// pages is [n][pages_per_block], payloads [n] addresses, checksums null or [n][runs].
void kv_gather(const uint64_t* base, const int64_t* page_stride, const int64_t* rows,
               const int64_t* row_bytes, const int64_t* row_stride, const int64_t* payload_offset,
               int64_t runs, const int64_t* pages, int64_t n, int64_t pages_per_block,
               const uint64_t* payloads, uint64_t* checksums) {
    const Table table = {base, page_stride, rows, row_bytes, row_stride, payload_offset};
    for (int64_t block = 0; block < n; block++) {
        uint8_t* const payload = reinterpret_cast<uint8_t*>(payloads[block]);
        for (int64_t run = 0; run < runs; run++) {
            gather_run(table, run, pages + block * pages_per_block, pages_per_block, payload,
                       checksums == nullptr ? nullptr : checksums + block * runs + run);
        }
    }
}

// The way back, for runs first_run up to, not including, last_run.
void kv_scatter(const uint64_t* base, const int64_t* page_stride, const int64_t* rows,
                const int64_t* row_bytes, const int64_t* row_stride, const int64_t* payload_offset,
                int64_t first_run, int64_t last_run, const int64_t* pages, int64_t n,
                int64_t pages_per_block, const uint64_t* payloads) {
    const Table t = {base, page_stride, rows, row_bytes, row_stride, payload_offset};
    for (int64_t block = 0; block < n; block++) {
        const uint8_t* const payload = reinterpret_cast<const uint8_t*>(payloads[block]);
        for (int64_t run = first_run; run < last_run; run++) {
            for (int64_t i = 0; i < pages_per_block; i++) {
                const uint8_t* const from = payload + t.payload_offset[run] + t.piece_bytes(run) * i;
                copy_rows(t.piece(run, pages[block * pages_per_block + i]), t.row_stride[run], from,
                          t.row_bytes[run], t.rows[run], t.row_bytes[run]);
            }
        }
    }
}

}
