// Blocks between paged pools and contiguous payloads: gather saves, scatter loads.
//
// A block has runs (K of layer 0, V of layer 0, ...); in a pool a run lies in pages, a page's piece
// of it is `rows` rows, and in a payload all pieces follow one another. A payload may lie in device
// memory (a staging buffer) or in pinned host memory, which a GPU reads and writes directly.
//
//   runs        i64 [n_runs][6]: base, page_stride, rows, row_bytes, row_stride, payload_offset
//   first_unit  int [n_runs + 1]: units before each run; a unit is at most UNIT_BYTES of one row
//   pages       int [n_blocks][pages_per_block]: page ids
//   payloads    u64 [n_blocks]: where each payload starts
//   error       int: the place of a bad page id in `pages`, plus 1; such a page is left alone
//
// A warp takes one unit after the other, so a grid of any size does the whole work: the caller
// chooses how many blocks of threads it may take from the engine. skip_pages: pages of block 0 that
// are not copied, because the engine has them.
#include "kv_device.cuh"

#define UNIT_BYTES 4096
enum { BASE, PAGE_STRIDE, ROWS, ROW_BYTES, ROW_STRIDE, PAYLOAD_OFFSET, FIELDS };

// Copy n bytes by one warp. Both ends and n are multiples of sizeof(T).
template <class T>
__device__ __forceinline__ void copy_as(const unsigned char* from, unsigned char* to, int n) {
    const T* source = (const T*)from;
    T* target = (T*)to;
    for (int i = threadIdx.x % KV_WARP; i < n / (int)sizeof(T); i += KV_WARP) target[i] = source[i];
}

template <>
__device__ __forceinline__ void copy_as<uint4>(const unsigned char* from, unsigned char* to, int n) {
    const uint4* source = (const uint4*)from;
    uint4* target = (uint4*)to;
    const int count = n / 16;
    int i = threadIdx.x % KV_WARP;
    for (; i + 3 * KV_WARP < count; i += 4 * KV_WARP) {  // Four loads are under way at a time.
        const uint4 a = load_stream(source + i), b = load_stream(source + i + KV_WARP);
        const uint4 c = load_stream(source + i + 2 * KV_WARP);
        const uint4 d = load_stream(source + i + 3 * KV_WARP);
        __stcs(target + i, a);
        __stcs(target + i + KV_WARP, b);
        __stcs(target + i + 2 * KV_WARP, c);
        __stcs(target + i + 3 * KV_WARP, d);
    }
    for (; i < count; i += KV_WARP) __stcs(target + i, load_stream(source + i));
}

__device__ __forceinline__ void copy_bytes(const unsigned char* from, unsigned char* to, int n) {
    const u64 alignment = (u64)from | (u64)to | (u64)n;
    if (alignment % 16 == 0) {
        copy_as<uint4>(from, to, n);
    } else if (alignment % 4 == 0) {
        copy_as<u32>(from, to, n);
    } else {
        copy_as<unsigned char>(from, to, n);
    }
}

// The run that a unit belongs to: the last one whose first unit is not beyond it.
__device__ __forceinline__ int run_of(const int* first_unit, int low, int high, int unit) {
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_unit[middle] <= unit) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <bool GATHER>
__device__ __forceinline__ void copy_pages(const i64* runs, const int* first_unit, const int* pages,
                                           const u64* payloads, int* error, int n_blocks,
                                           int pages_per_block, int first_run, int last_run,
                                           int pool_pages, int skip_pages) {
    const int before = first_unit[first_run];
    const i64 units = first_unit[last_run] - before;
    const int warps = gridDim.x * blockDim.x / KV_WARP;
    i64 at = (blockIdx.x * blockDim.x + threadIdx.x) / KV_WARP;
    for (; at < n_blocks * units; at += warps) {
        const int block = (int)(at / units);
        const int unit = (int)(at - block * units) + before;
        const int run = run_of(first_unit, first_run, last_run, unit);
        const i64* shape = runs + (i64)run * FIELDS;
        const int row_bytes = (int)shape[ROW_BYTES], rows = (int)shape[ROWS];
        const int units_per_row = (row_bytes + UNIT_BYTES - 1) / UNIT_BYTES;
        const int within = unit - first_unit[run];
        const int piece = within / units_per_row, start = within % units_per_row * UNIT_BYTES;
        const int nth_page = piece / rows, row = piece % rows;
        if (block == 0 && nth_page < skip_pages) continue;
        const int place = block * pages_per_block + nth_page, page = pages[place];
        if (page < 0 || page >= pool_pages) {
            if (threadIdx.x % KV_WARP == 0) atomicExch(error, 1 + place);
            continue;
        }
        unsigned char* in_page = (unsigned char*)shape[BASE] + page * shape[PAGE_STRIDE] +
                                 row * shape[ROW_STRIDE] + start;
        unsigned char* in_payload = (unsigned char*)payloads[block] + shape[PAYLOAD_OFFSET] +
                                    (i64)piece * row_bytes + start;
        const int size = min(UNIT_BYTES, row_bytes - start);
        if (GATHER) {
            copy_bytes(in_page, in_payload, size);
        } else {
            copy_bytes(in_payload, in_page, size);
        }
    }
}

#define KV_PAGE_COPY(NAME, GATHER)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4)                                          \
    NAME(const i64* runs, const int* first_unit, const int* pages, const u64* payloads, int* error, \
         int n_blocks, int pages_per_block, int first_run, int last_run, int pool_pages,           \
         int skip_pages) {                                                                         \
        copy_pages<GATHER>(runs, first_unit, pages, payloads, error, n_blocks, pages_per_block,    \
                           first_run, last_run, pool_pages, skip_pages);                           \
    }
KV_PAGE_COPY(gather_pages, true)
KV_PAGE_COPY(scatter_pages, false)
