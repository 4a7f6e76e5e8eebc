// Exchange of tokens between the P GPUs (ranks) of a host by loads from the others' memory, which NVLink makes addressable. The
// paper has one GPU. Each rank has a buffer that all ranks map. It holds the rows, expert ids and router weights of the rank's
// rows_per_peer tokens, and later the results of its experts, unless these have stored them where they are read (push.cu). No
// rank packs rows to send, and a rank loads only the rows that have one of its experts.
//   pull_slots   loads the ids and router weights of all ranks' slots, and finds the rows that have an expert of this rank
//   pull_rows    loads these rows
//   pull_scaled_rows  does the same for e4m3 with a scale for each row (fp8.cuh)
//   pull_sum     sums each token of this rank over the ranks that have one of its experts, in the order of ranks, in fp32
//   pull_values  loads each slot's value, such as the gradient of its router weight, from the rank that has its expert
// Rank r has the experts from r * experts_per_peer to (r + 1) * experts_per_peer. An id below 0, or from P * experts_per_peer
// on, stands for no expert. Before a launch the caller needs a barrier among the GPUs, after which the peers' data are written.
//
// Launch:
//   pull_slots   grid num_rows / SLOT_ROWS, rounded up; PULL_THREADS threads per block, which take the block's slots in turn
//   pull_rows, pull_scaled_rows  any grid, PULL_THREADS threads per block; warps take rows in turn. Few blocks are enough to
//                fill NVLink.
//   pull_sum     grid (L / TOKENS_PER_BLOCK, d / PANEL_COLUMNS), rounded up; a warp per token, TOKENS_PER_BLOCK warps per block
//   pull_values  grid num_slots / PULL_THREADS, rounded up; one thread per slot, PULL_THREADS threads per block
#include "peers.cuh"

static_assert(PULL_THREADS % 32 == 0 && PULL_THREADS <= 1024, "threads of a block, in warps");
static_assert(SLOT_ROWS <= PULL_THREADS, "a thread per row tells whether it is needed");
static_assert(PANEL_COLUMNS == 32 * 8 && TOKENS_PER_BLOCK * 32 <= 1024, "a warp spans the columns of its grid row");

constexpr int PULLED_PIECES = 8;  // 16-byte pieces that a lane loads before it stores the first
constexpr unsigned WARP = 0xffffffffu;

// I: the type of ids, int or long long. W: the bits of a router weight, unsigned or unsigned short.
template <class I, class W>
struct PullSlotsParams {
    const unsigned long long* peers;     // (P,) addresses of the peers' buffers, in
    int* local_ids;                      // (num_rows, k) int32, out: ids less first_expert; -1: not an expert of this rank
    W* weights;                          // (num_rows, k) W, out
    unsigned char* needed;               // (num_rows,) bool, out: whether a slot of the row has an expert of this rank
    int64 ids_offset;                    // bytes from a peer's address to its (rows_per_peer, k) I, ids, in
    int64 weights_offset;                // bytes from a peer's address to its (rows_per_peer, k) W, router weights, in
    int num_rows, rows_per_peer, k;      // num_rows: P * rows_per_peer
    int first_expert, experts_per_peer;  // first_expert: of this rank
};

struct PullRowsParams {
    const unsigned long long* peers;  // (P,) addresses of the peers' buffers, in
    const unsigned char* needed;      // (num_rows,) bool, in
    uint4* out;                       // (num_rows, pieces) uint4, out: rows that are not needed stay as they are
    int64 offset;                     // bytes from a peer's address to its (rows_per_peer, pieces) uint4, in
    int P, rows_per_peer, pieces;     // num_rows is P * rows_per_peer; pieces: of 16 bytes of a row
};

struct PullScaledRowsParams {
    const unsigned long long* peers;  // (P,) addresses of the peers' buffers, in
    const unsigned char* needed;      // (num_rows,) bool, in
    uint4* out;                       // (num_rows, pieces) uint4, out: rows that are not needed stay as they are
    float* scales;                    // (num_rows,) fp32, out: likewise
    int64 offset;                     // bytes from a peer's address to its (rows_per_peer, pieces) uint4, in
    int64 scales_offset;              // bytes from a peer's address to its (rows_per_peer,) fp32, in
    int P, rows_per_peer, pieces;     // as of PullRowsParams
};

