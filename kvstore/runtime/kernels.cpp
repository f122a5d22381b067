// The runtime's kernels behind a C interface: plain pointers, sizes as int64, all arrays dense
// unless a stride is given. Nothing here checks a bound; the Python side has checked the batch as a
// whole.
#include <utility>
#include <vector>

#include "linear.hpp"
#include "paged_attention.hpp"

namespace kv {

template <class Output>
void rms_norm(const float* x, const float* weight, Output* out, int64_t rows, int64_t width,
              float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * width;
        Output* to = out + row * width;
        Floats squares = {};
        float rest = 0.f;
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES)
            squares = mul_add(load(from + j), load(from + j), squares);
        for (; j < width; j++) rest = std::fma(from[j], from[j], rest);
        float scale = 1.f / std::sqrt((sum(squares) + rest) / (float)width + epsilon);
        for (j = 0; j + LANES <= width; j += LANES)
            store(to + j, load(from + j) * splat(scale) * load(weight + j));
        for (; j < width; j++) put(to + j, from[j] * scale * weight[j]);
    }
}

// Where a token's keys and values go, and by which angles it is rotated.
struct Places {
    const int64_t* positions;
    const int64_t* pages;
    const int64_t* offsets;
    const float* cosines;  // [positions, head_dim / 2]
    const float* sines;
};

template <class Output>
inline void rotate_head(const float* from, const float* cosines, const float* sines, float scale,
                        int64_t half, Output* to) {
    int64_t j = 0;
    for (; j + LANES <= half; j += LANES) {
        Floats a = load(from + j), b = load(from + half + j), c = load(cosines + j),
               s = load(sines + j);
        store(to + j, (a * c - b * s) * splat(scale));
        store(to + half + j, (b * c + a * s) * splat(scale));
    }
    for (; j < half; j++) {
        float a = from[j], b = from[half + j], c = cosines[j], s = sines[j];
        put(to + j, (a * c - b * s) * scale);
        put(to + half + j, (b * c + a * s) * scale);
    }
}

// mixed [tokens, heads + 2 kv_heads, head_dim] -> queries [tokens, heads, head_dim], rotated and
// scaled; rotated keys and plain values into their pages.
template <class T>
void rotate_and_write(const float* mixed, const Places& places, int64_t tokens, int64_t heads,
                      const Pool& pool, float* queries, int threads) {
    const int64_t dim = pool.head_dim, kv_heads = pool.kv_heads;
    const float scale = 1.f / std::sqrt((float)dim);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 8)
    for (int64_t t = 0; t < tokens; t++) {
        const float* from = mixed + t * (heads + 2 * kv_heads) * dim;
        const float* cosines = places.cosines + places.positions[t] * (dim / 2);
        const float* sines = places.sines + places.positions[t] * (dim / 2);
        int64_t at = places.pages[t] * pool.page_stride + places.offsets[t] * kv_heads * dim;
        T *key = (T*)pool.keys + at, *value = (T*)pool.values + at;
        for (int64_t h = 0; h < heads; h++)
            rotate_head(from + h * dim, cosines, sines, scale, dim / 2,
                        queries + (t * heads + h) * dim);
        for (int64_t h = 0; h < kv_heads; h++)
            rotate_head(from + (heads + h) * dim, cosines, sines, 1.f, dim / 2, key + h * dim);
        from += (heads + kv_heads) * dim;
        int64_t j = 0;
        for (; j + LANES <= kv_heads * dim; j += LANES) store(value + j, load(from + j));
        for (; j < kv_heads * dim; j++) put(value + j, from[j]);
    }
}

template <class W, class Output>
void multiply(const typename W::Input* a, int64_t rows, int64_t inputs, const void* weights,
              int64_t columns, Ending ending, Output* c, int threads) {
    Product<Output> p{
        a,       inputs, (const char*)weights, (inputs + W::inputs - 1) / W::inputs, c, columns,
        columns, ending};
    int64_t width = ending == Ending::silu_times ? LANES : PANEL;
    product<W, Output>(p, rows, (columns + width - 1) / width, threads);
}

}  // namespace kv

using namespace kv;

extern "C" {

struct KvModel {
    int64_t hidden, intermediate, heads, kv_heads, head_dim, bf16;
    double epsilon;
    const float *cosines, *sines;
};
struct KvLayer {
    const float* input_norm;
    const float* post_norm;
    const void *qkv, *output, *gate_up, *down;
};
struct KvStep {
    int64_t tokens, sequences, wanted, table_stride, page_tokens, threads;
    const int64_t *positions, *pages, *offsets, *firsts, *starts, *lengths, *tables;
    const int64_t *wanted_rows, *wanted_of;
    float *x, *mixed, *queries;
    void *normed, *attended, *gated;  // Rows as the next product takes them.
};

}  // extern "C"

