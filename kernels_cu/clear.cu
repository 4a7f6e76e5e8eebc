// Zeros for counters in global memory, as a kernel: the launch after it overlaps with it, which it could not with a memset.
//
// Launch: CLEAR_THREADS threads, each 16 bytes of every gridDim.x * CLEAR_THREADS * 16.
#include "common.cuh"

#if !defined(CLEAR_THREADS)
#error "CLEAR_THREADS is given by launch_config.py"
#endif

struct ClearParams {
    int* memory;  // (number,) int32, out, at a multiple of 16 bytes
    int64 number;
};

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS) clear(const ClearParams p) {
    let_next_launch_start();
    const int64 step = static_cast<int64>(gridDim.x) * CLEAR_THREADS, thread = blockIdx.x * int64(CLEAR_THREADS) + threadIdx.x;
    for (int64 i = thread; i < p.number / 4; i += step) reinterpret_cast<int4*>(p.memory)[i] = make_int4(0, 0, 0, 0);
    if (thread < p.number % 4) p.memory[p.number / 4 * 4 + thread] = 0;
}
