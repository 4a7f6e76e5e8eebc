// Shared code of the selections: the tokens of a block, how a column's selection ends, and which block comes last.
#pragma once
#include "common.cuh"

struct Tokens {
    int64 begin, end;
};

__device__ __forceinline__ int64 clamped(int offset, int64 L) { return min(max(static_cast<int64>(offset), int64(0)), L); }

// Returns the begin and the end of a sequence. All sequences are equally long without offsets. Offsets (S+1,) rise and are clamped to
// [0, L]. Tokens before the first offset and from the last one on are in no sequence.
__device__ __forceinline__ Tokens tokens_of_sequence(const int* offsets, int64 L, int num_sequences, int sequence) {
    if (!offsets) {
        const int64 length = L / num_sequences;
        return {sequence * length, (sequence + 1) * length};
    }
    const int64 begin = clamped(offsets[sequence], L);
    return {begin, max(begin, clamped(offsets[sequence + 1], L))};
}

// The part of a sequence's tokens that a block takes: all parts but the last ones are equally long.
__device__ __forceinline__ Tokens tokens_of_part(const Tokens& sequence, int parts, int part) {
    const int64 length = (sequence.end - sequence.begin + parts - 1) / parts;
    const int64 begin = min(sequence.begin + part * length, sequence.end);
    return {begin, min(begin + length, sequence.end)};
}

// The end of the selection of a column.
struct __align__(16) Column {
    unsigned key;      // the digit at which the selection ends, in the leading bits; the other bits are 0
    int wanted;        // number of keys with this digit that are taken; ALL: all of them
    int among_chosen;  // not 0: the selection is among the pairs that the router chose, see selection.cu
    int first;         // unless all are taken: start of the keys with this digit in the list; -1: it has no room for them
};
constexpr int ALL = 0x7fffffff;
// Returns whether only some of the keys with this digit are taken.
__device__ __forceinline__ bool has_candidates(const Column& column) { return column.wanted > 0 && column.wanted != ALL; }

// Returns whether this block is the last of `blocks` blocks that call this function. The last one sees all earlier writes of
// the others.
// done: counts the calls, 0 at first. shared: shared memory whose contents no thread needs any more.
__device__ __forceinline__ bool comes_last(int* done, int blocks, int* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *shared = atomicAdd(done, 1) == blocks - 1;
    }
    __syncthreads();
    const bool last = *shared != 0;
    __syncthreads();  // all threads have read *shared
    if (last) __threadfence();
    return last;
}
