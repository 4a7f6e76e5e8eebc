// The products of a low-rank factor of 16 ranks in grouped_gemm_sm90.cu, with LORA_IN_SPARE. A stage of the ring for them would
// cost as much as one that is full, so the factor lies in the spare bytes: thread 0 loads it after the tile's last stage, when
// the consumers are a few stages behind, and so done with the factor of the tile before. The rows of u come from global memory
// to registers, as fragments of the left operand. One wgmma ends the sum. With FP8 it follows the scales.
//
//   mbarrier      arrivals per tile                  waited on by
//   lora_full     thread 0, and the bytes of TMA     consumers, after a tile's last stage
//   lora_empty    the consumer warps                 thread 0, before it loads the next tile's factor
//
// Spare bytes: BN / 64 blocks of (16, 64) element, k by columns, in the 128-byte swizzle.
#pragma once
#include "gemm_core_sm90.cuh"
#include "grouped_gemm_params_sm90.cuh"
#include "tile_scheduler_sm90.cuh"

constexpr int LORA_BLOCK_BYTES = 16 * LINE_BYTES, LORA_BYTES = BN / 64 * LORA_BLOCK_BYTES;
static_assert(LORA_BYTES <= SPARE_BYTES, "the factor fits into the spare bytes");
static_assert(SPARE % SWIZZLE_ATOM_BYTES == 0 && LORA_BLOCK_BYTES % SWIZZLE_ATOM_BYTES == 0,
              "blocks start where the swizzle does");
static_assert(sizeof(element) == 2, "wgmma of 16-bit elements");
#if FP8
#define LORA_WGMMA wgmma_bf16
#else
#define LORA_WGMMA WGMMA
#endif

__shared__ uint64 lora_storage[2];  // full, empty

__device__ __forceinline__ void init_lora_barriers() {
    mbarrier_init(shared_address(lora_storage), 1);
    mbarrier_init(shared_address(lora_storage + 1), CONSUMER_WARPS);
}

// In thread 0, after the tile's last stage. parity: of the tile's number in the CTA. tile_columns: columns of B in a tile, or
// in half of it if SPLIT.
template <bool SPLIT>
__device__ __forceinline__ void load_lora(const GroupedGemmParams& p, const WorkTile& tile, unsigned parity, int tile_columns) {
    constexpr int HALF = BN / 2;
    const int n0 = tile.column_tile * tile_columns;
    const unsigned full = shared_address(lora_storage), to = shared_address(dynamic_shared) + SPARE;
    wait(shared_address(lora_storage + 1), parity ^ 1);  // the first wait returns at once
    mbarrier_arrive_expect_tx(full, LORA_BYTES);
#pragma unroll
    for (int column = 0; column < BN; column += 64) {
        const int n = n0 + (SPLIT ? column % HALF : column);
        const TensorMap* map = SPLIT && column >= HALF ? &p.lora1 : &p.lora0;
        tma_load_3d(to + column / 64 * LORA_BLOCK_BYTES, map, n, 0, tile.expert, full);
    }
}

// In the consumers: their rows of u, which are loaded before the tile's first stage is waited for.
struct LoraInSpare {
    const int number;
    unsigned u[4];
    __device__ __forceinline__ LoraInSpare(const GroupedGemmParams& p, const WorkTile& tile, int warp_row, int number)
        : number(number) {
        const int lane = threadIdx.x & 31, row = warp_row + lane / 4, last = max(tile.rows - 1, 0);
        const unsigned* const words = reinterpret_cast<const unsigned*>(p.lora_rows) + (lane & 3);
#pragma unroll
        for (int s = 0; s < 2; ++s) {  // rows past the last repeat it; their results are not stored
            const unsigned* const from = words + static_cast<int64>(tile.row + min(row + 8 * s, last)) * 8;
            u[s] = tile.rows > 0 ? from[0] : 0, u[2 + s] = tile.rows > 0 ? from[4] : 0;
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4], bool active) const {
        wait(shared_address(lora_storage), number & 1);
        if (!active) return;
        const unsigned start = (shared_address(dynamic_shared) + SPARE & 0x3ffff) >> 4;
        wgmma_fence();
        LORA_WGMMA<1>(acc, u, descriptor(uniform(start | (LORA_BLOCK_BYTES >> 4) << 16)));
        wgmma_commit();
        if (FP8) wgmma_wait<0>();
    }
    // After the products are done.
    __device__ __forceinline__ void release() const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(lora_storage + 1));
    }
};
