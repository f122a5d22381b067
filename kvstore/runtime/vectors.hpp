// Vectors of floats on whatever the machine has: 16 lanes with AVX-512, else 8 (two SSE or NEON
// registers where AVX is missing). GCC's and Clang's vector types lower to any instruction set, so
// intrinsics appear only where the compiler would not find the instruction by itself.
//
// Every kernel sums in a fixed order that depends on nothing but the sizes of the model: not on the
// number of rows in the batch, not on the number of threads. That is what makes a token's keys and
// values a function of its prefix alone, bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kv {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS_MAX = 12;  // Rows of a tile: 12 x 2 accumulators leave 8 registers of 32.
#else
constexpr int LANES = 8;
constexpr int ROWS_MAX = 6;  // 6 x 2 accumulators leave 4 registers of AVX's 16.
#endif
constexpr int PANEL = 2 * LANES;  // Columns of a tile.

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t bf16;

template <class V>
inline V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline void store_as(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline Floats splat(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#else
    return x -
           Floats{};  // Minus, not plus: adding zero would turn -0 into 0, so it costs an addition.
#endif
}
inline Words bits(Floats v) { return (Words)v; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline bf16 narrow(float x) {  // Round to nearest, ties to even.
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);  // A NaN stays one.
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline Floats load(const float* p) { return load_as<Floats>(p); }
inline Floats load(const bf16* p) {
    return (Floats)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
}
inline void store(float* p, Floats v) { store_as(p, v); }
inline void store(bf16* p, Floats v) {
    Words u = bits(v);
    Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    rounded = (u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded;
    store_as(p, __builtin_convertvector(rounded, Halves));
}
inline void store_some(float* p, Floats v, int64_t n) { std::memcpy(p, &v, n * 4); }
inline void store_some(bf16* p, Floats v, int64_t n) {
    bf16 all[LANES];
    store(all, v);
    std::memcpy(p, all, n * 2);
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = narrow(x); }

inline Floats mul_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // Contracted to one instruction by -ffp-contract=fast where there is one.
#endif
}

// The larger of two; where either is NaN, `b`: so larger(limit, x) keeps a NaN in x.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

inline float sum(Floats v) {
    float x[LANES];
    store_as(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
inline float largest(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[LANES];
    store_as(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

// e^x for x up to 88, relative error below 2e-7; below -87 it stays at e^-87, which is 1.6e-38.
inline Floats exponential(Floats x) {
    constexpr float LOWEST = -87.f,
                    SHIFT = 12582912.f;  // 1.5 * 2^23: adding it rounds to integers.
    x = larger(splat(LOWEST), x);
    Floats shifted = mul_add(x, splat(1.44269504f), splat(SHIFT));
    Floats n = shifted - splat(SHIFT);
    Floats f = mul_add(n, splat(-0.693359375f), x);
    f = mul_add(n, splat(2.12194440e-4f), f);
    Floats p = splat(1.9875691500e-4f);
    p = mul_add(p, f, splat(1.3981999507e-3f));
    p = mul_add(p, f, splat(8.3334519073e-3f));
    p = mul_add(p, f, splat(4.1665795894e-2f));
    p = mul_add(p, f, splat(1.6666665459e-1f));
    p = mul_add(p, f, splat(5.0000001201e-1f));
    p = mul_add(p, f * f, f + splat(1.f));
    return (Floats)((Ints)p + ((Ints)shifted << 23));  // SHIFT's own bits fall off the top.
}
inline float exponential(float x) { return exponential(splat(x))[0]; }

inline Floats silu(Floats x) { return x / (exponential(smaller(splat(88.f), -x)) + splat(1.f)); }

}  // namespace kv
