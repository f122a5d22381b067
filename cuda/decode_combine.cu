// The splits of a context become one result: the second half of decode_part.cuh's kernels.
#include "kv_device.cuh"

// grid: (rows), where a row is (sequence, new token, head); partial, sums, output as above.
template <class T>
__device__ __forceinline__ void combine(const float* partial, const float* sums, T* output,
                                        int splits, int head_dim) {
    const i64 row = blockIdx.x;
    float maximum = -KV_INF, sum = 0.f;
    for (int s = 0; s < splits; s++) maximum = fmaxf(maximum, sums[(row * splits + s) * 2]);
    const float base = maximum > -KV_INF ? maximum : 0.f;
    for (int s = 0; s < splits; s++) {
        sum += exp2f(sums[(row * splits + s) * 2] - base) * sums[(row * splits + s) * 2 + 1];
    }
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0.f;
        for (int s = 0; s < splits; s++) {
            const float weight = exp2f(sums[(row * splits + s) * 2] - base);
            // An empty split has written no values.
            if (weight > 0.f) value += weight * partial[(row * splits + s) * head_dim + d];
        }
        output[row * head_dim + d] = from_float<T>(sum > 0.f ? value / sum : 0.f);
    }
}

#define KV_COMBINE(NAME, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                             \
    NAME(const float* partial, const float* sums, T* output, int splits, int head_dim) {           \
        combine<T>(partial, sums, output, splits, head_dim);                                       \
    }
KV_COMBINE(combine_bf16, __nv_bfloat16)
KV_COMBINE(combine_fp16, __half)
KV_COMBINE(combine_fp32, float)
