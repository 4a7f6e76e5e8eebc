// Pipeline and main loop of the Hopper GEMMs: a tile of 128 x 256 per block of 384 threads, K in steps of 64 through a
// ring of STAGES buffers.
//   warpgroup 0, producer: fills the buffers; full[s] expects 128 cp.async arrivals, and one more with the bytes of
//     bulk copies where a kernel uses them (FULL_ARRIVALS).
//   warpgroups 1 and 2, consumers: 64 rows each, 4 wgmma m64n256k16 per stage, one group in flight; empty[s] expects
//     one arrival of each of the 8 warps. Their epilogue overlaps with the producer's loads of the next tile.
// Buffers hold operands as lines of 128 bytes, 16-byte chunk c of line l at chunk c ^ (l & 7), the 128-byte swizzle of
// wgmma: K-contiguous, a line per row of M or N; MN-contiguous, a line per k and block of 64 columns.
#pragma once
#include "ptx_sm90.cuh"
#include "row_staging.cuh"

typedef ELEMENT element;

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr bool ALIGNED = true;  // this tier takes sizes that are multiples of 8 only

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// The barriers of the ring, by shared address.
struct Barriers {
    unsigned full, empty;
    __device__ __forceinline__ Barriers(uint64 (&storage)[2 * STAGES], int full_arrivals)
        : full(shared_address(storage)), empty(full + 8 * STAGES) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(full + 8 * s, full_arrivals);
                mbarrier_init(empty + 8 * s, 8);
            }
            fence_mbarrier_init();
        }
        __syncthreads();
    }
};

// Position in the ring of stages: the buffer, and the parity of its barriers' current phase.
struct Ring {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// wgmma descriptor of a 128-byte-swizzled operand: 8-row (or 8-k) groups 1024 bytes apart, and for an MN-contiguous
// operand its 64-column blocks 8192 bytes apart.
__device__ __forceinline__ uint64 descriptor(unsigned address) {
    return (address & 0x3ffff) >> 4 | uint64(8192 >> 4) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

__device__ __forceinline__ int consumer_warp() { return threadIdx.x / 32 - 4; }
__device__ __forceinline__ float* warp_staging() {
    return reinterpret_cast<float*>(dynamic_shared + STAGES * STAGE_BYTES) + consumer_warp() * STAGED_FLOATS;
}

// acc = this warpgroup's 64 x 256 over `steps` > 0 stages; acc[j] is a tile of mma.m16n8k16 of rows 16 * warp ..
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_>
__device__ __forceinline__ void consume(float (&acc)[32][4], int steps, Ring& ring, const Barriers& barriers) {
    const int lane = threadIdx.x & 31;
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
        wait(barriers.full + 8 * ring.stage, ring.parity);
        const unsigned stage = shared_address(dynamic_shared) + ring.stage * STAGE_BYTES;
        const uint64 a = descriptor(stage + consumer_warp() / 4 * 8192), b = descriptor(stage + A_BYTES);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BK / 16; ++kk)
            WGMMA<!A_K_CONTIGUOUS, !B_K_CONTIGUOUS_>(acc, a + (kk * (A_K_CONTIGUOUS ? 32 : 2048) >> 4),
                                                     b + (kk * (B_K_CONTIGUOUS_ ? 32 : 2048) >> 4), step + kk);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            if (lane == 0) mbarrier_arrive(barriers.empty + 8 * previous);
        }
        previous = ring.stage;
        ring.advance();
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(barriers.empty + 8 * previous);
}

// Stages 64 accumulator columns of this warp: a piece of four; of a SPLIT tile 32 of gate and the same 32 of up.
template <bool SPLIT_>
__device__ __forceinline__ void stage_piece(const float (&acc)[32][4], int piece) {
    float tile[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int s = 0; s < 4; ++s) tile[j][s] = acc[SPLIT_ ? (j / 4) * 16 + piece * 4 + j % 4 : piece * 8 + j][s];
    RowStaging<SPLIT_ ? 2 : 1>::put(warp_staging(), tile);
}
