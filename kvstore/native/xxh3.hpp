// XXH3, 64 and 128 bits, unseeded with the default secret: written from the algorithm's
// specification, bit-equal to the reference on every length. Little-endian machines only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

namespace xxh3 {

constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t P64_3 = 0x165667B19E3779F9u, P64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t P64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t MIX_1 = 0x165667919E3779F9u, MIX_2 = 0x9FB21C651E98DF25u;

constexpr size_t SECRET_BYTES = 192;
constexpr size_t STRIPE = 64;                                      // bytes the lanes take at once
constexpr size_t BLOCK_STRIPES = (SECRET_BYTES - STRIPE) / 8;      // stripes between scrambles
constexpr size_t BLOCK = STRIPE * BLOCK_STRIPES;                   // 1024 bytes
constexpr size_t MIDSIZE_MAX = 240;                                // longer inputs use the lanes

alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Hash128 {
    uint64_t low, high;
};

inline uint64_t read64(const uint8_t* p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

inline uint64_t read32(const uint8_t* p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

inline uint64_t rotate(uint64_t v, int bits) { return (v << bits) | (v >> (64 - bits)); }

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= MIX_1;
    return h ^ (h >> 32);
}

// The finaliser of XXH64, which the shortest inputs use.
inline uint64_t avalanche_old(uint64_t h) {
    h ^= h >> 33;
    h *= P64_2;
    h ^= h >> 29;
    h *= P64_3;
    return h ^ (h >> 32);
}

inline uint64_t mix16(const uint8_t* p, const uint8_t* secret) {
    return fold(read64(p) ^ read64(secret), read64(p + 8) ^ read64(secret + 8));
}

inline void mix32(Hash128& acc, const uint8_t* a, const uint8_t* b, const uint8_t* secret) {
    acc.low += mix16(a, secret);
    acc.low ^= read64(b) + read64(b + 8);
    acc.high += mix16(b, secret + 16);
    acc.high ^= read64(a) + read64(a + 8);
}

// The eight lanes of inputs longer than MIDSIZE_MAX, in whatever registers the CPU has.
struct Lanes {
#if defined(__AVX512F__)
    __m512i v;

    Lanes() {
        v = _mm512_set_epi64(P32_1, P64_5, P32_2, P64_4, P64_3, P64_2, P64_1, P32_3);
    }
    void add(const uint8_t* p, const uint8_t* secret) {
        const __m512i data = _mm512_loadu_si512(p);
        const __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
        v = _mm512_add_epi64(v, _mm512_add_epi64(product, swapped));
    }
    void scramble(const uint8_t* secret) {
        const __m512i mixed = _mm512_ternarylogic_epi64(
            v, _mm512_srli_epi64(v, 47), _mm512_loadu_si512(secret), 0x96);  // xor of the three
        const __m512i prime = _mm512_set1_epi64(P32_1);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        v = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    void store(uint64_t out[8]) const { _mm512_storeu_si512(out, v); }
#elif defined(__AVX2__)
    __m256i v[2];

    Lanes() {
        v[0] = _mm256_set_epi64x(P64_3, P64_2, P64_1, P32_3);
        v[1] = _mm256_set_epi64x(P32_1, P64_5, P32_2, P64_4);
    }
    static __m256i at(const uint8_t* p, int half) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + half);
    }
    void add(const uint8_t* p, const uint8_t* secret) {
        for (int half = 0; half < 2; half++) {
            const __m256i data = at(p, half);
            const __m256i key = _mm256_xor_si256(data, at(secret, half));
            const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
            v[half] = _mm256_add_epi64(v[half], _mm256_add_epi64(product, swapped));
        }
    }
    void scramble(const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi64x(P32_1);
        for (int half = 0; half < 2; half++) {
            const __m256i folded = _mm256_xor_si256(v[half], _mm256_srli_epi64(v[half], 47));
            const __m256i mixed = _mm256_xor_si256(folded, at(secret, half));
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            v[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    void store(uint64_t out[8]) const { memcpy(out, v, sizeof v); }
#else
    uint64_t v[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

    void add(const uint8_t* p, const uint8_t* secret) {
        for (int lane = 0; lane < 8; lane++) {
            const uint64_t data = read64(p + 8 * lane);
            const uint64_t key = data ^ read64(secret + 8 * lane);
            v[lane ^ 1] += data;
            v[lane] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
    }
    void scramble(const uint8_t* secret) {
        for (int lane = 0; lane < 8; lane++) {
            v[lane] = (v[lane] ^ (v[lane] >> 47) ^ read64(secret + 8 * lane)) * P32_1;
        }
    }
    void store(uint64_t out[8]) const { memcpy(out, v, sizeof v); }
#endif
};

// A long input (over MIDSIZE_MAX bytes) hashed as its bytes arrive at one contiguous place.
class Long {
public:
    Long(const uint8_t* input, size_t length)
        : input_(input), length_(length), whole_(((length - 1) / BLOCK) * BLOCK) {}

    // Takes the whole blocks among the first `arrived` bytes.
    void advance(size_t arrived) {
        const size_t end = arrived < whole_ ? arrived : whole_;
        for (; at_ + BLOCK <= end; at_ += BLOCK) {
            for (size_t stripe = 0; stripe < BLOCK_STRIPES; stripe++) {
                lanes_.add(input_ + at_ + STRIPE * stripe, SECRET + 8 * stripe);
            }
            lanes_.scramble(SECRET + SECRET_BYTES - STRIPE);
        }
    }
    // All bytes have arrived. Once only.
    Hash128 finish() {
        advance(length_);
        const size_t stripes = (length_ - 1 - whole_) / STRIPE;
        for (size_t stripe = 0; stripe < stripes; stripe++) {
            lanes_.add(input_ + whole_ + STRIPE * stripe, SECRET + 8 * stripe);
        }
        lanes_.add(input_ + length_ - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
        uint64_t v[8];
        lanes_.store(v);
        return {merge(v, SECRET + 11, length_ * P64_1),
                merge(v, SECRET + SECRET_BYTES - STRIPE - 11, ~(length_ * P64_2))};
    }

private:
    static uint64_t merge(const uint64_t v[8], const uint8_t* secret, uint64_t h) {
        for (int pair = 0; pair < 4; pair++) {
            h += fold(v[2 * pair] ^ read64(secret + 16 * pair),
                      v[2 * pair + 1] ^ read64(secret + 16 * pair + 8));
        }
        return avalanche(h);
    }

    const uint8_t* input_;
    size_t length_;
    size_t whole_;  // bytes in whole blocks; the last byte is never among them
    size_t at_ = 0;
    Lanes lanes_;
};

inline uint64_t hash64_upto_16(const uint8_t* p, size_t n) {
    if (n > 8) {
        const uint64_t low = read64(p) ^ read64(SECRET + 24) ^ read64(SECRET + 32);
        const uint64_t high = read64(p + n - 8) ^ read64(SECRET + 40) ^ read64(SECRET + 48);
        return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (n >= 4) {
        uint64_t h = read32(p + n - 4) + (read32(p) << 32);
        h ^= read64(SECRET + 8) ^ read64(SECRET + 16);
        h ^= rotate(h, 49) ^ rotate(h, 24);
        h *= MIX_2;
        h ^= (h >> 35) + n;
        h *= MIX_2;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        const uint64_t bytes = (uint64_t(p[0]) << 16) | (uint64_t(p[n >> 1]) << 24) | p[n - 1] |
                               (uint64_t(n) << 8);
        return avalanche_old(bytes ^ (read32(SECRET) ^ read32(SECRET + 4)));
    }
    return avalanche_old(read64(SECRET + 56) ^ read64(SECRET + 64));
}

inline uint64_t hash64(const uint8_t* p, size_t n) {
    if (n > MIDSIZE_MAX) return Long(p, n).finish().low;
    if (n <= 16) return hash64_upto_16(p, n);
    uint64_t h = n * P64_1;
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            h += mix16(p + 16 * i, SECRET + 32 * i);
            h += mix16(p + n - 16 * (i + 1), SECRET + 32 * i + 16);
        }
        return avalanche(h);
    }
    for (size_t i = 0; i < 8; i++) h += mix16(p + 16 * i, SECRET + 16 * i);
    h = avalanche(h);
    for (size_t i = 8; i < n / 16; i++) h += mix16(p + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(h + mix16(p + n - 16, SECRET + 136 - 17));
}

// 128 bits of at least 17 bytes: a chained key's input is a parent of 16 bytes and some tokens.
inline Hash128 hash128(const uint8_t* p, size_t n) {
    if (n > MIDSIZE_MAX) return Long(p, n).finish();
    Hash128 acc = {n * P64_1, 0};
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            mix32(acc, p + 16 * i, p + n - 16 * (i + 1), SECRET + 32 * i);
        }
    } else {
        for (size_t i = 0; i < 128; i += 32) mix32(acc, p + i, p + i + 16, SECRET + i);
        acc = {avalanche(acc.low), avalanche(acc.high)};
        for (size_t i = 128; i + 32 <= n; i += 32) mix32(acc, p + i, p + i + 16, SECRET + i - 125);
        mix32(acc, p + n - 16, p + n - 32, SECRET + 136 - 17 - 16);
    }
    const uint64_t high = acc.low * P64_1 + acc.high * P64_4 + n * P64_2;
    return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

}  // namespace xxh3
