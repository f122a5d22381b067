// Causal attention over paged keys and values, read where they lie. One algorithm for prefill and
// decode: a token's output is the same, bit for bit, however the tokens were cut into steps.
//
// Keys are taken in blocks of BLOCK at fixed places of the sequence, with a running maximum; blocks
// make spans of SPAN keys, each summed by itself and then merged in order. So a decode step may
// give the spans of one long sequence to several threads and still add in the order a prefill does.
#pragma once
#include <vector>

#include "linear.hpp"

namespace kv {

constexpr int64_t BLOCK = 64;
constexpr int64_t SPAN = 512;       // A multiple of BLOCK.
constexpr int64_t TILE_ROWS = 192;  // Query rows that share one widened block of keys and values.
constexpr float NOTHING = -INFINITY;

struct Pool {
    const void* keys;
    const void* values;
    int64_t page_stride;  // In elements, from one page to the next.
    int64_t page_tokens;
    int64_t kv_heads;
    int64_t head_dim;
};

// What one sequence brings: `count` consecutive tokens, the first at `position`.
struct Query {
    const float* rows;  // [count, heads, head_dim], scaled.
    void* out;          // [count, heads, head_dim]
    const int64_t* table;
    int64_t position;
    int64_t count;
};

// A block of keys as panels [BLOCK / PANEL][head_dim][PANEL], and of values as panels
// [head_dim / PANEL][BLOCK][PANEL]; what lies past the sequence's end is zero, whatever the page
// has.
struct Widened {
    std::vector<float> keys, values;
};

// The running softmax of up to TILE_ROWS rows.
struct Partial {
    std::vector<float> out;      // [rows, padded head_dim]
    std::vector<float> maximum;  // [rows]
    std::vector<float> total;    // [rows, LANES]: summed over lanes only at the end.
    void reset(int64_t rows, int64_t width) {
        out.assign(rows * width, 0.f);
        maximum.assign(rows, NOTHING);
        total.assign(rows * LANES, 0.f);
    }
};

#if defined(__AVX512F__)
inline void transpose(__m512 (&r)[16]) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}
#endif

// Keys [LANES rows][head_dim] -> columns of a panel: to[d * PANEL + lane] = rows[lane][d].
template <class T>
void transpose_keys(const T* const* rows, int64_t head_dim, float* to) {
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + LANES <= head_dim; d += LANES) {
        __m512 r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = (__m512)load(rows[i] + d);
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) store(to + (d + i) * PANEL, (Floats)r[i]);
    }
#endif
    for (; d < head_dim; d++)
        for (int i = 0; i < LANES; i++) to[d * PANEL + i] = widen(rows[i][d]);
}

template <class T>
struct Attention {
    const Pool& pool;
    int64_t heads;
    int64_t group = heads / pool.kv_heads;
    int64_t width = (pool.head_dim + PANEL - 1) / PANEL * PANEL;  // Of an output row, padded.
    std::vector<T> zeros = std::vector<T>(pool.head_dim, T(0));
    Widened wide{std::vector<float>(BLOCK * pool.head_dim), std::vector<float>(BLOCK * width)};
    std::vector<float> scores = std::vector<float>(ROWS_MAX * BLOCK);
    std::vector<float> queries = std::vector<float>(std::max(TILE_ROWS, group) * pool.head_dim);
    struct Rows {
        const T *keys[BLOCK], *values[BLOCK];
    };

    // Where the keys and values of the block from `begin` lie; zeros past `end`.
    void locate(const int64_t* table, int64_t head, int64_t begin, int64_t end, Rows& rows) const {
        const int64_t dim = pool.head_dim, token_stride = pool.kv_heads * dim;
        int64_t page = begin / pool.page_tokens, offset = begin % pool.page_tokens;
        for (int64_t i = 0; i < BLOCK; i++) {
            rows.keys[i] = rows.values[i] = zeros.data();
            if (begin + i >= end) continue;
            int64_t at = table[page] * pool.page_stride + offset * token_stride + head * dim;
            rows.keys[i] = (const T*)pool.keys + at;
            rows.values[i] = (const T*)pool.values + at;
            if (++offset == pool.page_tokens) offset = 0, page++;
        }
    }
    // Pages lie anywhere, so the hardware cannot guess the next one. A part at a time, between
    // products: all at once they would wait for each other and the products for them.
    static void fetch(const T* const* rows, int64_t head_dim) {
        for (int64_t i = 0; i < BLOCK / 2; i++)
            for (int64_t at = 0; at < head_dim * (int64_t)sizeof(T); at += 64)
                __builtin_prefetch((const char*)rows[i] + at, 0, 2);
    }
    void widen_block(const Rows& rows) {
        const int64_t dim = pool.head_dim;
        for (int64_t i = 0; i < BLOCK; i += LANES)
            transpose_keys(rows.keys + i, dim,
                           wide.keys.data() + i / PANEL * dim * PANEL + i % PANEL);
        for (int64_t i = 0; i < BLOCK; i++) {
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(value_at(i, d), load(rows.values[i] + d));
            for (; d < dim; d++) *value_at(i, d) = widen(rows.values[i][d]);
        }
    }
    float* value_at(int64_t token, int64_t d) {
        return wide.values.data() + (d / PANEL * BLOCK + token) * PANEL + d % PANEL;
    }

