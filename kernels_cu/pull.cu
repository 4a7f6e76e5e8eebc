// Rows read by index from the memory of other GPUs of the same host, which NVLink makes addressable. Nothing is packed, and
// no row is sent that the indices do not name.
//   pull_rows   rows of peers to places here
//   pull_sum    each token sums a row of each peer, in the order of peers, in fp32
// Who launches them sees to it that the peers have written what is read: a barrier among the GPUs comes before.
//
// Launch:
//   pull_rows   PULL_THREADS threads per block, a warp per row in turn; few blocks, as NVLink needs few loads to be full
//   pull_sum    as aggregate of aggregation.cu: grid (L / TOKENS_PER_BLOCK, d / PANEL_COLUMNS), rounded up; a warp per token
#include "common.cuh"

#if !defined(PULL_THREADS) || !defined(TOKENS_PER_BLOCK) || !defined(PANEL_COLUMNS)
#error "PULL_THREADS, TOKENS_PER_BLOCK and PANEL_COLUMNS are given by launch_config.py"
#endif
static_assert(PULL_THREADS % 32 == 0 && PULL_THREADS <= 1024, "threads of a block, in warps");
static_assert(PANEL_COLUMNS == 32 * 8 && TOKENS_PER_BLOCK * 32 <= 1024, "a warp spans the columns of its grid row");

constexpr int PULLED_PIECES = 4;  // 16-byte pieces of a lane on their way from a peer

struct PullRowsParams {
    const unsigned long long* peers;  // (P,) addresses, in: (rows_per_peer, pieces) uint4 each
    const int* sources;               // (num_rows,) int32, in: peer * rows_per_peer + row; below 0: none
    uint4* out;                       // (num_rows, pieces), out: rows without a source stay as they are
    int num_rows, rows_per_peer, pieces;
};

template <class T>
struct PullSumParams {
    const unsigned long long* peers;  // (P,) addresses, in: (rows, d) element each
    const int* positions;             // (L, P) int32, in: a row of each peer; below 0: none
    T* out;                           // (L, d) element, out
    int L, P, d;
};

extern "C" __global__ void __launch_bounds__(PULL_THREADS) pull_rows(const PullRowsParams p) {
    const int64 warp = (blockIdx.x * int64(PULL_THREADS) + threadIdx.x) / 32, warps = gridDim.x * int64(PULL_THREADS / 32);
    const int lane = threadIdx.x & 31;
    for (int64 row = warp; row < p.num_rows; row += warps) {
        const int source = p.sources[row];
        if (source < 0) continue;
        const uint4* from = reinterpret_cast<const uint4*>(p.peers[source / p.rows_per_peer]);
        from += source % p.rows_per_peer * int64(p.pieces);
        uint4* to = p.out + row * p.pieces;
        for (int first = lane; first < p.pieces; first += 32 * PULLED_PIECES) {
            uint4 held[PULLED_PIECES];
#pragma unroll
            for (int i = 0; i < PULLED_PIECES; ++i)
                if (first + 32 * i < p.pieces) held[i] = from[first + 32 * i];
#pragma unroll
            for (int i = 0; i < PULLED_PIECES; ++i)
                if (first + 32 * i < p.pieces) to[first + 32 * i] = held[i];
        }
    }
}

// 8 elements of a peer by plain loads: the read-only cache is for memory that no one writes while a kernel runs.
template <class T>
__device__ __forceinline__ Row8<T> load_peer(const T* p) {
    Row8<T> row;
#pragma unroll
    for (int i = 0; i < Row8<T>::WORDS; i += 4) {
        const uint4 v = reinterpret_cast<const uint4*>(p)[i / 4];
        row.words[i] = v.x, row.words[i + 1] = v.y, row.words[i + 2] = v.z, row.words[i + 3] = v.w;
    }
    return row;
}

template <class T>
__device__ void pull_sum(const PullSumParams<T>& p) {
    const int64 column = blockIdx.y * int64(PANEL_COLUMNS) + (threadIdx.x & 31) * 8;
    const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + threadIdx.x / 32;
    if (token >= p.L || column >= p.d) return;
    const int* positions = p.positions + token * p.P;
    float sum[8] = {};
    for (int j0 = 0; j0 < p.P; j0 += 4) {
        Row8<T> rows[4];  // four loads in flight before the first is used
        bool present[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = j0 + i < p.P ? positions[j0 + i] : -1;
            present[i] = position >= 0;
            if (present[i]) rows[i] = load_peer(reinterpret_cast<const T*>(p.peers[j0 + i]) + position * int64(p.d) + column);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!present[i]) continue;
            float row[8];
            rows[i].unpack(row);
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] += row[c];
        }
    }
    store_row8<true>(p.out + token * p.d + column, sum, int64(8));
}

#define PULL_SUM_ENTRY(NAME, T) \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) NAME(const PullSumParams<T> p) { pull_sum(p); }
PULL_SUM_ENTRY(pull_sum_bfloat16, bf16)
PULL_SUM_ENTRY(pull_sum_float16, fp16)
PULL_SUM_ENTRY(pull_sum_float32, float)