template <class T, class I>
struct PullSumParams {
    const unsigned long long* peers;  // (P,) addresses of the peers' buffers, in
    const I* ids;                     // (L, k) I, in
    T* out;                           // (L, d) element, out
    int64 offset;                     // bytes from a peer's address to its (P * L, d) element, results of all ranks' tokens, in
    int64 first_row;                  // row of this rank's first token in these results
    int L, P, k, d, experts_per_peer;
};

template <class I, class W>
struct PullValuesParams {
    const unsigned long long* peers;  // (P,) addresses of the peers' buffers, in
    const I* ids;                     // (num_slots,) I, in
    W* out;                           // (num_slots,) W, out: 0 for slots without an expert
    int64 offset;                     // bytes from a peer's address to its (P * num_slots,) W, values of all ranks' slots, in
    int64 first_slot;                 // index of this rank's first slot in these values
    int num_slots, num_experts, experts_per_peer;  // num_slots: of this rank; num_experts: P * experts_per_peer
};

template <class I, class W>
__device__ void pull_slots(const PullSlotsParams<I, W>& p) {
    __shared__ int needed[SLOT_ROWS];
    const int64 first = blockIdx.x * int64(SLOT_ROWS);
    const int rows = min(int64(SLOT_ROWS), p.num_rows - first);
    if (threadIdx.x < SLOT_ROWS) needed[threadIdx.x] = 0;
    __syncthreads();
    const int slots = rows * p.k;
    for (int i = threadIdx.x; i < slots; i += PULL_THREADS) {
        const int row_of_block = i / p.k, row = first + row_of_block, peer = row / p.rows_per_peer;
        const int64 at_source = (row - peer * p.rows_per_peer) * int64(p.k) + i - row_of_block * p.k;
        const I id = at_peer<const I>(p.peers, peer, p.ids_offset)[at_source];
        const W weight = at_peer<const W>(p.peers, peer, p.weights_offset)[at_source];
        const bool here = id >= p.first_expert && id < p.first_expert + p.experts_per_peer;
        p.local_ids[first * p.k + i] = here ? static_cast<int>(id) - p.first_expert : -1;
        p.weights[first * p.k + i] = weight;
        if (here) atomicOr(&needed[row_of_block], 1);
    }
    __syncthreads();
    if (threadIdx.x < rows) p.needed[first + threadIdx.x] = needed[threadIdx.x];
}

// Calls copy(row, peer, row_of_peer) for each row that is needed.
template <class Params, class Copy>
__device__ __forceinline__ void for_needed_rows(const Params& p, Copy copy) {
    const int64 warp = (blockIdx.x * int64(PULL_THREADS) + threadIdx.x) / 32, warps = gridDim.x * int64(PULL_THREADS / 32);
    const int64 num_rows = p.P * int64(p.rows_per_peer);
    for (int64 i = warp; i < num_rows; i += warps) {
        const int peer = i % p.P, row_of_peer = i / p.P;  // peers take turns, so that all links and this GPU's memory are busy
        const int64 row = peer * int64(p.rows_per_peer) + row_of_peer;
        if (p.needed[row]) copy(row, peer, row_of_peer);
    }
}

template <class Params>
__device__ __forceinline__ void pull_row(const Params& p, int64 row, int peer, int row_of_peer) {
    const uint4* from = at_peer<const uint4>(p.peers, peer, p.offset) + row_of_peer * int64(p.pieces);
    uint4* to = p.out + row * p.pieces;
    for (int first = threadIdx.x & 31; first < p.pieces; first += 32 * PULLED_PIECES) {
        uint4 held[PULLED_PIECES];
#pragma unroll
        for (int i = 0; i < PULLED_PIECES; ++i)
            if (first + 32 * i < p.pieces) held[i] = from[first + 32 * i];
#pragma unroll
        for (int i = 0; i < PULLED_PIECES; ++i)
            if (first + 32 * i < p.pieces) to[first + 32 * i] = held[i];
    }
}