    // A strip of rows against the block: scores, weights, and onto the output. All of it, with the
    // widened block, stays in the first cache.
    template <int ROWS>
    void strip(int64_t row, int64_t position, int64_t at, const Rows& next, Partial& p) {
        const int64_t dim = pool.head_dim;
        for (int64_t panel = 0; panel < BLOCK / PANEL; panel++) {
            Floats sums[ROWS][2] = {};
            if (row == 0) fetch(next.keys + panel * (BLOCK / 2) % BLOCK, dim);
            multiply_tile<ROWS, Float32Weights>(
                queries.data() + row * dim, dim,
                (const char*)(wide.keys.data() + panel * dim * PANEL), dim, sums);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                float* to = scores.data() + r * BLOCK + panel * PANEL;
                store(to, sums[r][0]);
                store(to + LANES, sums[r][1]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            soften(scores.data() + r * BLOCK, row + r, position + (row + r) / group + 1 - at, p);
        for (int64_t panel = 0; panel < width / PANEL; panel++) {
            float* to = p.out.data() + row * width + panel * PANEL;
            if (row == 0) fetch(next.values + panel * (BLOCK / 2) % BLOCK, dim);
            Floats sums[ROWS][2];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                sums[r][0] = load(to + r * width);
                sums[r][1] = load(to + r * width + LANES);
            }
            multiply_tile<ROWS, Float32Weights>(
                scores.data(), BLOCK, (const char*)(wide.values.data() + panel * BLOCK * PANEL),
                BLOCK, sums);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                store(to + r * width, sums[r][0]);
                store(to + r * width + LANES, sums[r][1]);
            }
        }
    }
    template <int... I>
    void all_strips(int64_t rows, int64_t position, int64_t at, const Rows& next, Partial& p,
                    std::integer_sequence<int, I...>) {
        using Strip = void (Attention::*)(int64_t, int64_t, int64_t, const Rows&, Partial&);
        static constexpr Strip strips[] = {&Attention::strip<I + 1>...};
        for (int64_t row = 0; row < rows; row += ROWS_MAX)
            (this->*strips[std::min<int64_t>(ROWS_MAX, rows - row) - 1])(row, position, at, next,
                                                                         p);
    }

    // Scores -> weights in place, and the running maximum and total; the first `valid` keys count.
    void soften(float* s, int64_t row, int64_t valid, Partial& p) {
        if (valid <= 0) {
            std::memset(s, 0, BLOCK * 4);
            return;
        }
        Floats x[BLOCK / LANES];
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK / LANES; i++) x[i] = load(s + i * LANES);
        Ints lane;
        for (int j = 0; j < LANES; j++) lane[j] = j - (int32_t)std::min(valid, BLOCK);
        if (valid < BLOCK) {
#pragma GCC unroll 8
            for (int i = 0; i < BLOCK / LANES; i++)
                x[i] = lane + i * LANES < 0 ? x[i] : splat(NOTHING);
        }
        Floats top = x[0];
#pragma GCC unroll 8
        for (int i = 1; i < BLOCK / LANES; i++) top = larger(x[i], top);
        float maximum = largest(top);
        float* total = p.total.data() + row * LANES;
        if (maximum > p.maximum[row]) {
            Floats scale = splat(exponential(p.maximum[row] - maximum));
            float* out = p.out.data() + row * width;
            for (int64_t d = 0; d < width; d += LANES) store(out + d, load(out + d) * scale);
            store(total, load(total) * scale);
            p.maximum[row] = maximum;
        }
        Floats base = splat(p.maximum[row]), sums = load(total);
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK / LANES; i++) {
            Floats e = exponential(x[i] - base);
            if (valid < BLOCK) e = lane + i * LANES < 0 ? e : Floats{};  // Exactly nothing.
            store(s + i * LANES, e);
            sums += e;
        }
        store(total, sums);
    }

    void take_queries(const Query& q, int64_t head, int64_t first, int64_t tokens) {
        const int64_t dim = pool.head_dim;
        for (int64_t t = 0; t < tokens; t++)
            std::memcpy(queries.data() + t * group * dim,
                        q.rows + ((first + t) * heads + head * group) * dim, group * dim * 4);
    }

    // One span of keys [begin, end) for the queries taken, whose first token lies at `position`.
    void span(const Query& q, int64_t head, int64_t position, int64_t tokens, int64_t begin,
              int64_t end, Partial& p) {
        const int64_t rows = tokens * group, known = q.position + q.count;
        p.reset(rows, width);
        const int64_t stop = std::min(end, position + tokens), last = std::min(end, known);
        Rows now, next;
        locate(q.table, head, begin, last, next);
        for (int64_t at = begin; at < stop; at += BLOCK) {
            now = next;
            locate(q.table, head, at + BLOCK, last, next);
            widen_block(now);
            all_strips(rows, position, at, next, p, std::make_integer_sequence<int, ROWS_MAX>{});
        }
    }

    void merge(Partial& into, const Partial& p, int64_t rows) {
        for (int64_t row = 0; row < rows; row++) {
            if (p.maximum[row] == NOTHING) continue;
            float maximum = std::max(into.maximum[row], p.maximum[row]);
            float old_scale = exponential(into.maximum[row] - maximum);
            float new_scale = exponential(p.maximum[row] - maximum);
            float* to = into.out.data() + row * width;
            const float* from = p.out.data() + row * width;
            for (int64_t d = 0; d < width; d += LANES)
                store(to + d,
                      mul_add(load(from + d), splat(new_scale), load(to + d) * splat(old_scale)));
            float* total = into.total.data() + row * LANES;
            store(total, mul_add(load(p.total.data() + row * LANES), splat(new_scale),
                                 load(total) * splat(old_scale)));
            into.maximum[row] = maximum;
        }
    }

    template <class Output>
    void finish(const Query& q, int64_t head, int64_t first, int64_t tokens, const Partial& p) {
        const int64_t dim = pool.head_dim;
        for (int64_t row = 0; row < tokens * group; row++) {
            float inverse = 1.f / sum(load(p.total.data() + row * LANES));
            const float* from = p.out.data() + row * width;
            Output* to =
                (Output*)q.out + ((first + row / group) * heads + head * group + row % group) * dim;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * splat(inverse));
            for (; d < dim; d++) put(to + d, from[d] * inverse);
        }
    }
};

