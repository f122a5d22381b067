// Blocks between an engine's pages and contiguous payloads, by a run table (kvstore/cuda/copy.py).
//
// Addresses come from the caller, who has checked page ids against the pool; nothing is allocated.
#include "xxh3.hpp"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// From this many bytes in one call on, what is written goes past the caches: it would not stay in
// them, and a plain store would first read the line that it overwrites.
constexpr int64_t STREAM_MIN_BYTES = 1 << 20;
constexpr int64_t PREFETCH_BYTES = 1024;  // Runs of a block follow one another, so it reaches the next.

// memcpy with streaming stores where the target is aligned; the caller fences once at the end.
void stream_copy(uint8_t* to, const uint8_t* from, size_t size) {
#if defined(__AVX512F__)
    const size_t head = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
    if (size < head + 256) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    size_t at = head;
    for (; at + 256 <= size; at += 256) {
        for (int64_t line = 0; line < 256; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(from + at + PREFETCH_BYTES + line),
                         _MM_HINT_T0);
        }
        const __m512i a = _mm512_loadu_si512(from + at);
        const __m512i b = _mm512_loadu_si512(from + at + 64);
        const __m512i c = _mm512_loadu_si512(from + at + 128);
        const __m512i d = _mm512_loadu_si512(from + at + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 192), d);
    }
    memcpy(to + at, from + at, size - at);
#else
    memcpy(to, from, size);
#endif
}

void stream_fence() {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

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
    // Bytes that one page has of these runs.
    int64_t bytes(int64_t first, int64_t last) const {
        int64_t total = 0;
        for (int64_t run = first; run < last; run++) total += rows[run] * row_bytes[run];
        return total;
    }
};

// The rows of one page's piece of a run, `stride` apart on each side.
void copy_rows(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride,
               int64_t rows, int64_t bytes, bool stream = false) {
    for (int64_t row = 0; row < rows; row++) {
        uint8_t* const target = to + row * to_stride;
        const uint8_t* const source = from + row * from_stride;
        if (stream) {
            stream_copy(target, source, static_cast<size_t>(bytes));
        } else {
            memcpy(target, source, static_cast<size_t>(bytes));
        }
    }
}

void gather_run(const Table& t, int64_t run, const int64_t* pages, int64_t count, uint8_t* payload,
                uint64_t* checksum, bool stream) {
    if (stream && count == 1 && t.rows[run] == 1) {
        // Hashed where it lies, which brings it into the cache that it is then copied from.
        const uint8_t* const from = t.piece(run, pages[0]);
        const size_t size = t.piece_bytes(run);
        if (checksum != nullptr) *checksum = xxh3::hash64(from, size);
        stream_copy(payload + t.payload_offset[run], from, size);
        return;
    }
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
    const bool stream = table.bytes(0, runs) * pages_per_block * n >= STREAM_MIN_BYTES;
    for (int64_t block = 0; block < n; block++) {
        uint8_t* const payload = reinterpret_cast<uint8_t*>(payloads[block]);
        for (int64_t run = 0; run < runs; run++) {
            gather_run(table, run, pages + block * pages_per_block, pages_per_block, payload,
                       checksums == nullptr ? nullptr : checksums + block * runs + run, stream);
        }
    }
    if (stream) stream_fence();
}

// The way back, for runs first_run up to, not including, last_run.
void kv_scatter(const uint64_t* base, const int64_t* page_stride, const int64_t* rows,
                const int64_t* row_bytes, const int64_t* row_stride, const int64_t* payload_offset,
                int64_t first_run, int64_t last_run, const int64_t* pages, int64_t n,
                int64_t pages_per_block, const uint64_t* payloads) {
    const Table t = {base, page_stride, rows, row_bytes, row_stride, payload_offset};
    const bool stream = t.bytes(first_run, last_run) * pages_per_block * n >= STREAM_MIN_BYTES;
    for (int64_t block = 0; block < n; block++) {
        const uint8_t* const payload = reinterpret_cast<const uint8_t*>(payloads[block]);
        for (int64_t run = first_run; run < last_run; run++) {
            for (int64_t i = 0; i < pages_per_block; i++) {
                const uint8_t* const from = payload + t.payload_offset[run] + t.piece_bytes(run) * i;
                copy_rows(t.piece(run, pages[block * pages_per_block + i]), t.row_stride[run], from,
                          t.row_bytes[run], t.rows[run], t.row_bytes[run], stream);
            }
        }
    }
    if (stream) stream_fence();
}

}
