// The helpers of kv_device.cuh that are PTX, each alone: what a GPU that is new to us runs first.
//
// One block of threads. Their cases are the same as on the CPU, where the other branch runs.
#include "kv_device.cuh"

// Sixteen bytes a thread through shared memory, in two groups: the first half of the threads' data
// with the first group. Zeros where `inside` is 0; `from` is not read there.
extern "C" __global__ void __launch_bounds__(256, 1)
probe_copy_async(const uint4* from, uint4* to, const int* inside) {
    __shared__ uint4 ring[2][256];
    const int i = threadIdx.x, n = blockDim.x;
    copy_async(&ring[0][i], from + i, inside[i] != 0);
    commit_copies();
    copy_async(&ring[1][i], from + n + i, inside[n + i] != 0);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    to[i] = ring[0][n - 1 - i];  // Another thread's: the barrier makes it visible.
    wait_copies<0>();
    __syncthreads();
    to[n + i] = ring[1][n - 1 - i];
}

extern "C" __global__ void __launch_bounds__(256, 1)
probe_load_stream(const uint4* from, uint4* to) {
    to[threadIdx.x] = load_stream(from + threadIdx.x);
}

// Fragments of one warp: a u32 [32][4], b u32 [32][2], d float [32][4], which is added to.
template <class T>
__device__ __forceinline__ void probe_multiply_add(const u32* a, const u32* b, float* d) {
    const int lane = threadIdx.x;
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = d[lane * 4 + i];
    multiply_add<T>(sums, a + lane * 4, b + lane * 2);
    for (int i = 0; i < 4; i++) d[lane * 4 + i] = sums[i];
}

extern "C" __global__ void __launch_bounds__(32, 1)
probe_mma_bf16(const u32* a, const u32* b, float* d) {
    probe_multiply_add<__nv_bfloat16>(a, b, d);
}

extern "C" __global__ void __launch_bounds__(32, 1)
probe_mma_fp16(const u32* a, const u32* b, float* d) {
    probe_multiply_add<__half>(a, b, d);
}
