// Finds the digit at which the selection of a column ends, from the histogram of its digits.
#pragma once
#include "token_parts.cuh"

static_assert(SELECT_THREADS == 1024, "a lane sums the counts of all warps");
static_assert(SELECT_BITS >= 5, "a warp has a bin at least");
constexpr int PICK_WARPS = SELECT_THREADS / 32;

// One block finds the digits of the 32 columns from 32 * word on and reserves room for their candidates. Each lane takes one
// column. The bins are divided evenly among the warps, from the highest bin down.
//   histogram  (2^width, E) int32, in: of the sequence
//   columns    (E,) Column, in and out: of the sequence
//   reserved   in and out: number of the list's places that are reserved
//   room       the list's places
//   wanted     keys that each column takes; -1: `columns` has this number
//   of_warps   (32, 32) int32 in shared memory
__device__ __forceinline__ void pick(const int* histogram, Column* columns, unsigned long long* reserved, int64 room,
                                     int num_experts, int width, int wanted, int word, int* of_warps) {
    constexpr int MOST = (1 << SELECT_BITS) / PICK_WARPS;  // bins of a warp
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, expert = 32 * word + lane;
    const int bins = 1 << width, of_warp = max(bins / PICK_WARPS, 1), highest = bins - 1 - warp * of_warp, shift = 32 - width;
    const int number = expert < num_experts && highest >= 0 ? of_warp : 0;
    int counts[MOST], sum = 0;
    // All lanes of all warps load. Lanes past the last column or bin load a count that they do not use. So two loads are only a
    // few instructions apart: a step to the next address, and a comparison whose result is the same for all lanes.
    const int* at = histogram + static_cast<int64>(max(highest, 0)) * num_experts + min(expert, num_experts - 1);
#pragma unroll
    for (int i = 0; i < MOST; ++i, at -= num_experts) counts[i] = i < of_warp ? *at : 0;
    Column column = {0, wanted, 0, -1};
    if (expert < num_experts && wanted < 0) column = columns[expert];
#pragma unroll
    for (int i = 0; i < MOST; ++i) sum += counts[i];
    sum = number ? sum : 0;
    of_warps[32 * warp + lane] = sum;
    __syncthreads();  // all threads have read `columns`, which one thread per column overwrites
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < PICK_WARPS; ++w) {
        if (w == warp) before = total;
        total += of_warps[32 * w + lane];
    }
    wanted = column.wanted;
    if (number && wanted > 0 && before < wanted && wanted <= before + sum) {
        int bin = highest, here = counts[0];
#pragma unroll
        for (int i = 1; i < MOST; ++i)
            if (before + here < wanted) before += here, here = counts[i], bin = highest - i;
        column.key = static_cast<unsigned>(bin) << shift;
        column.wanted = here == wanted - before ? ALL : wanted - before;
        if (column.wanted != ALL) {
            const unsigned long long first = atomicAdd(reserved, static_cast<unsigned long long>(here));
            column.first = first + here <= static_cast<unsigned long long>(room) ? static_cast<int>(first) : -1;
        }
        columns[expert] = column;
    } else if (warp == 0 && number && wanted <= 0) {  // nothing is taken: a digit above all keys but those of NaN
        column.key = static_cast<unsigned>(bins - 1) << shift;
        columns[expert] = column;
    } else if (warp == 0 && number && wanted > total) {  // all keys are taken
        column.wanted = ALL;
        columns[expert] = column;
    }
}
