// Adds a bias to the products of grouped_gemm_sm90.cu, in kernels compiled with BIASED. The paper's layers have no biases.
#pragma once
#include "gemm_core_sm90.cuh"
#if LORA_IN_SPARE
#include "lora_spare_sm90.cuh"
#endif

// The bias of a tile's columns. Each consumer warp fetches it to its own part of the spare shared memory while the tile's
// products are computed, and then adds it to the fp32 accumulators.
struct TileBias {
    static constexpr int BYTES = BN * sizeof(BIAS), CHUNK_COLUMNS = 16 / sizeof(BIAS);
#if LORA_IN_SPARE
    static_assert(LORA_BYTES + CONSUMER_WARPS * BYTES <= SPARE_BYTES, "a tile's bias for each consumer warp, after the factor");
    unsigned char* const staged = dynamic_shared + SPARE + LORA_BYTES + consumer_warp() * BYTES;
#else
    static_assert(CONSUMER_WARPS * BYTES <= SPARE_BYTES, "a tile's bias for each consumer warp");
    unsigned char* const staged = dynamic_shared + SPARE + consumer_warp() * BYTES;
#endif

    // SPLIT: the tile has BN / 2 columns of gate, then as many of up. n0: the tile's first column of B. columns: those of B.
    // Columns past the last get zeros.
    template <bool SPLIT, class Params>
    __device__ __forceinline__ void fetch(const Params& p, int expert, int n0, int columns) const {
#pragma unroll
        for (int byte = threadIdx.x % 32 * 16; byte < BYTES; byte += 32 * 16) {
            const int column = byte / int(sizeof(BIAS)), n = n0 + (SPLIT ? column % (BN / 2) : column);
            const BIAS* from = (SPLIT && column >= BN / 2 ? p.bias1 : p.bias0) + expert * p.bias_stride + n;
            cp_async_16(shared_address(staged) + byte, from, n < columns ? 16 : 0);
        }
        cp_async_commit();
    }
    // acc[j] is a fragment of mma.m16n8k16: the lane has rows lane / 4 and + 8, columns 8 j + 2 (lane % 4) and + 1.
    __device__ __forceinline__ void add_to(float (&acc)[FRAGMENTS][4]) const {
        cp_async_wait<0>();
        __syncwarp();  // all lanes' copies have arrived
        const BIAS* pairs = reinterpret_cast<const BIAS*>(staged) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
            const float2 bias = load_pair(pairs + 8 * j);
            acc[j][0] += bias.x, acc[j][1] += bias.y, acc[j][2] += bias.x, acc[j][3] += bias.y;
        }
    }

private:
    static __device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
    template <class Half>
    static __device__ __forceinline__ float2 load_pair(const Half* p) {
        const unsigned v = *reinterpret_cast<const unsigned*>(p);
        return make_float2(to_float(Half{static_cast<unsigned short>(v)}), to_float(Half{static_cast<unsigned short>(v >> 16)}));
    }
};
