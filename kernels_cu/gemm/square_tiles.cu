// Lists row tiles of TILE_ROWS = 192 rows beside dispatch's, which have 128. Products in square tiles read this list
// (grouped_gemm_sm90.cu). The paper has tiles of one size.
//
// Launch: one block of TILES_THREADS threads.
#include "common.cuh"

constexpr int WARPS = TILES_THREADS / 32;
static_assert(TILES_THREADS <= 1024 && TILES_THREADS % 32 == 0, "threads of a block");

struct SquareTilesParams {
    const int* expert_token_offsets;  // (E+1,) int32, in
    int* row_tiles;                   // (T+1, 2) int32, out: [0] = (tile count, TILE_ROWS), then (expert, first row)
    int num_experts;
};

// Returns the sum of the values of all threads before this one. `sum` becomes that of all threads' values.
__device__ __forceinline__ int sum_before(int value, int& sum) {
    __shared__ int of_warps[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sums = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sums, distance);
        if (lane >= distance) sums += other;
    }
    __syncthreads();  // all threads have read of_warps in the call before
    if (lane == 31) of_warps[warp] = sums;
    __syncthreads();
    sum = 0;
    int before = 0;
    for (int other = 0; other < WARPS; ++other) {
        before = other == warp ? sum : before;
        sum += of_warps[other];
    }
    return before + sums - value;
}

// Each thread counts the tiles of one expert at a time, and each warp writes them.
__device__ __forceinline__ void write_row_tiles(int2* list, const int* offsets, int num_experts) {
    constexpr int COUNTED = 32 * WARPS;
    __shared__ int places[COUNTED];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto tiles_of = [&](int expert) { return (offsets[expert + 1] - offsets[expert] + TILE_ROWS - 1) / TILE_ROWS; };
    int total = 0;
    for (int first = 0; first < num_experts; first += COUNTED) {
        int sum;
        const int expert = first + threadIdx.x;
        const int place = sum_before(expert < num_experts ? tiles_of(expert) : 0, sum);
        places[threadIdx.x] = total + place;
        __syncthreads();
        for (int other = first + warp; other < min(first + COUNTED, num_experts); other += WARPS)
            for (int tile = lane; tile < tiles_of(other); tile += 32)
                list[1 + places[other - first] + tile] = make_int2(other, offsets[other] + tile * TILE_ROWS);
        __syncthreads();
        total += sum;
    }
    if (threadIdx.x == 0) list[0] = make_int2(total, TILE_ROWS);
}

extern "C" __global__ void __launch_bounds__(TILES_THREADS) square_tiles(const SquareTilesParams p) {
    write_row_tiles(reinterpret_cast<int2*>(p.row_tiles), p.expert_token_offsets, p.num_experts);
}
