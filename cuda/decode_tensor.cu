// Paged decode attention of fp16 and bf16 on the tensor cores: see decode_part.cuh.
//
// Each of the four warps takes every fourth chunk of 16 tokens, with its own maximum and sum, and
// its own ring of chunks in shared memory, filled by asynchronous copies; the warps meet at the end.
// A tile has 16 rows, of which a group of query heads may fill few: reading keys and values is what
// takes the time, so a tile that is nearly empty costs no more than a full one.
// Source: Dao, FlashAttention-2, 2023.
#include "decode_part.cuh"

#define TILE_ROWS 16
#define CHUNK 16

template <int D>
struct Ring {
    // A row has 16 bytes more than it needs: eight rows then start in eight different banks.
    static constexpr int ROW = D + 8;
    static constexpr int STAGES = D <= 128 ? 3 : 2;
    static constexpr int ELEMENTS = CHUNK * ROW;             // of keys, or of values, in a stage
    static constexpr int WARP = 2 * STAGES * ELEMENTS;       // of one warp
    static constexpr int BYTES = 2 * WARPS * WARP;           // of a block of threads
};

// Start the copies of one chunk of keys and values. Every lane of the warp takes part.
template <class T, int D>
__device__ __forceinline__ void fetch(T* keys, T* values, const Part& part, int first,
                                      const T* k_pool, const T* v_pool, const int* table,
                                      int* error, i64 k_page, i64 k_token, i64 k_head, i64 v_page,
                                      i64 v_token, i64 v_head, int page_tokens, int table_stride,
                                      int pool_pages) {
    constexpr int PIECES = D / 8;
    const int lane = threadIdx.x % KV_WARP;
    // Lane r finds row r; the others ask it.
    i64 key_row = -1, value_row = -1;
    const int position = first + lane;
    if (lane < CHUNK && position < part.end) {
        const int nth = position / page_tokens, place = position % page_tokens;
        const int page = page_of(table, table_stride, part.sequence, nth, pool_pages, error);
        if (page >= 0) {
            key_row = page * k_page + place * k_token + part.kv_head * k_head;
            value_row = page * v_page + place * v_token + part.kv_head * v_head;
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK * PIECES / KV_WARP; i++) {
        const int at = i * KV_WARP + lane, row = at / PIECES, piece = at % PIECES;
        const i64 from_key = __shfl_sync(KV_ALL_LANES, key_row, row);
        const i64 from_value = __shfl_sync(KV_ALL_LANES, value_row, row);
        const bool inside = from_key >= 0;
        T* key = keys + row * Ring<D>::ROW + piece * 8;
        T* value = values + row * Ring<D>::ROW + piece * 8;
        copy_async(key, k_pool + (inside ? from_key : 0) + piece * 8, inside);
        copy_async(value, v_pool + (inside ? from_value : 0) + piece * 8, inside);
    }
}

// Scores of a tile against a chunk: two fragments of 8 tokens, masked, in base 2.
template <class T, int D>
__device__ __forceinline__ void score(float scores[2][4], const u32 queries[D / 16][4],
                                      const T* keys, const Part& part, int first, float scale) {
    const int lane = threadIdx.x % KV_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = 0.f;
        const u32* row = (const u32*)(keys + (n * 8 + g) * Ring<D>::ROW);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const u32 b[2] = {row[k * 8 + t], row[k * 8 + 4 + t]};
            multiply_add<T>(scores[n], queries[k], b);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = first + n * 8 + t * 2 + (i & 1);
            const bool seen = position < part.end && part.sees(g + (i >> 1) * 8, position);
            scores[n][i] = seen ? scores[n][i] * scale : -KV_INF;
        }
    }
}

// Online softmax: scores become weights; returns by how much what was summed so far shrinks.
__device__ __forceinline__ float weigh(float scores[2][4], int half, float& maximum, float& sum) {
    float most = maximum;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        most = fmaxf(most, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(KV_ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(KV_ALL_LANES, most, 2));
    const float base = most > -KV_INF ? most : 0.f;  // A row that has seen nothing yet.
    const float shrink = exp2f(maximum - base);
    float added = 0.f;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float weight = exp2f(scores[n][half * 2 + i] - base);
            scores[n][half * 2 + i] = weight;
            added += weight;
        }
    }
    added += __shfl_xor_sync(KV_ALL_LANES, added, 1);
    added += __shfl_xor_sync(KV_ALL_LANES, added, 2);
    sum = sum * shrink + added;
    maximum = most;
    return shrink;
}

