// Matrix products: rows of activations times weights that were packed once, at load.
//
// Packed weights are panels of PANEL output columns, each laid out input by input, so that a
// product reads them as one stream. float32: PANEL floats an input. bfloat16: LANES words an input,
// each word holding column j in its low half and column j + LANES in its high half: a shift and a
// mask widen both. With AVX512-BF16: two vectors for each pair of inputs, as VDPBF16PS multiplies
// them.
#pragma once
#include <algorithm>

#include "vectors.hpp"

namespace kv {

#if defined(__AVX512BF16__) || defined(KV_EMULATE_BF16_DOT)
#define KV_BF16_DOT 1
#else
#define KV_BF16_DOT 0
#endif

enum class Ending { store, add, silu_times };

struct Float32Weights {
    using Input = float;
    static constexpr int64_t step_bytes = PANEL * 4;  // Packed bytes of one step over the inputs.
    static constexpr int inputs = 1;                  // Inputs a step takes.
    static void pack(const void* source, int64_t row, int64_t inputs, int64_t k, bool high,
                     char* to, int lane) {
        float x = row < 0 || k >= inputs ? 0.f : ((const float*)source)[row * inputs + k];
        std::memcpy(to + (high ? LANES * 4 : 0) + lane * 4, &x, 4);
    }
    static void widen_step(const char* b, Floats& low, Floats& high) {
        low = load((const float*)b);
        high = load((const float*)b + LANES);
    }
    static Floats multiply(const float* a, Floats b, Floats c) { return mul_add(splat(*a), b, c); }
};

struct Bf16Weights {
    using Input = float;
    static constexpr int64_t step_bytes = PANEL * 2;
    static constexpr int inputs = 1;
    static void pack(const void* source, int64_t row, int64_t inputs, int64_t k, bool high,
                     char* to, int lane) {
        bf16 x = row < 0 || k >= inputs ? 0 : ((const bf16*)source)[row * inputs + k];
        std::memcpy(to + lane * 4 + (high ? 2 : 0), &x, 2);
    }
    static void widen_step(const char* b, Floats& low, Floats& high) {
        Words both = load_as<Words>(b);
        low = (Floats)(both << 16);
        high = (Floats)(both & 0xffff0000u);
    }
    static Floats multiply(const float* a, Floats b, Floats c) { return mul_add(splat(*a), b, c); }
};

#if KV_BF16_DOT
struct Bf16DotWeights {
    using Input = bf16;
    static constexpr int64_t step_bytes = PANEL * 4;
    static constexpr int inputs = 2;
    static void pack(const void* source, int64_t row, int64_t inputs, int64_t k, bool high,
                     char* to, int lane) {
        for (int64_t i = 0; i < 2; i++) {
            bf16 x = row < 0 || k + i >= inputs ? 0 : ((const bf16*)source)[row * inputs + k + i];
            std::memcpy(to + (high ? LANES * 4 : 0) + lane * 4 + i * 2, &x, 2);
        }
    }
    static void widen_step(const char* b, Floats& low, Floats& high) {
        low = load_as<Floats>(b);
        high = load_as<Floats>(b + LANES * 4);
    }
    static Floats multiply(const bf16* a, Floats b, Floats c) {
        uint32_t pair;
        std::memcpy(&pair, a, 4);
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)pair),
                                        (__m512bh)b);
#else
        Words w = bits(b), p = Words{} + pair;
        c = mul_add((Floats)(p & 0xffff0000u), (Floats)(w & 0xffff0000u), c);
        return mul_add((Floats)(p << 16), (Floats)(w << 16), c);
#endif
    }
};
using Bf16Kernel = Bf16DotWeights;
#else
using Bf16Kernel = Bf16Weights;
#endif

// The core of everything: ROWS rows of `a` times one panel; every sum runs over the inputs in
// order.
template <int ROWS, class W>
inline __attribute__((always_inline)) void multiply_tile(const typename W::Input* a,
                                                         int64_t a_stride, const char* b,
                                                         int64_t steps, Floats (&c)[ROWS][2]) {
    for (int64_t k = 0; k < steps; k++) {
        Floats low, high;
        W::widen_step(b, low, high);
        b += W::step_bytes;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const typename W::Input* x = a + r * a_stride;
            c[r][0] = W::multiply(x, low, c[r][0]);
            c[r][1] = W::multiply(x, high, c[r][1]);
        }
        a += W::inputs;
    }
}

