// Attention of the newest tokens over paged keys and values, split along the context.
//
//   q        T [sequences * n_q][q_token] of which [heads][D] are read: the n_q newest tokens of each
//   k_pool, v_pool  T, with strides in elements for page, token in the page and kv_head; a row of D
//            elements is contiguous and starts at a multiple of 16 bytes
//   table    int [sequences][table_stride]: page ids; lengths: int [sequences], tokens in the pool,
//            the n_q newest included
//   partial  float [sequences * n_q][heads][splits][D], sums: float [..][splits][2]: what each split
//            found, not normalised, with its maximum (base 2) and its sum; written if splits > 1
//   output   T [sequences * n_q][heads][D]; written by this kernel if there is one split, otherwise
//            by combine_attention
//   error    int: 1 + sequence of a page id that does not exist; its tokens count as zeros
//
// grid (splits, kv_heads * row tiles, sequences). The 16 rows of a tile are (new token, query head)
// pairs that share a kv_head, so keys and values are read once for a whole group (GQA, MQA). A new
// token i sees the context up to itself, and of that the last `window` tokens if window > 0.
// Splits are split_tokens long and start where the window of the first new token does. What a kernel
// is launched with may be larger than a sequence needs: such blocks write nothing but "empty".
//
// The same for every type of numbers; decode_tensor.cu and decode_fp32.cu have the kernels.
// Source: Dao et al., Flash-Decoding, 2023.
#pragma once
#include "kv_device.cuh"

#define WARPS 4
#define LOG2_E 1.4426950408889634f

#define KV_DECODE_PARAMETERS(T)                                                                    \
    const T *__restrict__ q, const T *__restrict__ k_pool, const T *__restrict__ v_pool,           \
        const int *__restrict__ table, const int *__restrict__ lengths, float *partial,            \
        float *sums, T *output, int *error, i64 q_token, i64 k_page, i64 k_token, i64 k_head,      \
        i64 v_page, i64 v_token, i64 v_head, int heads, int kv_heads, int n_q, int page_tokens,    \
        int table_stride, int pool_pages, int split_tokens, int window, float scale
#define KV_DECODE_ARGUMENTS                                                                        \
    q, k_pool, v_pool, table, lengths, partial, sums, output, error, q_token, k_page, k_token,     \
        k_head, v_page, v_token, v_head, heads, kv_heads, n_q, page_tokens, table_stride,          \
        pool_pages, split_tokens, window, scale

// Which part of which sequence a block of threads works on.
struct Part {
    int sequence, kv_head, first_row, rows, group, length, n_q, window, begin, end;

    // Of a row of the tile: its query row in q and output, and the tokens that it sees.
    __device__ __forceinline__ bool has(int row) const { return first_row + row < rows; }
    __device__ __forceinline__ int token(int row) const { return (first_row + row) / group; }
    __device__ __forceinline__ int head(int row) const {
        return kv_head * group + (first_row + row) % group;
    }
    __device__ __forceinline__ int last(int row) const { return length - n_q + token(row) + 1; }
    __device__ __forceinline__ bool sees(int row, int position) const {
        const int stop = last(row);
        return has(row) && position < stop && (window == 0 || position >= stop - window);
    }
};

__device__ __forceinline__ Part part_of(const int* lengths, int heads, int kv_heads, int n_q,
                                        int split_tokens, int window, int tile_rows) {
    Part part;
    part.sequence = blockIdx.z;
    part.kv_head = blockIdx.y % kv_heads;
    part.first_row = blockIdx.y / kv_heads * tile_rows;
    part.group = heads / kv_heads;
    part.rows = n_q * part.group;
    part.n_q = n_q;
    part.window = window;
    part.length = lengths[part.sequence];
    const int first = window ? max(0, part.length - n_q + 1 - window) : 0;
    part.begin = first + blockIdx.x * split_tokens;
    part.end = min(part.length, part.begin + split_tokens);
    return part;
}

// Where a row of a partial result, or of the output, lies.
__device__ __forceinline__ i64 row_place(const Part& part, int row, int heads) {
    return (i64)(part.sequence * part.n_q + part.token(row)) * heads + part.head(row);
}

// Write a row: as the result if there is one split, else as one part of it.
template <class T, int D>
__device__ __forceinline__ void write_row(i64 place, int d, float value, float maximum, float sum,
                                          float* partial, float* sums, T* output) {
    if (gridDim.x == 1) {
        output[place * D + d] = from_float<T>(sum > 0.f ? value / sum : 0.f);
        return;
    }
    const i64 at = place * gridDim.x + blockIdx.x;
    partial[at * D + d] = value;
    if (d == 0) {
        sums[at * 2] = maximum;
        sums[at * 2 + 1] = sum;
    }
}

// The warps' results lie in shared memory: merge them, and write the rows of the tile.
template <class T, int D, int ROWS>
__device__ __forceinline__ void merge_warps(const Part& part, const float* values,
                                            const float* found, int heads, float* partial,
                                            float* sums, T* output) {
    for (int i = threadIdx.x; i < ROWS * D; i += WARPS * KV_WARP) {
        const int row = i / D, d = i % D;
        if (!part.has(row)) continue;
        float maximum = -KV_INF, sum = 0.f, value = 0.f;
        for (int w = 0; w < WARPS; w++) {
            maximum = fmaxf(maximum, found[(w * ROWS + row) * 2]);
        }
        for (int w = 0; w < WARPS && maximum > -KV_INF; w++) {
            const float weight = exp2f(found[(w * ROWS + row) * 2] - maximum);
            sum += weight * found[(w * ROWS + row) * 2 + 1];
            value += weight * values[(w * ROWS + row) * D + d];
        }
        write_row<T, D>(row_place(part, row, heads), d, value, maximum, sum, partial, sums, output);
    }
}

// A block of threads whose part of the context is empty.
template <class T, int D, int ROWS>
__device__ __forceinline__ void write_empty(const Part& part, int heads, float* partial,
                                            float* sums, T* output) {
    for (int i = threadIdx.x; i < ROWS * D; i += WARPS * KV_WARP) {
        const int row = i / D;
        if (!part.has(row)) continue;
        const i64 place = row_place(part, row, heads);
        if (gridDim.x == 1) {
            output[place * D + i % D] = from_float<T>(0.f);
        } else if (i % D == 0) {
            sums[(place * gridDim.x + blockIdx.x) * 2] = -KV_INF;
            sums[(place * gridDim.x + blockIdx.x) * 2 + 1] = 0.f;
        }
    }
}

// The page of a token, or -1 with `error` set.
__device__ __forceinline__ int page_of(const int* table, int table_stride, int sequence, int nth,
                                       int pool_pages, int* error) {
    const int page = nth < table_stride ? table[(i64)sequence * table_stride + nth] : -1;
    if (page >= 0 && page < pool_pages) return page;
    atomicExch(error, 1 + sequence);
    return -1;
}

// Entry points: one for each head_dim; with KV_HEAD_DIM only that one is compiled.
#ifdef KV_HEAD_DIM
#define KV_APPLY(DO, D) DO(D)
#define KV_FOR_HEAD_DIMS(DO) KV_APPLY(DO, KV_HEAD_DIM)
#else
#define KV_FOR_HEAD_DIMS(DO) DO(64) DO(80) DO(96) DO(128) DO(256)
#endif
#define KV_DECODE(NAME, T, BODY)                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS* KV_WARP) NAME(KV_DECODE_PARAMETERS(T)) {   \
        BODY(KV_DECODE_ARGUMENTS);                                                                 \
    }
