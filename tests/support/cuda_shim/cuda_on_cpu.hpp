// Makes a .cu file C++ that runs on a CPU: put before everything else with g++ -include.
//
// Types and their conversions are NVIDIA's own headers, which compile under g++, so the rounding of
// fp16 and bf16 is theirs. Threads are fibers (scheduler.cpp). Shared memory is filled with 0xFF
// before each block, so that what was never written is NaN or -1. An asynchronous copy lands at its
// wait and not before, so a missing wait reads what was there. fp32 denormals are zero, as CuPy
// compiles.
#pragma once
#define KV_CPU_SHIM 1
#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#include "shim.hpp"
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static __attribute__((section("shim_shared")))
#define __constant__
#define __launch_bounds__(...)
#define __grid_constant__
#define KV_DYN_SMEM(name) unsigned char* name = shim_dyn_smem()

#define threadIdx (shim_cur->tid)
#define blockIdx (shim_cur->bid)
#define blockDim (shim_cur->bdim)
#define gridDim (shim_cur->gdim)
#define warpSize 32
#define __syncthreads() shim_block_sync(__LINE__)
#define __syncthreads_count(p) shim_block_reduce(__LINE__, !!(p), 0)
#define __syncthreads_or(p) shim_block_reduce(__LINE__, !!(p), 1)
#define __syncthreads_and(p) shim_block_reduce(__LINE__, !!(p), 2)
#define SHIM_NOSAN __attribute__((no_sanitize("thread")))
namespace shim {
template <class T>
SHIM_NOSAN inline T shfl(int line, unsigned mask, T v, int src) {
    static_assert(sizeof(T) <= 16, "shuffle of more than 16 bytes");
    alignas(16) unsigned char r[16];
    shim_warp_op(line, SHFL, mask, &v, sizeof(T), src, r);
    T t;
    __builtin_memcpy(&t, r, sizeof t);
    return t;
}
template <class T>
inline T shfl_idx(int l, unsigned m, T v, int s, int w = 32) {
    int b = shim_cur->lane & ~(w - 1);
    return shfl(l, m, v, b + (s & (w - 1)));
}
template <class T>
inline T shfl_xor(int l, unsigned m, T v, int x, int w = 32) {
    int me = shim_cur->lane, s = me ^ x;
    return shfl(l, m, v, (s & ~(w - 1)) > (me & ~(w - 1)) ? me : s);
}
template <class T>
inline T shfl_down(int l, unsigned m, T v, int d, int w = 32) {
    int me = shim_cur->lane;
    return shfl(l, m, v, (me & (w - 1)) + d < w ? me + d : me);
}
template <class T>
inline T shfl_up(int l, unsigned m, T v, int d, int w = 32) {
    int me = shim_cur->lane;
    return shfl(l, m, v, (me & (w - 1)) >= d ? me - d : me);
}
inline unsigned ballot(int l, unsigned m, int p) {
    unsigned r;
    shim_warp_op(l, VOTE, m, &p, 4, 0, &r);
    return r;
}
inline void syncwarp(int l, unsigned m = ~0u) {
    unsigned r;
    int z = 0;
    shim_warp_op(l, SYNC_WARP, m, &z, 4, 0, &r);
}
template <class T, class F>
inline T reduce(int l, unsigned m, T v, F f) {
    T all[32];
    shim_warp_op(l, GATHER, m, &v, sizeof v, 0, all);
    bool got = false;
    T r{};
    for (int i = 0; i < 32; i++)
        if (m >> i & 1) {
            r = got ? f(r, all[i]) : all[i];
            got = true;
        }
    return r;
}
}  // namespace shim
#define __shfl_sync(...) shim::shfl_idx(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) shim::shfl_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) shim::shfl_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) shim::shfl_up(__LINE__, __VA_ARGS__)
#define __syncwarp(...) shim::syncwarp(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __ballot_sync(m, p) shim::ballot(__LINE__, m, (p) ? 1 : 0)
#define __any_sync(m, p) (shim::ballot(__LINE__, m, (p) ? 1 : 0) != 0)
#define __all_sync(m, p) (shim::ballot(__LINE__, m, (p) ? 0 : 1) == 0)
#define __reduce_add_sync(m, v) shim::reduce(__LINE__, m, v, [](auto a, auto b) { return a + b; })
#define __reduce_max_sync(m, v) \
    shim::reduce(__LINE__, m, v, [](auto a, auto b) { return a > b ? a : b; })
#define __reduce_min_sync(m, v) \
    shim::reduce(__LINE__, m, v, [](auto a, auto b) { return a < b ? a : b; })

