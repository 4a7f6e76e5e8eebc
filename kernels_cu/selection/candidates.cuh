// A selection among the candidates of one column: 64-bit values, the largest of which are taken.
#pragma once
#include "token_parts.cuh"

static_assert(FINISH_THREADS % 32 == 0 && FINISH_THREADS <= 1024, "threads of a block");

typedef unsigned long long Candidate;

// Candidates are taken by falling key, equal ones by rising index of the token or slot in its sequence.
__device__ __forceinline__ Candidate candidate(unsigned key, unsigned index) {
    return static_cast<Candidate>(key) << 32 | ~index;
}
__device__ __forceinline__ unsigned index_of(Candidate v) { return ~static_cast<unsigned>(v); }

constexpr int FINISH_DIGIT = 8, FINISH_BINS = 1 << FINISH_DIGIT;

struct Search {
    int histogram[FINISH_BINS];
    int digit, here, left;  // the digit at which the selection ends, its candidates, and how many of these are taken
};
constexpr int MAX_LISTED = (FINISH_SHARED_BYTES - sizeof(Search)) / sizeof(Candidate);  // candidates in shared memory

// Copies a column's candidates to shared memory. There are at most MAX_LISTED.
__device__ __forceinline__ void copy_candidates(Candidate* to, const Candidate* from, int number) {
    constexpr int COPIES = (MAX_LISTED + FINISH_THREADS - 1) / FINISH_THREADS;
    Candidate loaded[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; ++c) {
        const int i = c * FINISH_THREADS + threadIdx.x;
        if (i < number) loaded[c] = from[i];
    }
    issue_loads_now();
#pragma unroll
    for (int c = 0; c < COPIES; ++c) {
        const int i = c * FINISH_THREADS + threadIdx.x;
        if (i < number) to[i] = loaded[c];
    }
}

// Returns the smallest candidate that is taken: the `wanted` largest candidates are those from the result on. If there are fewer
// than wanted, all are taken. All candidates share the `width` leading bits of `key`. for_each calls a function with each
// candidate, in any order, and each thread with some of them.
template <class ForEach>
__device__ __forceinline__ Candidate find_last(Search& search, unsigned key, int width, int wanted, const ForEach& for_each) {
    const int lane = threadIdx.x & 31;
    Candidate known = static_cast<Candidate>(key) << 32;  // the result's bits from `shift` on
    int shift = 64 - width;
    do {
        const int of_digit = min(FINISH_DIGIT, shift);
        shift -= of_digit;
        for (int i = threadIdx.x; i < FINISH_BINS; i += FINISH_THREADS) search.histogram[i] = 0;
        __syncthreads();
        for_each([&](Candidate v) {
            if ((v ^ known) >> (shift + of_digit) == 0)
                atomicAdd(search.histogram + (v >> shift & (FINISH_BINS - 1) >> (FINISH_DIGIT - of_digit)), 1);
        });
        __syncthreads();
        if (threadIdx.x < 32) {
            constexpr int OF_LANE = FINISH_BINS / 32;
            const int highest = FINISH_BINS - 1 - lane * OF_LANE;
            int sum = 0;
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) sum += search.histogram[highest - i];
            int before = sum;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int other = __shfl_up_sync(0xffffffffu, before, step);
                if (lane >= step) before += other;
            }
            if (lane == 31 && before < wanted) search.digit = 0, search.here = search.left = wanted;
            before -= sum;
            if (before < wanted && wanted <= before + sum) {
                int bin = highest;
                while (before + search.histogram[bin] < wanted) before += search.histogram[bin--];
                search.digit = bin, search.here = search.histogram[bin], search.left = wanted - before;
            }
        }
        __syncthreads();
        known |= static_cast<Candidate>(search.digit) << shift;
        wanted = search.left;
    } while (search.here != wanted && shift > 0);
    return known;
}
