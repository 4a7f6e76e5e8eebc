// What selections of tokens share: the tokens of a block, what is known of a column's last key, and which block is the last.
#pragma once
#include "common.cuh"

struct Tokens {
    int64 begin, end;
};

__device__ __forceinline__ int64 clamped(int offset, int64 L) { return min(max(static_cast<int64>(offset), int64(0)), L); }

// Where a sequence begins and ends. Without offsets all sequences are equally long. Offsets (S+1,) rise, and are clamped to
// [0, L]. Tokens before the first and from the last on are in no sequence.
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

// Of the key that ends a column's selection: its leading digit, the other bits 0; how many are taken of the keys with this
// digit, ALL or fewer; whether the selection is among the chosen pairs (see round_tokens); and, where not all with this digit
// are taken, from where on they are in the list of candidates, -1 where it has no room for them.
struct __align__(16) Column {
    unsigned key;
    int wanted;
    int among_chosen;
    int first;
};
constexpr int ALL = 0x7fffffff;
// Whether only some of the keys with the digit are taken.
__device__ __forceinline__ bool has_candidates(const Column& column) { return column.wanted > 0 && column.wanted != ALL; }

// Whether of `blocks` blocks this one is the last that comes here. It sees all that the others have written. done: their
// number so far, 0 at first. `shared`: shared memory that no thread needs any more.
__device__ __forceinline__ bool comes_last(int* done, int blocks, int* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *shared = atomicAdd(done, 1) == blocks - 1;
    }
    __syncthreads();
    const bool last = *shared != 0;
    __syncthreads();  // all have read it
    if (last) __threadfence();
    return last;
}
