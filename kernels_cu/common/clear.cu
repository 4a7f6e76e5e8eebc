// Writes zeros to counters in global memory. This is a kernel rather than a memset, so that the next launch may overlap with
// it; see let_next_launch_start.
//
// Launch: a grid of any size, CLEAR_THREADS threads per block. Threads write 16 bytes at a time. The launch must not overlap
// with the launch before it.
#include "common.cuh"

struct ClearParams {
    int* memory;  // (number,) int32, out; its address is a multiple of 16 bytes
    int64 number;
};

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS) clear(const ClearParams p) {
    let_next_launch_start();
    const int64 step = static_cast<int64>(gridDim.x) * CLEAR_THREADS, thread = blockIdx.x * int64(CLEAR_THREADS) + threadIdx.x;
    for (int64 i = thread; i < p.number / 4; i += step) reinterpret_cast<int4*>(p.memory)[i] = make_int4(0, 0, 0, 0);
    if (thread < p.number % 4) p.memory[p.number / 4 * 4 + thread] = 0;
}
