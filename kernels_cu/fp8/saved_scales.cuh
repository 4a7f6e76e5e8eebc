// The layout of the first layer that save="fp8" keeps.
#pragma once
#include "common.cuh"

// The address of the scales in a buffer of as many e4m3.
__device__ __forceinline__ float* saved_scales(unsigned char* saved, int64 elements) {
    return reinterpret_cast<float*>(saved + (elements + 15) / 16 * 16);
}

// The buffer begins with (num_rows, HALVES * columns) e4m3 in the order of w1's columns. From the next multiple of 16 bytes
// on it has (num_rows, groups, HALVES) fp32: a scale for each row and GROUP_COLUMNS columns of a half. HALVES is 2 (gate and
// up) in gated layers, else 1.
template <int HALVES>
struct SavedScales {
    float* const first;
    const unsigned groups;

    __device__ __forceinline__ SavedScales(unsigned char* saved, int num_rows, int columns)
        : first(saved_scales(saved, int64(num_rows) * (HALVES * columns))),
          groups((columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS) {}
    // The address of the scales of a row's group that has this column of a half: gate's, then up's.
    __device__ __forceinline__ float* at(unsigned row, unsigned column) const {
        return first + (static_cast<unsigned long long>(row) * groups + column / GROUP_COLUMNS) * HALVES;
    }
};
