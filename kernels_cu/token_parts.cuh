// What selections of tokens share: the tokens of a block, and what is known of a column's last key.
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

// What is known of the key that ends a column's selection: the leading bits found so far, the others 0; how many are still
// wanted among the keys with these leading bits; and whether the selection is among the chosen pairs (see round_tokens).
// Once all bits are known `wanted` is how many of the keys that equal `key` are taken, the lowest tokens first, or ALL.
struct __align__(16) Column {
    unsigned key;
    int wanted;
    int among_chosen;
    int unused;
};
constexpr int ALL = 0x7fffffff;
// Whether only some of the keys that equal `key` are taken, once all bits are known.
__device__ __forceinline__ bool has_ties(const Column& column) { return column.wanted > 0 && column.wanted != ALL; }

// Bits of a key above the digit at `shift` with `width` bits.
__device__ __forceinline__ unsigned bits_above(int shift, int width) {
    return shift + width < 32 ? 0xffffffffu << (shift + width) : 0;
}
