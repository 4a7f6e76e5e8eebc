// Sums over the slots of the tokens of P GPUs (ranks), stored where each token's rank reads them: in the memory of other GPUs,
// which NVLink makes addressable. The paper has one GPU, whose sums aggregation.cu computes (sections 2.3 and 3.1, and section
// 3.2, step 3). Here the sums of this rank's experts are one of P terms of a token's result, and pull_sum (pull.cu) adds them up
// on the token's rank. Each rank has a buffer that all ranks map. Before a launch the caller needs a barrier among the GPUs, after
// which no rank reads the rows that are written. After the launch it needs another, so that the ranks see what was written.
//
// Launch: grid (P * (rows_per_peer / TOKENS_PER_BLOCK, rounded up), columns / PANEL_COLUMNS, rounded up); one warp per token,
// TOKENS_PER_BLOCK warps per block. Blocks take the ranks in turn, so that links and local memory are busy at the same time. Lane
// c has columns 8c to 8c+7 of the block's PANEL_COLUMNS. d and first_column are multiples of 8, addresses of 16.
#include "aggregate.cuh"
#include "peers.cuh"

template <class T, class W>
struct PushSumParams {
    const T* panel;                   // (R, panel_ld) element, in: the experts' outputs, or the gradients of their inputs
    const int* token_index_map;       // (P * rows_per_peer, k) int32, in: the row of each slot; below 0: no expert of this rank
    const W* weights;                 // (P * rows_per_peer, k) fp32 or element, in: factors of the rows; null: 1
    const unsigned long long* peers;  // (P,) addresses of the peers' buffers, in
    const unsigned char* needed;      // (P * rows_per_peer,) bool, in: tokens whose sums their rank reads; others are not stored
    int64 panel_ld;                   // elements from row to row of the panel
    int64 offset;                     // bytes from a peer's address to its (P * rows_per_peer, d) element, out: columns
                                      // first_column .. + columns of the rows from first_row on
    int64 first_row;                  // row of a peer's first token: rows_per_peer times this rank
    int P, rows_per_peer, k, d;
    int first_column, columns;
};

template <class T, class W>
__device__ void push_sum(const PushSumParams<T, W>& p) {
    const int peer = blockIdx.x % p.P;
    const int64 row = blockIdx.x / p.P * int64(TOKENS_PER_BLOCK) + threadIdx.x / 32, token = peer * int64(p.rows_per_peer) + row;
    if (row >= p.rows_per_peer || !p.needed[token]) return;
    sum_of_slots<true, false>(p, token, at_peer<T>(p.peers, peer, p.offset) + (p.first_row + row) * p.d);
}

#define PUSH_SUM_ENTRY(SUFFIX, T, W)                                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) push_sum_##SUFFIX(const PushSumParams<T, W> p) { \
        push_sum(p);                                                                                                     \
    }
PUSH_SUM_ENTRY(bfloat16_float32, bf16, float)
PUSH_SUM_ENTRY(bfloat16_bfloat16, bf16, bf16)
PUSH_SUM_ENTRY(float16_float32, fp16, float)
PUSH_SUM_ENTRY(float16_float16, fp16, fp16)
PUSH_SUM_ENTRY(float32_float32, float, float)
