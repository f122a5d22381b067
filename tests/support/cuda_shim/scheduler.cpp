// Runs the threads of a kernel as fibers, block after block, in an order drawn from a seed.
//
// Never compiled with a sanitizer; it tells ASan and TSan of each switch itself. seed 0 is first
// in, first out; any other draws the next runnable thread, and the order of blocks. Found here:
// barriers that not all threads reach, or reach at different lines; warp operations with different
// masks; shuffles from lanes that do not take part; threads that wait for ever.
#include "shim.hpp"

#include <sys/mman.h>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <vector>
#include <ucontext.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
extern "C" {  // sanitizer hooks; null unless the runtime is loaded
#define WEAK __attribute__((weak))
WEAK void* __tsan_create_fiber(unsigned);
WEAK void __tsan_destroy_fiber(void*);
WEAK void __tsan_switch_to_fiber(void*, unsigned);
WEAK void* __tsan_get_current_fiber();
WEAK void __tsan_acquire(void*);
WEAK void __tsan_release(void*);
WEAK void __sanitizer_start_switch_fiber(void**, const void*, size_t);
WEAK void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
WEAK void __asan_poison_memory_region(const volatile void*, size_t);
WEAK void __asan_unpoison_memory_region(const volatile void*, size_t);
shim::Cur* shim_cur;
char *shim_sh0, *shim_sh1;
}
#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
extern "C" void shim_switch(void** save, void* to);
asm(".text\n.globl shim_switch\n.hidden shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\nmov "
    "%rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size "
    "shim_switch,.-shim_switch\n");