namespace kv {

template <class Output>
static std::vector<Query> queries_of(const KvStep& s, const float* rows, Output* out,
                                     int64_t row_width, bool wanted_only) {
    std::vector<Query> queries;
    for (int64_t i = 0; i < (wanted_only ? s.wanted : s.sequences); i++) {
        int64_t of = wanted_only ? s.wanted_of[i] : i, at = wanted_only ? i : s.firsts[i];
        int64_t count = wanted_only ? 1 : s.lengths[of];
        queries.push_back({rows + at * row_width, out + at * row_width,
                           s.tables + of * s.table_stride, s.starts[of] + s.lengths[of] - count,
                           count});
    }
    return queries;
}

template <class W, class T>
void run_layer(const KvModel& m, const KvLayer& l, const KvStep& s, const Pool& pool, bool last) {
    using Row = typename W::Input;
    const int threads = (int)s.threads;
    const int64_t width = m.heads * m.head_dim, mixed_width = width + 2 * m.kv_heads * m.head_dim;
    const float epsilon = (float)m.epsilon;
    Row *normed = (Row*)s.normed, *attended = (Row*)s.attended, *gated = (Row*)s.gated;
    rms_norm(s.x, l.input_norm, normed, s.tokens, m.hidden, epsilon, threads);
    multiply<W>(normed, s.tokens, m.hidden, l.qkv, mixed_width, Ending::store, s.mixed, threads);
    Places places{s.positions, s.pages, s.offsets, m.cosines, m.sines};
    rotate_and_write<T>(s.mixed, places, s.tokens, m.heads, pool, s.queries, threads);
    int64_t rows = s.tokens;
    if (last) {  // Only the wanted rows go on; they move to the front, each from a later place.
        rows = s.wanted;
        for (int64_t i = 0; i < rows; i++) {
            std::memmove(s.x + i * m.hidden, s.x + s.wanted_rows[i] * m.hidden, m.hidden * 4);
            std::memmove(s.queries + i * width, s.queries + s.wanted_rows[i] * width, width * 4);
        }
        if (rows == 0) return;
    }
    attend<T, Row>(pool, queries_of(s, s.queries, attended, width, last), m.heads, threads);
    multiply<W>(attended, rows, width, l.output, m.hidden, Ending::add, s.x, threads);
    rms_norm(s.x, l.post_norm, normed, rows, m.hidden, epsilon, threads);
    multiply<W>(normed, rows, m.hidden, l.gate_up, m.intermediate, Ending::silu_times, gated,
                threads);
    multiply<W>(gated, rows, m.intermediate, l.down, m.hidden, Ending::add, s.x, threads);
}

}  // namespace kv

extern "C" {

// Bytes of an activation between two products: 4, or 2 where products take bfloat16 rows.
int64_t kv_row_bytes(int64_t is_bf16) { return is_bf16 ? sizeof(Bf16Kernel::Input) : 4; }

int64_t kv_packed_bytes(int64_t is_bf16, int64_t columns, int64_t inputs) {
    int64_t panels = (columns + PANEL - 1) / PANEL;
    if (!is_bf16) return panels * inputs * Float32Weights::step_bytes;
    return panels * ((inputs + Bf16Kernel::inputs - 1) / Bf16Kernel::inputs) *
           Bf16Kernel::step_bytes;
}

void kv_pack(int64_t is_bf16, const void* source, int64_t columns, int64_t inputs, int64_t paired,
             void* to, int64_t threads) {
    auto pack = is_bf16 ? pack_weights<Bf16Kernel> : pack_weights<Float32Weights>;
    pack(source, columns, inputs, paired != 0, (char*)to, (int)threads);
}

// ending: 0 store, 1 add to c, 2 silu(gate) * up of paired weights (then `columns` counts pairs).
void kv_linear(int64_t is_bf16, const void* a, int64_t rows, int64_t inputs, const void* weights,
               int64_t columns, int64_t ending, float* c, int64_t threads) {
    if (is_bf16)
        multiply<Bf16Kernel>((const Bf16Kernel::Input*)a, rows, inputs, weights, columns,
                             (Ending)ending, c, (int)threads);
    else
        multiply<Float32Weights>((const float*)a, rows, inputs, weights, columns, (Ending)ending, c,
                                 (int)threads);
}

// bf16_out: rows for a bfloat16 product.
void kv_rms_norm(const float* x, const float* weight, void* out, int64_t bf16_out, int64_t rows,
                 int64_t width, double epsilon, int64_t threads) {
    if (bf16_out)
        rms_norm(x, weight, (bf16*)out, rows, width, (float)epsilon, (int)threads);
    else
        rms_norm(x, weight, (float*)out, rows, width, (float)epsilon, (int)threads);
}

void kv_rotate_and_write(const KvModel* m, const KvStep* s, void* keys, void* values,
                         int64_t page_stride) {
    Pool pool{keys, values, page_stride, s->page_tokens, m->kv_heads, m->head_dim};
    Places places{s->positions, s->pages, s->offsets, m->cosines, m->sines};
    auto write = m->bf16 ? rotate_and_write<bf16> : rotate_and_write<float>;
    write(s->mixed, places, s->tokens, m->heads, pool, s->queries, (int)s->threads);
}

// s->queries -> s->attended, float32.
void kv_attend(const KvModel* m, const KvStep* s, const void* keys, const void* values,
               int64_t page_stride, int64_t wanted_only) {
    Pool pool{keys, values, page_stride, s->page_tokens, m->kv_heads, m->head_dim};
    auto queries =
        queries_of(*s, s->queries, (float*)s->attended, m->heads * m->head_dim, wanted_only);
    auto run = m->bf16 ? attend<bf16, float> : attend<float, float>;
    run(pool, queries, m->heads, (int)s->threads);
}

// One decoder layer, in place on s->x; after the last one s->x begins with the wanted rows.
void kv_layer(const KvModel* m, const KvLayer* l, const KvStep* s, void* keys, void* values,
              int64_t page_stride, int64_t last) {
    Pool pool{keys, values, page_stride, s->page_tokens, m->kv_heads, m->head_dim};
    if (m->bf16)
        run_layer<Bf16Kernel, bf16>(*m, *l, *s, pool, last != 0);
    else
        run_layer<Float32Weights, float>(*m, *l, *s, pool, last != 0);
}

}  // extern "C"
