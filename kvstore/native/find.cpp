// Finding blocks: the bucket table of fingerprints, and the rows behind it.
//
// The memory belongs to NumPy (kvstore/rows.py, kvstore/block_table.py); nothing here keeps a
// pointer or allocates. Every function has a NumPy twin in block_table.py with the same results.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 8;  // entries of a bucket: one cache line

// A lookup of a cold chain is a chain of cache misses: bucket, then row, then tokens. Each stage
// runs this many blocks ahead of the comparison, so that the misses of many blocks overlap.
constexpr int64_t BUCKET_AHEAD = 48;
constexpr int64_t ROW_AHEAD = 32;
constexpr int64_t TOKENS_AHEAD = 16;
constexpr int64_t RING = 64;
constexpr int64_t LINES_AHEAD_MAX = 4;

enum Status : int64_t { ALL_FOUND = 0, ABSENT = 1, COLLISION = 2 };

struct Head {  // kvstore.rows.HEAD
    uint64_t key0, key1;
    int32_t parent, upper, lower, token_row;
};
static_assert(sizeof(Head) == 32, "HEAD in rows.py has the same 32 bytes");

struct Key {
    uint64_t low, high;
};

inline Key key_at(const uint8_t* keys, int64_t i) {
    Key key;
    std::memcpy(&key, keys + 16 * i, 16);
    return key;
}

// The lanes whose fingerprint (upper half) is the key's, as bits. An empty lane is all zeros.
inline unsigned matches(const uint64_t* bucket, uint64_t low) {
    unsigned bits = 0;
    for (int lane = 0; lane < LANES; ++lane)
        bits |= unsigned((bucket[lane] >> 32) == (low >> 32) && bucket[lane] != 0) << lane;
    return bits;
}

inline int32_t row_in(uint64_t entry) { return int32_t(uint32_t(entry)) - 1; }

inline bool same(const int32_t* a, const int32_t* b, int64_t count) {
    if (count == 16) {
        uint64_t x[8], y[8], differ = 0;
        std::memcpy(x, a, 64);
        std::memcpy(y, b, 64);
        for (int i = 0; i < 8; ++i) differ |= x[i] ^ y[i];
        return differ == 0;
    }
    return std::memcmp(a, b, size_t(count) * 4) == 0;
}

}  // namespace

extern "C" {

struct View {  // kvstore.block_table.View
    const uint64_t* table;
    uint64_t mask;
    const Head* heads;
    const uint64_t* overflow_keys;  // sorted
    const int32_t* overflow_rows;
    int64_t overflow_count;
};

}  // extern "C"

namespace {

inline const uint64_t* bucket_of(const View& view, uint64_t low) {
    return view.table + (low & view.mask) * LANES;
}

inline bool carries(const View& view, int32_t row, Key key) {
    const Head& head = view.heads[row];
    return head.key0 == key.low && head.key1 == key.high;
}

int32_t in_overflow(const View& view, Key key) {
    int64_t at = 0, end = view.overflow_count;
    while (at < end) {
        int64_t middle = (at + end) / 2;
        if (view.overflow_keys[middle] < key.low) at = middle + 1;
        else end = middle;
    }
    for (; at < view.overflow_count && view.overflow_keys[at] == key.low; ++at)
        if (carries(view, view.overflow_rows[at], key)) return view.overflow_rows[at];
    return -1;
}

// The first lane that may hold the key: a hint to prefetch by.
inline int32_t guess(const View& view, Key key) {
    const uint64_t* bucket = bucket_of(view, key.low);
    unsigned bits = matches(bucket, key.low);
    return bits ? row_in(bucket[__builtin_ctz(bits)]) : -1;
}

inline int32_t resolve(const View& view, Key key, int32_t guessed) {
    if (guessed >= 0 && carries(view, guessed, key)) return guessed;
    const uint64_t* bucket = bucket_of(view, key.low);
    for (unsigned bits = matches(bucket, key.low); bits; bits &= bits - 1) {
        int32_t row = row_in(bucket[__builtin_ctz(bits)]);
        if (carries(view, row, key)) return row;
    }
    return in_overflow(view, key);
}

}  // namespace