struct Task {
    int64_t query, head, first, tokens, span;  // span -1: all spans, and the merge.
};

// Attention of all queries. `Output` is float, or bf16 where the next product takes bf16 rows.
template <class T, class Output>
void attend(const Pool& pool, const std::vector<Query>& queries, int64_t heads, int threads) {
    const int64_t group = heads / pool.kv_heads;
    std::vector<Task> tasks, whole;
    int64_t spans = 0;
    for (int64_t q = 0; q < (int64_t)queries.size(); q++) {
        int64_t tile = std::max<int64_t>(1, TILE_ROWS / group), count = queries[q].count;
        int64_t tiles = (count + tile - 1) / tile, tokens = (count + tiles - 1) / tiles;
        for (int64_t first = 0; first < count; first += tokens)
            for (int64_t head = 0; head < pool.kv_heads; head++)
                whole.push_back({q, head, first, std::min(tokens, count - first), -1});
        spans += (queries[q].position + count + SPAN - 1) / SPAN * pool.kv_heads * tiles;
    }
    // Too few tasks for the threads: spread the spans of each.
    const bool spread =
        threads > 1 && (int64_t)whole.size() < 4 * threads && spans > (int64_t)whole.size();
    if (spread) {
        for (const Task& task : whole)
            for (int64_t s = 0; s * SPAN < queries[task.query].position + task.first + task.tokens;
                 s++)
                tasks.push_back({task.query, task.head, task.first, task.tokens, s});
    } else {
        tasks = whole;
    }
    std::vector<Partial> partials(spread ? tasks.size() : 0);
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks.size() > 1)
    {
        Attention<T> work{pool, heads};
        Partial all, part;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (int64_t)tasks.size(); i++) {
            // The longest first: what is last then is short.
            const Task& task = tasks[spread ? i : tasks.size() - 1 - i];
            const Query& q = queries[task.query];
            int64_t position = q.position + task.first;
            work.take_queries(q, task.head, task.first, task.tokens);
            if (spread) {
                work.span(q, task.head, position, task.tokens, task.span * SPAN,
                          (task.span + 1) * SPAN, partials[i]);
                continue;
            }
            work.span(q, task.head, position, task.tokens, 0, SPAN, all);
            for (int64_t begin = SPAN; begin < position + task.tokens; begin += SPAN) {
                work.span(q, task.head, position, task.tokens, begin, begin + SPAN, part);
                work.merge(all, part, task.tokens * group);
            }
            work.template finish<Output>(q, task.head, task.first, task.tokens, all);
        }
        if (spread) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < (int64_t)tasks.size(); i++) {
                const Task& task = tasks[i];
                if (task.span != 0) continue;
                for (int64_t j = i + 1; j < (int64_t)tasks.size() && tasks[j].span > 0; j++)
                    work.merge(partials[i], partials[j], task.tokens * group);
                work.template finish<Output>(queries[task.query], task.head, task.first,
                                             task.tokens, partials[i]);
            }
        }
    }
}

}  // namespace kv
