// What kernels and the scheduler have in common: one fiber stands for one CUDA thread.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shim {
enum Op { SYNC_BLOCK, SYNC_WARP, SHFL, VOTE, GATHER };
struct Idx {
    unsigned x, y, z;
};
struct Cp {
    void* d;
    const void* s;
    int n, group;
};
struct Cur {
    Idx tid, bid, bdim, gdim;
    int lane, warp, linear;
    Cp cp[64];
    int ncp, group;
};
typedef void (*Invoke)(void** args);
}  // namespace shim
extern "C" {
extern shim::Cur* shim_cur;  // the running CUDA thread
unsigned char* shim_dyn_smem();
void shim_block_sync(int line);
// warp collective: deposit n bytes; SHFL: out = in[src]; VOTE: out = ballot(u32); GATHER: out = 32
// * n bytes
void shim_warp_op(int line, int op, unsigned mask, const void* in, int n, int src, void* out);
int shim_block_reduce(int line, int pred, int kind);  // __syncthreads_count / _or / _and
void shim_yield();                                    // a possible pre-emption point (atomics)
void shim_fail(const char* fmt, ...);
int shim_launch(const char* name, shim::Invoke fn, void** args, const unsigned* dims, size_t smem,
                uint64_t seed);
const char* shim_last_error();
void shim_poison(const void* p, size_t n);
void shim_unpoison(const void* p, size_t n);  // no-op without ASan
}