extern "C" {

// The longest prefix of a chain: rows that carry the keys, each the child of the one before, with
// equal tokens. result: blocks found, of them in the upper and in the lower tier, and a Status.
void kv_find(const View* view_, const uint16_t* spaces, const int32_t* pool, int64_t block_tokens,
             const uint8_t* keys, const int32_t* tokens, int64_t count, int32_t space,
             int32_t parent, int32_t* rows, int64_t* result) {
    const View view = *view_;
    int32_t ring[RING];
    const int64_t lines = (block_tokens * 4 + 63) / 64;
    const int64_t lines_ahead = lines < LINES_AHEAD_MAX ? lines : LINES_AHEAD_MAX;
    int64_t upper = 0, lower = 0, status = ALL_FOUND, found = 0;
    for (int64_t i = -BUCKET_AHEAD; i < count; ++i) {
        int64_t j = i + BUCKET_AHEAD;
        if (j < count) __builtin_prefetch(bucket_of(view, key_at(keys, j).low));
        j = i + ROW_AHEAD;
        if (j >= 0 && j < count) {
            int32_t row = guess(view, key_at(keys, j));
            ring[j % RING] = row;
            if (row >= 0) __builtin_prefetch(view.heads + row);
        }
        j = i + TOKENS_AHEAD;
        if (j >= 0 && j < count && ring[j % RING] >= 0) {
            // A prefetch never faults, so the row need not be confirmed yet.
            uintptr_t line = uintptr_t(pool) +
                uintptr_t(view.heads[ring[j % RING]].token_row) * uintptr_t(block_tokens) * 4;
            for (int64_t k = 0; k < lines_ahead; ++k)
                __builtin_prefetch(reinterpret_cast<const void*>(line + 64 * uintptr_t(k)));
        }
        if (i < 0) continue;
        int32_t row = resolve(view, key_at(keys, i), ring[i % RING]);
        if (row < 0) {
            status = ABSENT;
            break;
        }
        const Head& head = view.heads[row];
        // A child lies in its parent's space, so the space is compared where the chain starts;
        // only then is token_row known to be a row of this pool.
        bool confirmed = head.parent == parent && (i > 0 || spaces[row] == uint16_t(space)) &&
            same(pool + int64_t(head.token_row) * block_tokens, tokens + i * block_tokens,
                 block_tokens);
        if (!confirmed) {
            status = COLLISION;
            break;
        }
        rows[i] = parent = row;
        upper += head.upper >= 0;
        lower += head.lower >= 0;
        found = i + 1;
    }
    result[0] = found;
    result[1] = upper;
    result[2] = lower;
    result[3] = status;
}

// The row that carries each key, or -1; parents and tokens are not looked at.
void kv_probe(const View* view_, const uint8_t* keys, int64_t count, int32_t* rows) {
    const View view = *view_;
    int32_t ring[RING];
    for (int64_t i = -BUCKET_AHEAD; i < count; ++i) {
        int64_t j = i + BUCKET_AHEAD;
        if (j < count) __builtin_prefetch(bucket_of(view, key_at(keys, j).low));
        j = i + ROW_AHEAD;
        if (j >= 0 && j < count) {
            int32_t row = guess(view, key_at(keys, j));
            ring[j % RING] = row;
            if (row >= 0) __builtin_prefetch(view.heads + row);
        }
        if (i >= 0) rows[i] = resolve(view, key_at(keys, i), ring[i % RING]);
    }
}

// Put rows into the first empty lane of their buckets; rows that find none go to `left`.
// Returns how many were left.
int64_t kv_table_insert(uint64_t* table, uint64_t mask, const Head* heads, const int32_t* rows,
                        int64_t count, int32_t* left) {
    constexpr int64_t AHEAD = 32;
    int64_t full = 0;
    for (int64_t i = -AHEAD; i < count; ++i) {
        if (i + AHEAD < count)
            __builtin_prefetch(table + (heads[rows[i + AHEAD]].key0 & mask) * LANES, 1);
        if (i < 0) continue;
        uint64_t low = heads[rows[i]].key0;
        uint64_t* bucket = table + (low & mask) * LANES;
        int64_t lane = 0;
        while (lane < LANES && bucket[lane]) ++lane;
        if (lane == LANES) left[full++] = rows[i];
        else bucket[lane] = (low & 0xffffffff00000000u) | uint64_t(uint32_t(rows[i]) + 1);
    }
    return full;
}

}  // extern "C"
