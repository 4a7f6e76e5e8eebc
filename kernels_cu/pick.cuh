// The digit in which the selection of a column ends, from the histogram of its digits.
#pragma once
#include "token_parts.cuh"

#if !defined(SELECT_THREADS) || !defined(SELECT_BITS)
#error "SELECT_THREADS and SELECT_BITS are given by launch_config.py"
#endif
static_assert(SELECT_THREADS == 1024, "a warp for each of the groups of bins, and for each bin of one");
static_assert(SELECT_BITS <= 10, "a group has at most as many bins as there are warps");
constexpr int PICK_WARPS = SELECT_THREADS / 32;

// The bins of a digit are counted one by one and in groups of consecutive ones: at most PICK_WARPS groups of as many bins each.
__device__ __forceinline__ int num_groups(int width) { return min(PICK_WARPS, 1 << width); }
__device__ __forceinline__ int bins_of_group(int width) { return (1 << width) / num_groups(width); }

// Finds the digits of 32 columns of a sequence, number `word`, and reserves room for their candidates. A block does this.
// Lanes take a column each. Warps take a group of bins each, then a bin each of the group in which the column's selection ends.
// of_warps: shared memory (32, 32), which no thread needs any more.
//   histogram  (2^width, E) int32, of the sequence
//   groups     (num_groups(width), E) int32, of the sequence: the same counts, summed over groups of bins
//   columns    (E,), of the sequence, in and out
//   reserved   how much of the list is given away, in and out
//   room       candidates that the list may have
//   wanted     keys to be taken of each column; -1: `columns` says
__device__ __forceinline__ void pick(const int* histogram, const int* groups, Column* columns, unsigned long long* reserved,
                                     int64 room, int num_experts, int width, int wanted, int word, int* of_warps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, expert = 32 * word + lane;
    const int number = num_groups(width), of_group = bins_of_group(width), shift = 32 - width;
    const bool exists = expert < num_experts;
    Column column = {0, wanted, 0, -1};
    of_warps[threadIdx.x] = exists && warp < number ? groups[(number - 1 - warp) * num_experts + expert] : 0;
    if (exists && wanted < 0) column = columns[expert];
    __syncthreads();  // all have read the column, of which one thread writes another
    wanted = column.wanted;
    int group = -1, before = 0, total = 0;  // from the highest down, and keys above it
#pragma unroll
    for (int g = 0; g < PICK_WARPS; ++g) {
        const int here = of_warps[32 * g + lane];
        if (total < wanted && wanted <= total + here) group = number - 1 - g, before = total;
        total += here;
    }
    __syncthreads();
    const int highest = group * of_group + of_group - 1;
    of_warps[threadIdx.x] = group >= 0 && warp < of_group ? histogram[(highest - warp) * num_experts + expert] : 0;
    __syncthreads();
    if (warp > 0 || !exists) return;
    if (group >= 0) {
        int bin = highest, here = 0;
#pragma unroll
        for (int i = 0; i < PICK_WARPS; ++i) {
            if (before + here >= wanted) continue;
            before += here, here = of_warps[32 * i + lane], bin = highest - i;
        }
        column.key = static_cast<unsigned>(bin) << shift;
        column.wanted = here == wanted - before ? ALL : wanted - before;
        if (column.wanted != ALL) {
            const unsigned long long first = atomicAdd(reserved, static_cast<unsigned long long>(here));
            column.first = first + here <= static_cast<unsigned long long>(room) ? static_cast<int>(first) : -1;
        }
    } else if (wanted <= 0) {  // above all keys but NaN's, of which none is taken
        column.key = static_cast<unsigned>((1 << width) - 1) << shift;
    } else {  // below all keys
        column.wanted = ALL;
    }
    columns[expert] = column;
}