#endif
namespace shim {
enum St { READY, W_BLOCK, W_WARP, DONE };
struct Fiber {
    Cur c;
    void* sp;
    ucontext_t* uc;
    St st;
    int line, op, n, src, pred;
    unsigned mask;
    const void* in;
    void* out;
    void* tsan;
    bool fresh;
};
static struct {
    std::vector<Fiber> f;
    int rq[1024];
    unsigned rh, rn;
    char* stacks;
    size_t nstk;
    int nthreads, cur, live, at_barrier, red, epoch;
    std::vector<int> wepoch;
    unsigned warr[32], wdone[32];
    void* main_sp;
    ucontext_t main_uc;
    const void* main_bot;
    size_t main_sz;
    void* main_tsan;
    Invoke fn;
    void** args;
    unsigned char* smem;
    uint64_t rng, seed;
    bool failed;
    char err[512];
    char btag[2], wtag[64], ltag, ltag2, bltag;
    bool xblock;
    const char* name;
} g;
static const size_t STK = 256 << 10, GUARD = 4096;
static void push(int i) {
    g.rq[(g.rh + g.rn++) & 1023] = i;
}  // a thread is queued at most once
static uint64_t rnd() {
    g.rng ^= g.rng << 13;
    g.rng ^= g.rng >> 7;
    g.rng ^= g.rng << 17;
    return g.rng;
}
static void cpy(void* d, const void* s, int n) {
    if (n == 4) {
        *(volatile uint32_t*)d = *(const volatile uint32_t*)s;
        return;
    }
    for (volatile unsigned char *a = (unsigned char*)d, *b = (unsigned char*)s; n--;) *a++ = *b++;
}
static char* stk(int i) {
    return g.stacks + i * (STK + GUARD) + GUARD;
}
static void go(Fiber* from, int to) {  // to < 0: the scheduler
    void* fake = nullptr;
    bool dying = from && from->st == DONE;
    if (__sanitizer_start_switch_fiber) {
        if (to >= 0)
            __sanitizer_start_switch_fiber(&fake, stk(to), STK);
        else
            __sanitizer_start_switch_fiber(dying ? nullptr : &fake, g.main_bot, g.main_sz);
    }
    if (__tsan_switch_to_fiber)
        __tsan_switch_to_fiber(to >= 0 ? g.f[to].tsan : g.main_tsan,
                               1);  // 1: a switch is no happens-before
    g.cur = to;
    shim_cur = to >= 0 ? &g.f[to].c : nullptr;
#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
    shim_switch(from ? &from->sp : &g.main_sp, to >= 0 ? g.f[to].sp : g.main_sp);
#else
    swapcontext(from ? from->uc : &g.main_uc, to >= 0 ? g.f[to].uc : &g.main_uc);
#endif
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(fake, from ? &g.main_bot : nullptr,
                                        from ? &g.main_sz : nullptr);
}
static void suspend() {
    go(&g.f[g.cur], -1);
}
static void fiber_main() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(nullptr, &g.main_bot, &g.main_sz);
    Fiber* me0 = &g.f[g.cur];
    if (__tsan_acquire) __tsan_acquire(me0->fresh ? &g.ltag : &g.bltag);
    me0->fresh = false;
    g.fn(g.args);
    Fiber& me = g.f[g.cur];
    if (__tsan_release) {
        __tsan_release(&g.ltag2);
        if (!g.xblock) __tsan_release(&g.bltag);
    }
    me.st = DONE;
    g.wdone[me.c.warp] |= 1u << me.c.lane;
    g.live--;
    suspend();
    abort();
}
static void release_block() {
    for (int i = 0; i < g.nthreads; i++)
        if (g.f[i].st == W_BLOCK) {
            g.f[i].st = READY;
            push(i);
        }
    g.at_barrier = 0;
}
}  // namespace shim
using namespace shim;
extern "C" {
const char* shim_last_error() {
    return g.err;
}
unsigned char* shim_dyn_smem() {
    return g.smem;
}
void shim_poison(const void* p, size_t n) {
    if (__asan_poison_memory_region) __asan_poison_memory_region(p, n);
}
void shim_unpoison(const void* p, size_t n) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, n);
}
void shim_fail(const char* fmt, ...) {
    if (!g.failed) {
        int k = snprintf(g.err, sizeof g.err, "%s: ", g.name);
        va_list a;
        va_start(a, fmt);
        vsnprintf(g.err + k, sizeof g.err - k, fmt, a);
        va_end(a);
    }
    g.failed = true;
    if (g.cur >= 0)
        for (;;) suspend();  // never resumed: the launch is abandoned
}
void shim_yield() {
    if (g.seed > 1 && g.cur >= 0 && (rnd() & 3) == 0) {
        push(g.cur);
        suspend();
    }
}
int shim_block_reduce(int line, int pred, int kind) {
    Fiber& me = g.f[g.cur];
    me.st = W_BLOCK;
    me.line = line;
    me.pred = pred;
    int ep = g.epoch;
    if (__tsan_release) __tsan_release(&g.btag[ep & 1]);
    if (++g.at_barrier == g.live) {
        int cnt = 0;
        for (int i = 0; i < g.nthreads; i++) {
            Fiber& o = g.f[i];
            if (o.st == DONE)
                shim_fail("thread %d exited, others wait at __syncthreads line %d", i, line);
            if (o.line != line)
                shim_fail("divergent __syncthreads: thread %d at line %d, thread %d at line %d", i,
                          o.line, me.c.linear, line);
            cnt += o.pred;
        }
        g.red = cnt;
        g.epoch++;
        release_block();
    }
    suspend();
    if (__tsan_acquire) __tsan_acquire(&g.btag[ep & 1]);
    return kind == 0 ? g.red : kind == 1 ? g.red > 0 : g.red == g.nthreads;
}
void shim_block_sync(int line) {
    shim_block_reduce(line, 0, 0);
}
void shim_warp_op(int line, int op, unsigned mask, const void* in, int n, int src, void* out) {
    Fiber& me = g.f[g.cur];
    int w0 = me.c.warp * 32, wn = g.nthreads - w0 < 32 ? g.nthreads - w0 : 32;
    if (!(mask >> me.c.lane & 1))
        shim_fail("line %d: lane %d calls a _sync op and is not in its mask %08x", line, me.c.lane,
                  mask);
    me.st = W_WARP;
    me.line = line;
    me.op = op;
    me.mask = mask;
    me.in = in;
    me.n = n;
    me.src = src;
    me.out = out;
    int& wep = g.wepoch[me.c.warp];
    char* tag = &g.wtag[me.c.warp * 2 + (wep & 1)];
    if (op == SYNC_WARP && __tsan_release) __tsan_release(tag);
    unsigned bal = 0, need = wn < 32 ? mask & ((1u << wn) - 1) : mask,
             gone = need & g.wdone[me.c.warp], &arr = g.warr[me.c.warp];
    if (gone) shim_fail("line %d: mask %08x names lanes %08x, which have exited", line, mask, gone);
    arr |= 1u << me.c.lane;
    bool all = (arr & need) == need;
    for (int l = 0; l < wn && all; l++)
        if (mask >> l & 1) {
            Fiber& o = g.f[w0 + l];
            if (o.mask != mask || o.op != op || o.line != line)
                shim_fail("warp op mismatch: lane %d line %d mask %08x, lane %d line %d mask %08x",
                          me.c.lane, line, mask, l, o.line, o.mask);
            else if (op == VOTE) {
                int v;
                cpy(&v, o.in, 4);
                if (v) bal |= 1u << l;
            }
        }
    if (all) {
        wep++;
        arr &= ~need;
        for (int l = 0; l < wn; l++)
            if (mask >> l & 1) {
                Fiber& o = g.f[w0 + l];
                if (op == SHFL) {
                    if (o.src < 0 || o.src >= wn || !(mask >> o.src & 1))
                        shim_fail("line %d: lane %d shuffles from lane %d, not in mask %08x", line,
                                  l, o.src, mask);
                    cpy(o.out, g.f[w0 + o.src].in, n);
                } else if (op == VOTE)
                    cpy(o.out, &bal, 4);
                else if (op == GATHER)
                    for (int s = 0; s < wn; s++)
                        if (mask >> s & 1) cpy((char*)o.out + s * n, g.f[w0 + s].in, n);
                o.st = READY;
                push(w0 + l);
            }
    }
    suspend();
    if (op == SYNC_WARP && __tsan_acquire) __tsan_acquire(tag);
}
int shim_launch(const char* name, Invoke fn, void** args, const unsigned* d, size_t smem,
                uint64_t seed) {
#if defined(__x86_64__)
    struct Ftz {
        unsigned m = _mm_getcsr();
        Ftz() { _mm_setcsr(m | 0x8040); }
        ~Ftz() { _mm_setcsr(m); }
    } ftz;  // CuPy always compiles with -ftz=true
#endif
    g.name = name;
    g.failed = false;
    g.err[0] = 0;
    g.fn = fn;
    g.args = args;
    g.seed = seed;
    g.rng = seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
    g.cur = -1;
    int nt = g.nthreads = d[3] * d[4] * d[5];
    uint64_t nb = (uint64_t)d[0] * d[1] * d[2];
    if (nt < 1 || nt > 1024 || d[5] > 64 || d[1] > 65535 || d[2] > 65535 || nb == 0 ||
        smem > 227 * 1024) {
        shim_fail("invalid launch: %d threads, %lu blocks, %zu B shared", nt, (unsigned long)nb,
                  smem);
        return 1;
    }
    if ((size_t)nt > g.nstk) {
        g.nstk = nt > 256 ? 1024 : 256;
        g.stacks = (char*)mmap(0, g.nstk * (STK + GUARD), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (size_t i = 0; i < g.nstk; i++) mprotect(stk(i) - GUARD, GUARD, PROT_NONE);
    }
    g.f.assign(nt, Fiber());
    g.wepoch.assign((nt + 31) / 32, 0);
    if (__tsan_get_current_fiber) {
        g.main_tsan = __tsan_get_current_fiber();
        __tsan_release(&g.ltag);
    }
    std::vector<uint64_t> order(nb);
    for (uint64_t b = 0; b < nb; b++) order[b] = b;
    if (seed)
        for (uint64_t b = nb; b > 1; b--)
            std::swap(order[b - 1], order[rnd() % b]);  // blocks in any order
    size_t cap = (smem + 15) / 16 * 16 + (smem == 0) * 16;
    g.smem = (unsigned char*)aligned_alloc(16, cap);
    g.xblock = getenv("SHIM_TSAN_XBLOCK");
    std::vector<void*> th(nt);
    for (int i = 0; i < nt; i++) {
        g.f[i].fresh = true;
        if (__tsan_create_fiber) th[i] = __tsan_create_fiber(0);
    }
    for (uint64_t bi = 0; bi < nb && !g.failed; bi++) {
        uint64_t b = order[bi];
        for (volatile char* p = shim_sh0; p && p < shim_sh1; p++) *p = (char)0xFF;
        shim_unpoison(g.smem, cap);
        for (size_t i = 0; i < smem; i++) ((volatile unsigned char*)g.smem)[i] = 0xFF;
        shim_poison(g.smem + smem, cap - smem);
        g.live = nt;
        g.at_barrier = 0;
        g.rh = g.rn = 0;
        memset(g.warr, 0, sizeof g.warr);
        memset(g.wdone, 0, sizeof g.wdone);
        for (int i = 0; i < nt; i++) {
            Fiber& f = g.f[i];
            ucontext_t* uc = f.uc;
            bool fr = f.fresh;
            f = Fiber();
            f.fresh = fr;
            f.tsan = th[(i + (g.xblock ? bi : 0)) %
                        nt];  // rotated: thread i of two blocks is not one TSan thread
            f.c = Cur{{i % d[3], i / d[3] % d[4], i / (d[3] * d[4])},
                      {unsigned(b % d[0]), unsigned(b / d[0] % d[1]),
                       unsigned(b / ((uint64_t)d[0] * d[1]))},
                      {d[3], d[4], d[5]},
                      {d[0], d[1], d[2]},
                      i & 31,
                      i >> 5,
                      i};
            shim_unpoison(stk(i), STK);
#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
            void** sp =
                (void**)(stk(i) + STK - 16 - (i % 61) * 64);  // staggered: no cache-set pile-up
            *--sp = nullptr;
            *--sp = (void*)fiber_main;
            sp -= 6;
            for (int k = 0; k < 6; k++) sp[k] = nullptr;
            f.sp = sp;
            (void)uc;
#else
            f.uc = uc ? uc : new ucontext_t;
            getcontext(f.uc);
            f.uc->uc_stack.ss_sp = stk(i);
            f.uc->uc_stack.ss_size = STK;
            f.uc->uc_link = nullptr;
            makecontext(f.uc, fiber_main, 0);
#endif
            push(i);
        }
        while (g.live && !g.failed) {
            if (g.rn == 0) {
                int w = -1;
                for (int i = 0; i < nt && w < 0; i++)
                    if (g.f[i].st != DONE) w = i;
                bool gone = g.live < nt;
                shim_fail(
                    "deadlock in block %lu: %d of %d threads live%s; thread %d waits at line %d "
                    "(%s)",
                    (unsigned long)b, g.live, nt, gone ? ", others exited" : "", w, g.f[w].line,
                    g.f[w].st == W_BLOCK ? "__syncthreads" : "warp op");
                break;
            }
            if (seed)
                std::swap(g.rq[(g.rh + rnd() % g.rn) & 1023],
                          g.rq[g.rh & 1023]);  // seed 0: first in, first out
            int i = g.rq[g.rh++ & 1023];
            g.rn--;
            go(nullptr, i);
            if (g.live && g.at_barrier == g.live && g.at_barrier) {
                shim_fail("threads exited while %d wait at __syncthreads", g.at_barrier);
            }
        }
    }
    if (__tsan_acquire) __tsan_acquire(&g.ltag2);
    if (__tsan_destroy_fiber)
        for (void* t : th) __tsan_destroy_fiber(t);
    shim_unpoison(g.smem, cap);
    free(g.smem);
    shim_cur = nullptr;
    return g.failed;
}
}
