// Paged decode attention of fp32, in fp32: see decode_part.cuh.
//
// A warp takes every fourth token; a lane has every 32nd element of it.
#include "decode_part.cuh"

#define ROWS_FP32 4

template <int D>
__device__ __forceinline__ void decode_fp32(KV_DECODE_PARAMETERS(float)) {
    constexpr int E = (D + KV_WARP - 1) / KV_WARP, R = ROWS_FP32;
    KV_SHARED(shared);
    const int warp = threadIdx.x / KV_WARP, lane = threadIdx.x % KV_WARP;
    const Part part = part_of(lengths, heads, kv_heads, n_q, split_tokens, window, R);
    if (part.begin >= part.end) {
        write_empty<float, D, R>(part, heads, partial, sums, output);
        return;
    }
    float queries[R][E], values[R][E], maximum[R], sum[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        maximum[r] = -KV_INF;
        sum[r] = 0.f;
        const bool has = part.has(r);
        const i64 line = part.sequence * n_q + (has ? part.token(r) : 0);
        const float* from = q + line * q_token + (has ? part.head(r) * D : 0);
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int d = lane + e * KV_WARP;
            queries[r][e] = has && d < D ? from[d] * scale * LOG2_E : 0.f;
            values[r][e] = 0.f;
        }
    }
    for (int position = part.begin + warp; position < part.end; position += WARPS) {
        const int nth = position / page_tokens, place = position % page_tokens;
        const int page = page_of(table, table_stride, part.sequence, nth, pool_pages, error);
        const float* keys = k_pool + page * k_page + place * k_token + part.kv_head * k_head;
        const float* content = v_pool + page * v_page + place * v_token + part.kv_head * v_head;
        float key[E], value[E];
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int d = lane + e * KV_WARP;
            const bool inside = page >= 0 && d < D;
            key[e] = inside ? keys[d] : 0.f;
            value[e] = inside ? content[d] : 0.f;
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float score = 0.f;
#pragma unroll
            for (int e = 0; e < E; e++) score += queries[r][e] * key[e];
#pragma unroll
            for (int x = KV_WARP / 2; x; x /= 2) score += __shfl_xor_sync(KV_ALL_LANES, score, x);
            if (!part.sees(r, position)) continue;  // The same for all lanes.
            const float most = fmaxf(maximum[r], score);
            const float shrink = exp2f(maximum[r] - most), weight = exp2f(score - most);
            maximum[r] = most;
            sum[r] = sum[r] * shrink + weight;
#pragma unroll
            for (int e = 0; e < E; e++) values[r][e] = values[r][e] * shrink + weight * value[e];
        }
    }
    float* merged = (float*)shared;
    float* found = merged + WARPS * R * D;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int d = lane + e * KV_WARP;
            if (d < D) merged[(warp * R + r) * D + d] = values[r][e];
        }
        if (lane == 0) {
            found[(warp * R + r) * 2] = maximum[r];
            found[(warp * R + r) * 2 + 1] = sum[r];
        }
    }
    __syncthreads();
    merge_warps<float, D, R>(part, merged, found, heads, partial, sums, output);
}

#define KV_DECODE_FP32(D) KV_DECODE(decode_fp32_##D, float, (decode_fp32<D>))
KV_FOR_HEAD_DIMS(KV_DECODE_FP32)
