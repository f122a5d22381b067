// Everything that is PTX, or that differs between a GPU and the CPU on which tests run the same source.
//
// A kernel includes this file and nothing else. NVRTC finds no header of the C library, so the few
// names needed from one are here. Each helper with PTX has a branch for the CPU beside it: that pair
// is what the tests on a GPU compare first.
#pragma once
#ifndef KV_CPU_SHIM
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#else
#define KV_SHARED(name) KV_DYN_SMEM(name)
#endif

// sm_80 is the oldest that runs these kernels. Older ones, which nvcc assumes when it is told
// nothing, compile them and stop at the first instruction that they lack.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define KV_TOO_OLD 1
#endif

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

#define KV_WARP 32
#define KV_ALL_LANES 0xffffffffu
#define KV_INF __int_as_float(0x7f800000)

// ---- memory ------------------------------------------------------------------------------------

// Sixteen bytes that nobody reads again soon: they do not push other data out of the first cache.
__device__ __forceinline__ uint4 load_stream(const uint4* from) {
#ifdef __CUDA_ARCH__
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
#else
    return *from;
#endif
}

// Start to copy sixteen bytes from global to shared memory; zeros where `inside` is false.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
#if defined(KV_TOO_OLD)
    __trap();
#elif defined(__CUDA_ARCH__)
    const u32 to = (u32)__cvta_generic_to_shared(shared);
    const int size = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(global), "r"(size)
                 : "memory");
#else
    static const uint4 zeros = {0, 0, 0, 0};
    shim_cp_async(shared, inside ? global : &zeros, 16);
#endif
}

// Close a group of copies that were started since the last one.
__device__ __forceinline__ void commit_copies() {
#if defined(KV_TOO_OLD)
    __trap();
#elif defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    shim_cp_commit();
#endif
}

// Wait until at most KEEP of this thread's groups are still under way.
template <int KEEP>
__device__ __forceinline__ void wait_copies() {
#if defined(KV_TOO_OLD)
    __trap();
#elif defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
#else
    shim_cp_wait(KEEP);
#endif
}

// ---- numbers -----------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
    return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
    return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

__device__ __forceinline__ u32 bits16(__half v) { return __half_as_ushort(v); }
__device__ __forceinline__ u32 bits16(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }

// Two 16-bit numbers in one register, the first in the low half.
template <class T>
__device__ __forceinline__ u32 pack(T low, T high) {
    return bits16(low) | bits16(high) << 16;
}

// ---- the tensor core ---------------------------------------------------------------------------

#ifdef KV_CPU_SHIM
__device__ inline float half_of(u32 word, int high, __half) {
    return __half2float(__ushort_as_half((unsigned short)(high ? word >> 16 : word)));
}
__device__ inline float half_of(u32 word, int high, __nv_bfloat16) {
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}
#endif

// d (16 x 8, fp32) += a (16 x 16) * b (16 x 8) of 16-bit numbers T; all lanes of a warp together.
// With g = lane / 4 and t = lane % 4 a lane holds, as (row, column) pairs of neighbouring elements,
//   a[0] (g, 2t)      a[1] (g + 8, 2t)   a[2] (g, 2t + 8)   a[3] (g + 8, 2t + 8)
//   b[0] (2t.., g)    b[1] (2t + 8.., g)
//   d[0..1] (g, 2t)   d[2..3] (g + 8, 2t)
template <class T>
__device__ __forceinline__ void multiply_add(float* d, const u32* a, const u32* b);

#if defined(KV_TOO_OLD)
template <class T>
__device__ __forceinline__ void multiply_add(float*, const u32*, const u32*) {
    __trap();
}
#elif !defined(KV_CPU_SHIM)
#define KV_MULTIPLY_ADD(T, NAME)                                                                  \
    template <>                                                                                   \
    __device__ __forceinline__ void multiply_add<T>(float* d, const u32* a, const u32* b) {       \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "               \
                     "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));         \
    }
KV_MULTIPLY_ADD(__half, "f16")
KV_MULTIPLY_ADD(__nv_bfloat16, "bf16")
#undef KV_MULTIPLY_ADD
#else
template <class T>
__device__ __forceinline__ void multiply_add(float* d, const u32* a, const u32* b) {
    struct Fragments {
        u32 a[4], b[2];
    } mine, all[KV_WARP];
    for (int i = 0; i < 4; i++) mine.a[i] = a[i];
    for (int i = 0; i < 2; i++) mine.b[i] = b[i];
    shim_warp_op(__LINE__, shim::GATHER, KV_ALL_LANES, &mine, sizeof mine, 0, all);
    const int g = shim_cur->lane >> 2, t = shim_cur->lane & 3;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i >> 1) * 8, column = t * 2 + (i & 1);
        for (int k = 0; k < 16; k++) {
            const int place = (k & 7) / 2, part = k >> 3;
            const u32 left = all[(row & 7) * 4 + place].a[(row >> 3) + part * 2];
            const u32 right = all[column * 4 + place].b[part];
            d[i] += half_of(left, k & 1, T()) * half_of(right, k & 1, T());
        }
    }
}
#endif