template <class T, int D>
__device__ __forceinline__ void load_queries(u32 queries[D / 16][4], const Part& part, const T* q,
                                             i64 q_token) {
    const int lane = threadIdx.x % KV_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = g + half * 8;
        const bool has = part.has(row);
        const i64 line = part.sequence * part.n_q + (has ? part.token(row) : 0);
        const u32* from = (const u32*)(q + line * q_token + (has ? part.head(row) * D : 0));
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            queries[k][half] = has ? from[k * 8 + t] : 0;
            queries[k][2 + half] = has ? from[k * 8 + 4 + t] : 0;
        }
    }
}

template <class T, int D>
__device__ __forceinline__ void decode_16_bit(KV_DECODE_PARAMETERS(T)) {
    typedef Ring<D> R;
    KV_SHARED(shared);
    const int warp = threadIdx.x / KV_WARP, lane = threadIdx.x % KV_WARP, g = lane / 4, t = lane % 4;
    const Part part = part_of(lengths, heads, kv_heads, n_q, split_tokens, window, TILE_ROWS);
    if (part.begin >= part.end) {
        write_empty<T, D, TILE_ROWS>(part, heads, partial, sums, output);
        return;
    }
    T* ring = (T*)shared + warp * R::WARP;
    u32 queries[D / 16][4];
    load_queries<T, D>(queries, part, q, q_token);
    float values[D / 8][4], maximum[2] = {-KV_INF, -KV_INF}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) values[n][i] = 0.f;
    }
    const int chunks = (part.end - part.begin + CHUNK - 1) / CHUNK;
    const int own = (chunks - warp + WARPS - 1) / WARPS;  // Chunks of this warp; may be none.
    // One group a chunk, also where there is no chunk: the number under way stays the same.
    for (int i = 0; i < R::STAGES - 1 + own; i++) {
        const int ready = i - (R::STAGES - 1);
        if (ready >= 0) {
            wait_copies<R::STAGES - 2>();
            // What the other lanes copied is there and seen; and nobody reads the stage before this
            // one any more, so that it may be filled again below.
            __syncwarp();
            const T* keys = ring + ready % R::STAGES * 2 * R::ELEMENTS;
            const T* content = keys + R::ELEMENTS;
            const int first = part.begin + (ready * WARPS + warp) * CHUNK;
            float scores[2][4];
            score<T, D>(scores, queries, keys, part, first, scale * LOG2_E);
            const float shrink[2] = {weigh(scores, 0, maximum[0], sum[0]),
                                     weigh(scores, 1, maximum[1], sum[1])};
            u32 weights[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                weights[n * 2] = pack(from_float<T>(scores[n][0]), from_float<T>(scores[n][1]));
                weights[n * 2 + 1] = pack(from_float<T>(scores[n][2]), from_float<T>(scores[n][3]));
            }
            const T* rows = content + 2 * t * R::ROW + g;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) values[n][i] *= shrink[i >> 1];
                const T* at = rows + n * 8;
                const u32 b[2] = {pack(at[0], at[R::ROW]), pack(at[8 * R::ROW], at[9 * R::ROW])};
                multiply_add<T>(values[n], weights, b);
            }
        }
        if (i < own) {
            T* keys = ring + i % R::STAGES * 2 * R::ELEMENTS;
            const int first = part.begin + (i * WARPS + warp) * CHUNK;
            fetch<T, D>(keys, keys + R::ELEMENTS, part, first, k_pool, v_pool, table, error, k_page,
                        k_token, k_head, v_page, v_token, v_head, page_tokens, table_stride,
                        pool_pages);
        }
        commit_copies();
    }
    __syncthreads();  // The ring is free: the warps' results go where it was.
    float* merged = (float*)shared;
    float* found = merged + WARPS * TILE_ROWS * D;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * TILE_ROWS + g + half * 8;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            merged[row * D + n * 8 + t * 2] = values[n][half * 2];
            merged[row * D + n * 8 + t * 2 + 1] = values[n][half * 2 + 1];
        }
        if (t == 0) {
            found[row * 2] = maximum[half];
            found[row * 2 + 1] = sum[half];
        }
    }
    __syncthreads();
    merge_warps<T, D, TILE_ROWS>(part, merged, found, heads, partial, sums, output);
}

#define KV_DECODE_TENSOR(D)                                                                        \
    KV_DECODE(decode_bf16_##D, __nv_bfloat16, (decode_16_bit<__nv_bfloat16, D>))                   \
    KV_DECODE(decode_fp16_##D, __half, (decode_16_bit<__half, D>))
KV_FOR_HEAD_DIMS(KV_DECODE_TENSOR)