#define SHIM_D inline
template <class To, class Fr>
SHIM_D To shim_bits(Fr f) {
    static_assert(sizeof(To) == sizeof(Fr), "");
    To t;
    __builtin_memcpy(&t, &f, sizeof t);
    return t;
}
SHIM_D float __int_as_float(int v) {
    return shim_bits<float>(v);
}
SHIM_D float __uint_as_float(unsigned v) {
    return shim_bits<float>(v);
}
SHIM_D int __float_as_int(float v) {
    return shim_bits<int>(v);
}
SHIM_D unsigned __float_as_uint(float v) {
    return shim_bits<unsigned>(v);
}
SHIM_D int __popc(unsigned v) {
    return __builtin_popcount(v);
}
SHIM_D int __clz(int v) {
    return v ? __builtin_clz(v) : 32;
}
SHIM_D int __ffs(int v) {
    return __builtin_ffs(v);
}
SHIM_D float rsqrtf(float v) {
    return 1.0f / sqrtf(v);
}
SHIM_D float __expf(float v) {
    return expf(v);
}
SHIM_D float __logf(float v) {
    return logf(v);
}
SHIM_D float __fdividef(float a, float b) {
    return a / b;
}
SHIM_D float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
SHIM_D float __fmul_rn(float a, float b) {
    return a * b;
}
SHIM_D float __fadd_rn(float a, float b) {
    return a + b;
}
SHIM_D float __frcp_rn(float a) {
    return 1.0f / a;
}
SHIM_D int __float2int_rn(float v) {
    return v != v               ? 0
           : v >= 2147483648.f  ? 2147483647
           : v <= -2147483648.f ? (-2147483647 - 1)
                                : (int)nearbyintf(v);
}
SHIM_D unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t v = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned q = s >> (4 * i) & 15, by = (unsigned)(v >> 8 * (q & 7)) & 255;
        if (q & 8) by = by & 128 ? 255 : 0;
        r |= by << 8 * i;
    }
    return r;
}
template <class A, class B>
SHIM_D std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B>
SHIM_D std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)b : (C)a;
}
template <class T>
SHIM_D T __ldg(const T* p) {
    return *p;
}
template <class T>
SHIM_D T __ldcs(const T* p) {
    return *p;
}
template <class T>
SHIM_D T __ldcg(const T* p) {
    return *p;
}
template <class T>
SHIM_D void __stcs(T* p, T v) {
    *p = v;
}
template <class T>
SHIM_D void __stcg(T* p, T v) {
    *p = v;
}
template <class T, class F>
SHIM_D T shim_rmw(T* p, F f) {  // relaxed atomics, like CUDA's
    using U = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    static_assert(sizeof(T) == sizeof(U), "");
    shim_yield();
    U* q = (U*)p;
    U o = __atomic_load_n(q, __ATOMIC_RELAXED), n;
    do {
        n = shim_bits<U>(f(shim_bits<T>(o)));
    } while (!__atomic_compare_exchange_n(q, &o, n, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return shim_bits<T>(o);
}
template <class T>
SHIM_D T atomicAdd(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return (T)(o + v); });
}
template <class T>
SHIM_D T atomicMax(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return o > v ? o : v; });
}
template <class T>
SHIM_D T atomicMin(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return o < v ? o : v; });
}
template <class T>
SHIM_D T atomicOr(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return (T)(o | v); });
}
template <class T>
SHIM_D T atomicAnd(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return (T)(o & v); });
}
template <class T>
SHIM_D T atomicExch(T* p, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T) { return v; });
}
template <class T>
SHIM_D T atomicCAS(T* p, std::common_type_t<T> c, std::common_type_t<T> v) {
    return shim_rmw(p, [=](T o) { return o == c ? v : o; });
}
// cp.async: nothing lands before the wait, so a missing or too early wait reads poison / stale data
SHIM_D void shim_cp_async(void* d, const void* s, int n) {
    shim::Cur& c = *shim_cur;
    if (c.ncp == 64) shim_fail("more than 64 cp.async in flight");
    c.cp[c.ncp++] = {d, s, n, c.group};
}
SHIM_D void shim_cp_commit() {
    shim_cur->group++;
}
SHIM_D void shim_cp_wait(int keep) {  // keep: newest groups left in flight; -1: wait_all
    shim::Cur& c = *shim_cur;
    int k = 0;
    for (int i = 0; i < c.ncp; i++) {
        shim::Cp x = c.cp[i];
        if (x.group >= c.group - keep)
            c.cp[k++] = x;
        else if (x.n == 16)
            *(uint4*)x.d = *(const uint4*)x.s;
        else
            for (int b = 0; b < x.n; b++) ((char*)x.d)[b] = ((const char*)x.s)[b];
    }
    c.ncp = k;
}
SHIM_D void __threadfence() {}
SHIM_D void __threadfence_block() {}
SHIM_D void __nanosleep(unsigned) {
    shim_yield();
}
SHIM_D void __trap() {
    shim_fail("__trap() by block %u thread %d", shim_cur->bid.x, shim_cur->linear);
}

namespace shim {  // unpack void** exactly as cuLaunchKernel(kernelParams) does
template <auto F>
struct Thunk;
template <class... A, void (*F)(A...)>
struct Thunk<F> {
    template <size_t... I>
    static void go(void** a, std::index_sequence<I...>) {
        (void)a;
        F(*(std::remove_cv_t<A>*)a[I]...);
    }
    static void call(void** a) { go(a, std::index_sequence_for<A...>{}); }
    static int sizes(int* s) {
        int v[] = {(int)sizeof(A)..., 0};
        for (size_t i = 0; i < sizeof...(A); i++) s[i] = v[i];
        return sizeof...(A);
    }
};
}  // namespace shim
#define SHIM_EXPORT(NAME, ...)                                                                    \
    extern "C" int launch_##NAME(void** args, const unsigned* dims, size_t smem, uint64_t seed) { \
        return shim_launch(#NAME, &shim::Thunk<&__VA_ARGS__>::call, args, dims, smem, seed);      \
    }                                                                                             \
    extern "C" int argsizes_##NAME(int* s) {                                                      \
        return shim::Thunk<&__VA_ARGS__>::sizes(s);                                               \
    }
extern "C" char __start_shim_shared[] __attribute__((weak)),
    __stop_shim_shared[] __attribute__((weak));
extern "C" {
extern char *shim_sh0, *shim_sh1;
}
__attribute__((constructor)) static void shim_register() {
    shim_sh0 = __start_shim_shared;
    shim_sh1 = __stop_shim_shared;
}