extern "C" __global__ void __launch_bounds__(PULL_THREADS) pull_rows(const PullRowsParams p) {
    for_needed_rows(p, [&](int64 row, int peer, int row_of_peer) { pull_row(p, row, peer, row_of_peer); });
}

extern "C" __global__ void __launch_bounds__(PULL_THREADS) pull_scaled_rows(const PullScaledRowsParams p) {
    for_needed_rows(p, [&](int64 row, int peer, int row_of_peer) {
        float scale = 0.f;  // on its way while the row is
        if (threadIdx.x % 32 == 0) scale = at_peer<const float>(p.peers, peer, p.scales_offset)[row_of_peer];
        pull_row(p, row, peer, row_of_peer);
        if (threadIdx.x % 32 == 0) p.scales[row] = scale;
    });
}

// 8 elements of a peer, by plain loads: the read-only cache is only for memory that no GPU writes while the kernel runs.
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

template <class T, class I>
__device__ void pull_sum(const PullSumParams<T, I>& p) {
    const int lane = threadIdx.x & 31;
    const int64 column = blockIdx.y * int64(PANEL_COLUMNS) + lane * 8;
    const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + threadIdx.x / 32;
    if (token >= p.L) return;  // the same in all lanes of a warp
    const I* ids = p.ids + token * p.k;
    const int64 element = (p.first_row + token) * p.d + column;
    float sum[8] = {};
    for (int first = 0; first < p.P; first += 32) {
        unsigned peers = 0;
        for (int j = lane; j < p.k; j += 32) {
            if (ids[j] < 0 || ids[j] >= int64(p.P) * p.experts_per_peer) continue;
            const int peer = static_cast<int>(ids[j]) / p.experts_per_peer - first;
            if (peer >= 0 && peer < 32) peers |= 1u << peer;
        }
        peers = __reduce_or_sync(WARP, peers);
        while (peers) {
            Row8<T> rows[4];  // four rows are loaded before the first is used, to hide the latency
            bool present[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                present[i] = peers != 0 && column < p.d;
                if (present[i]) rows[i] = load_peer(at_peer<const T>(p.peers, first + __ffs(peers) - 1, p.offset) + element);
                peers &= peers - 1;
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
    }
    if (column < p.d) store_row8<true>(p.out + token * p.d + column, sum, int64(8));
}

template <class I, class W>
__device__ void pull_values(const PullValuesParams<I, W>& p) {
    const int64 slot = blockIdx.x * int64(PULL_THREADS) + threadIdx.x;
    if (slot >= p.num_slots) return;
    const I id = p.ids[slot];
    W value = 0;
    if (id >= 0 && id < p.num_experts)
        value = at_peer<const W>(p.peers, static_cast<int>(id) / p.experts_per_peer, p.offset)[p.first_slot + slot];
    p.out[slot] = value;
}

#define PULL_SUM_ENTRY(NAME, T, I) \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) NAME(const PullSumParams<T, I> p) { pull_sum(p); }
#define PULL_SLOTS_ENTRIES(SUFFIX, I, W)                                                                              \
    extern "C" __global__ void __launch_bounds__(PULL_THREADS) pull_slots_##SUFFIX(const PullSlotsParams<I, W> p) {   \
        pull_slots(p);                                                                                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(PULL_THREADS) pull_values_##SUFFIX(const PullValuesParams<I, W> p) { \
        pull_values(p);                                                                                               \
    }
#define PULL_ENTRIES(IDS, I)                         \
    PULL_SUM_ENTRY(pull_sum_bfloat16_##IDS, bf16, I) \
    PULL_SUM_ENTRY(pull_sum_float16_##IDS, fp16, I)  \
    PULL_SUM_ENTRY(pull_sum_float32_##IDS, float, I) \
    PULL_SLOTS_ENTRIES(IDS##_4, I, unsigned)         \
    PULL_SLOTS_ENTRIES(IDS##_2, I, unsigned short)
PULL_ENTRIES(int32, int)
PULL_ENTRIES(int64, long long)
