// Hashes by themselves: one, many, and the chained keys of consecutive blocks.
#include <vector>

#include "xxh3.hpp"

extern "C" {

uint64_t kv_xxh3_64(const void* data, size_t length) {
    return xxh3::hash64(static_cast<const uint8_t*>(data), length);
}

void kv_xxh3_64_many(const uint8_t* base, const int64_t* offsets, const int64_t* lengths, int64_t n,
                     uint64_t* out) {
    for (int64_t i = 0; i < n; i++) out[i] = xxh3::hash64(base + offsets[i], lengths[i]);
}

// keys_out[i] = XXH3-128(keys_out[i - 1] || tokens[i]), in the canonical (big-endian) byte order;
// parent stands before the first. keys_out is [blocks][16].
void kv_chain(const uint8_t parent[16], const int32_t* tokens, int64_t blocks, int64_t block_tokens,
              uint8_t* keys_out) {
    constexpr size_t KEY = 16;
    const size_t token_bytes = 4 * static_cast<size_t>(block_tokens);
    std::vector<uint8_t> input(KEY + token_bytes);
    memcpy(input.data(), parent, KEY);
    for (int64_t i = 0; i < blocks; i++) {
        memcpy(input.data() + KEY, tokens + i * block_tokens, token_bytes);
        const xxh3::Hash128 hash = xxh3::hash128(input.data(), input.size());
        const uint64_t key[2] = {__builtin_bswap64(hash.high), __builtin_bswap64(hash.low)};
        memcpy(input.data(), key, KEY);
        memcpy(keys_out + KEY * i, key, KEY);
    }
}

}
