// Pairs of a token and an expert, listed from one bit per pair: token_offsets (L+1,) and ids, by token, then expert.
//
//   mask_bits    makes the bits from a mask with a byte for each pair
//   pairs_count  counts the bits in each block's words. It is left out where columns_split and columns_finish of selection.cu
//                have counted them, which is unless sequences are given by offsets
//   pairs_write  writes token_offsets and ids. It leaves out the pairs for which ids has no room. ids past the last pair are -1
//
// Launch: PAIRS_THREADS threads. mask_bits: any grid; a warp makes one word at a time. The others: at most PAIRS_BLOCKS blocks,
// each with the words of 2^block_shift tokens. Dynamic shared memory: one int32 for pairs_count, (2, WARPS) int64 and
// (WARPS + 1,) int32 for pairs_write.
#include "token_parts.cuh"

static_assert(PAIRS_THREADS % 32 == 0 && PAIRS_THREADS <= 1024, "whole warps, whose sums one warp adds up");
static_assert(PAIRS_BLOCKS <= 4 * PAIRS_THREADS, "a thread reads few counts of blocks");
constexpr int WARPS = PAIRS_THREADS / 32;

struct MaskBitsParams {
    const unsigned char* mask;  // (L, E) bool or uint8, in
    unsigned* taken;            // (L, ceil(E/32)) uint32, out
    int64 L;
    int num_experts;
};

struct PairsCountParams {
    const unsigned* taken;  // (L, ceil(E/32)) uint32, in
    int* block_counts;      // (blocks,) int32, out
    int64 num_words;        // L * ceil(E/32)
    int row_words;          // ceil(E/32)
    int block_shift;        // log2 of a block's tokens
};

struct PairsWriteParams {
    const unsigned* taken;    // (L, ceil(E/32)) uint32, in
    const int* block_counts;  // (blocks,) int32, in
    int* token_offsets;       // (L+1,) int32, out
    int* ids;                 // (num_pairs,) int32, out
    int64 num_words, num_pairs;
    int row_words;    // ceil(E/32)
    int block_shift;  // log2 of a block's tokens
};

// The words of a block.
template <class Params>
__device__ __forceinline__ Tokens words_of_block(const Params& p) {
    const int64 number = static_cast<int64>(p.row_words) << p.block_shift, begin = blockIdx.x * number;
    return {begin, min(begin + number, p.num_words)};
}

extern "C" __global__ void __launch_bounds__(PAIRS_THREADS) mask_bits(const MaskBitsParams p) {
    let_next_launch_start();
    const int lane = threadIdx.x & 31, row_words = (p.num_experts + 31) / 32;
    const int64 num_words = p.L * row_words;
    for (int64 i = blockIdx.x * int64(WARPS) + threadIdx.x / 32; i < num_words; i += gridDim.x * int64(WARPS)) {
        const int64 token = i / row_words;
        const int expert = 32 * static_cast<int>(i - token * row_words) + lane;
        const bool is_set = expert < p.num_experts && p.mask[token * p.num_experts + expert] != 0;
        const unsigned bits = __ballot_sync(0xffffffffu, is_set);
        if (lane == 0) p.taken[i] = bits;
    }
}

extern "C" __global__ void __launch_bounds__(PAIRS_THREADS) pairs_count(const PairsCountParams p) {
    let_next_launch_start();
    int* total = reinterpret_cast<int*>(dynamic_shared);
    if (threadIdx.x == 0) *total = 0;
    __syncthreads();
    wait_for_last_launch();
    const Tokens words = words_of_block(p);
    int count = 0;
    for (int64 i = words.begin + threadIdx.x; i < words.end; i += PAIRS_THREADS) count += __popc(p.taken[i]);
    count = __reduce_add_sync(0xffffffffu, count);
    if ((threadIdx.x & 31) == 0 && count) atomicAdd(total, count);
    __syncthreads();
    if (threadIdx.x == 0) p.block_counts[blockIdx.x] = *total;
}

// The sum of v over the block's threads before this one. of_warps: shared memory of WARPS + 1 elements. The last of them becomes
// the sum over all threads.
__device__ __forceinline__ int sum_before(int v, int* of_warps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int upto = v;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += other;
    }
    __syncthreads();  // all threads have read what an earlier call wrote
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        const int of_warp = lane < WARPS ? of_warps[lane] : 0;
        int sum = of_warp;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane < WARPS) of_warps[lane] = sum - of_warp;
        if (lane == 31) of_warps[WARPS] = sum;
    }
    __syncthreads();
    return of_warps[warp] + upto - v;
}

extern "C" __global__ void __launch_bounds__(PAIRS_THREADS) pairs_write(const PairsWriteParams p) {
    int64* sums = reinterpret_cast<int64*>(dynamic_shared);  // (2, WARPS): pairs of the blocks before, and of all blocks
    int* of_warps = reinterpret_cast<int*>(sums + 2 * WARPS);
    int64 before = 0, all = 0;
    wait_for_last_launch();
    for (unsigned b = threadIdx.x; b < gridDim.x; b += PAIRS_THREADS) {
        const int count = p.block_counts[b];
        if (b < blockIdx.x) before += count;
        all += count;
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        before += __shfl_xor_sync(0xffffffffu, before, step);
        all += __shfl_xor_sync(0xffffffffu, all, step);
    }
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = before, sums[WARPS + threadIdx.x / 32] = all;
    __syncthreads();
    int64 position = 0;
    all = 0;
#pragma unroll 4
    for (int w = 0; w < WARPS; ++w) position += sums[w], all += sums[WARPS + w];
    const int64 listed = min(all, p.num_pairs);
    const Tokens words = words_of_block(p);
    const int number = static_cast<int>(words.end - words.begin);  // words of whole tokens
    const unsigned* taken = p.taken + words.begin;
    int* token_offsets = p.token_offsets + (static_cast<int64>(blockIdx.x) << p.block_shift);
    for (int first = 0; first < number; first += PAIRS_THREADS) {
        const int i = first + threadIdx.x;
        unsigned bits = i < number ? taken[i] : 0;
        int64 pair = position + sum_before(__popc(bits), of_warps);
        position += of_warps[WARPS];
        if (i >= number) continue;
        const int token = i / p.row_words, word = i - token * p.row_words;
        if (word == 0) token_offsets[token] = static_cast<int>(min(pair, listed));
        for (; bits && pair < listed; bits &= bits - 1, ++pair) p.ids[pair] = 32 * word + __ffs(static_cast<int>(bits)) - 1;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) p.token_offsets[p.num_words / p.row_words] = static_cast<int>(listed);
    for (int64 i = listed + blockIdx.x * int64(PAIRS_THREADS) + threadIdx.x; i < p.num_pairs;
         i += gridDim.x * int64(PAIRS_THREADS))
        p.ids[i] = -1;
}
