// Rotary embedding of queries and keys, and the write of keys and values into their pages.
//
//   mixed      T [tokens][heads + 2 * kv_heads][D]: queries, keys, values; queries are rotated here
//   rotary     float [positions][rotary_dim]: cosines of the pairs, then their sines
//   positions  int [tokens]: row of `rotary`
//   slots      i64 [tokens]: page * page_tokens + place in the page; negative: the token is padding,
//              and nothing of it is written to a page
//   error      int: a token whose slot lies beyond the pool, plus 1
//
// Pair p is (2p, 2p + 1) with `interleaved`, else (p, p + rotary_dim / 2); dimensions from rotary_dim
// on are left as they are. One block of threads a token. Strides are in elements.
// Source: Su et al., RoFormer, 2021.
#include "kv_device.cuh"

template <class T>
__device__ __forceinline__ void rotate_pair(const T* from, T* to, int first, int second, float c,
                                            float s) {
    const float x = to_float(from[first]), y = to_float(from[second]);
    to[first] = from_float<T>(x * c - y * s);
    to[second] = from_float<T>(y * c + x * s);
}

template <class T>
__device__ __forceinline__ void rotate_and_write(
    T* mixed, const float* rotary, const int* positions, const i64* slots, T* k_pool, T* v_pool,
    int* error, i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token, i64 v_head, int heads,
    int kv_heads, int head_dim, int rotary_dim, int interleaved, int page_tokens, int pool_pages) {
    const int token = blockIdx.x, pairs = rotary_dim / 2, rest = head_dim - rotary_dim;
    T* row = mixed + (i64)token * (heads + 2 * kv_heads) * head_dim;
    const float* cosines = rotary + (i64)positions[token] * rotary_dim;
    const i64 slot = slots[token];
    const i64 page = slot / page_tokens, place = slot % page_tokens;
    const bool inside = slot >= 0 && page < pool_pages;
    if (slot >= 0 && !inside && threadIdx.x == 0) atomicExch(error, 1 + token);
    T* k_row = k_pool + (inside ? page * k_page + place * k_token : 0);
    T* v_row = v_pool + (inside ? page * v_page + place * v_token : 0);
    for (int i = threadIdx.x; i < (heads + kv_heads) * pairs; i += blockDim.x) {
        const int head = i / pairs, pair = i % pairs;
        const int first = interleaved ? 2 * pair : pair;
        const int second = interleaved ? first + 1 : pair + pairs;
        T* from = row + (i64)head * head_dim;
        const bool query = head < heads;
        if (query || inside) {
            T* to = query ? from : k_row + (head - heads) * k_head;
            rotate_pair(from, to, first, second, cosines[pair], cosines[pairs + pair]);
        }
    }
    if (!inside) return;
    const T* keys = row + (i64)heads * head_dim;
    for (int i = threadIdx.x; i < kv_heads * rest; i += blockDim.x) {
        const int head = i / rest, at = rotary_dim + i % rest;
        k_row[head * k_head + at] = keys[head * head_dim + at];
    }
    const T* values = keys + (i64)kv_heads * head_dim;
    for (int i = threadIdx.x; i < kv_heads * head_dim; i += blockDim.x) {
        v_row[i / head_dim * v_head + i % head_dim] = values[i];
    }
}

#define KV_ROPE_WRITE(NAME, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                             \
    NAME(T* mixed, const float* rotary, const int* positions, const i64* slots, T* k_pool,         \
         T* v_pool, int* error, i64 k_page, i64 k_token, i64 k_head, i64 v_page, i64 v_token,      \
         i64 v_head, int heads, int kv_heads, int head_dim, int rotary_dim, int interleaved,       \
         int page_tokens, int pool_pages) {                                                        \
        rotate_and_write<T>(mixed, rotary, positions, slots, k_pool, v_pool, error, k_page,        \
                            k_token, k_head, v_page, v_token, v_head, heads, kv_heads, head_dim,   \
                            rotary_dim, interleaved, page_tokens, pool_pages);                     \
    }
KV_ROPE_WRITE(rope_write_bf16, __nv_bfloat16)
KV_ROPE_WRITE(rope_write_fp16, __half)
KV_ROPE_WRITE(rope_write_fp32, float)