template <class Output>
struct Product {
    const void* a;     // Input rows.
    int64_t a_stride;  // In elements, as the others.
    const char* b;     // Packed weights.
    int64_t steps;     // Over the inputs.
    Output* c;
    int64_t c_stride;
    int64_t columns;  // Of c.
    Ending ending;
};

template <int ROWS, class W, class Output>
void product_tile(const Product<Output>& p, int64_t row, int64_t panel) {
    Floats sums[ROWS][2] = {};
    multiply_tile<ROWS, W>((const typename W::Input*)p.a + row * p.a_stride, p.a_stride,
                           p.b + panel * p.steps * W::step_bytes, p.steps, sums);
    int64_t width = p.ending == Ending::silu_times ? LANES : PANEL;
    int64_t column = panel * width, valid = std::min(width, p.columns - column);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        Output* c = p.c + (row + r) * p.c_stride + column;
        Floats low = sums[r][0], high = sums[r][1];
        if (p.ending == Ending::silu_times) {
            low = silu(low) * high;
        } else if (valid < width) {
            Output part[PANEL];
            store(part, low);
            store(part + LANES, high);
            for (int64_t j = 0; j < valid; j++) {
                float before = p.ending == Ending::add ? widen(c[j]) : 0.f;
                put(c + j, before + widen(part[j]));
            }
            continue;
        } else if (p.ending == Ending::add) {
            low += load(c);
            high += load(c + LANES);
        }
        if (valid >= LANES)
            store(c, low);
        else
            store_some(c, low, valid);
        if (width == PANEL) store(c + LANES, high);
    }
}

template <class W, class Output, int... I>
auto tile_of_rows(int64_t rows, std::integer_sequence<int, I...>) {
    using Tile = void (*)(const Product<Output>&, int64_t, int64_t);
    static constexpr Tile tiles[] = {product_tile<I + 1, W, Output>...};
    return tiles[rows - 1];
}

// Rows are cut into strips of equal height, columns into groups of panels that stay in the second
// cache while all strips of a task pass over them; a strip's rows stay in the first.
template <class W, class Output>
void product(const Product<Output>& p, int64_t rows, int64_t panels, int threads) {
    if (rows == 0) return;
    constexpr int64_t GROUP_BYTES = 384 << 10;
    constexpr int64_t STRIPS_OF_TASK = 24;
    int64_t strips = (rows + ROWS_MAX - 1) / ROWS_MAX;
    int64_t height = (rows + strips - 1) / strips;
    int64_t group = std::max<int64_t>(1, GROUP_BYTES / (p.steps * W::step_bytes));
    if (strips < STRIPS_OF_TASK)  // Few rows: enough tasks for all threads matter more.
        group = std::min(group, std::max<int64_t>(1, panels / (4 * threads)));
    int64_t groups = (panels + group - 1) / group;
    int64_t blocks = (strips + STRIPS_OF_TASK - 1) / STRIPS_OF_TASK;
    using Sequence = std::make_integer_sequence<int, ROWS_MAX>;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t task = 0; task < groups * blocks; task++) {
        int64_t first = task % groups * group, last = std::min(first + group, panels);
        int64_t from = task / groups * STRIPS_OF_TASK, to = std::min(from + STRIPS_OF_TASK, strips);
        for (int64_t strip = from; strip < to; strip++) {
            int64_t row = strip * height, count = std::min(height, rows - row);
            if (count <= 0) break;
            auto tile = tile_of_rows<W, Output>(count, Sequence{});
            for (int64_t panel = first; panel < last; panel++) tile(p, row, panel);
        }
    }
}

// Packs `columns` rows of `source` [columns, inputs]. With `paired`, source has gate rows and then
// up rows: a panel takes LANES of each, so that the product can end with silu(gate) * up.
template <class W>
void pack_weights(const void* source, int64_t columns, int64_t inputs, bool paired, char* to,
                  int threads) {
    int64_t half = columns / 2, width = paired ? LANES : PANEL;
    int64_t panels = ((paired ? half : columns) + width - 1) / width;
    int64_t steps = (inputs + W::inputs - 1) / W::inputs;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++) {
        for (int column = 0; column < PANEL; column++) {
            int lane = column % LANES;
            bool high = column >= LANES;
            int64_t row = paired ? panel * LANES + lane : panel * PANEL + column;
            if (row >= (paired ? half : columns)) row = -1;
            if (paired && high && row >= 0) row += half;
            for (int64_t k = 0; k < steps; k++)
                W::pack(source, row, inputs, k * W::inputs, high,
                        to + (panel * steps + k) * W::step_bytes, lane);
        }
    }
}

}  // namespace kv
