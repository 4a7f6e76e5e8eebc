// Weight gradients, Hopper tier (sm_90a, bf16 and fp16, sizes that are multiples of 8): the steps, arguments and results
// of grouped_wgrad_sm80.cu, on wgmma.
//
//   expert_stride         as there; num_experts, halves: what the grid of the portable tier says
//   routed                tensor map of the operand that is not gathered, 3-D (columns, rows, 1), boxes of 64 x 64 x 1
//
// Launch: a persistent grid of at most one block per multiprocessor, 384 threads, dynamic shared memory 224 KiB.
// Tile: 128 (M) x 256 (N) of one expert's gradient, K = its tokens in steps of 64, STAGES = 4 buffers of 48 KiB.
//   warpgroup 0, producer: gathers 64 token rows per stage by cp.async, a line of 128 bytes per row and block of 64
//     columns; thread 0 fetches the other operand's boxes. (By cp.async alone, 24 copies per thread and stage, the copies
//     bound the kernel.) The last stage of an expert with fewer rows takes both by cp.async, with zeros for rows of
//     others: those may hold anything. full[s] expects 128 cp.async arrivals and thread 0's.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh; both operands are MN-contiguous.
#include "gemm_core_sm90.cuh"

struct Work {
    int expert, half, m0, n0, first, last;
};

__device__ __forceinline__ Work work_of(int index, int m_tiles, int n_tiles, int halves, const int* expert_token_offsets) {
    const int per_expert = m_tiles * n_tiles * halves, expert = index / per_expert, within = index % per_expert;
    const Tile tile = raster(within % (m_tiles * n_tiles), m_tiles, n_tiles);
    return {expert, within / (m_tiles * n_tiles), tile.m * BM, tile.n * BN, expert_token_offsets[expert], expert_token_offsets[expert + 1]};
}

extern "C" __global__ void __launch_bounds__(384, 1)
    ENTRY(const element* p, int64 ldp, int64 p_half, const element* q, int64 ldq, int64 q_half, const int* expert_token_indices,
          const int* expert_token_offsets, element* out0, element* out1, int64 expert_stride, int64 ldo, int64 rows, int64 columns,
          int64 num_experts, int64 halves, const __grid_constant__ TensorMap routed) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    const Barriers barriers(barrier_storage, 128 + 1);
    const unsigned shared = shared_address(dynamic_shared);
    const int M = static_cast<int>(rows), N = static_cast<int>(columns);
    const int m_tiles = (M + BM - 1) / BM, n_tiles = (N + BN - 1) / BN;
    const int tiles = static_cast<int>(num_experts * halves) * m_tiles * n_tiles;

    Ring ring;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<56>();
        constexpr int ROWS = BK / 16;  // thread t copies chunk t % 8 of token rows t / 8 + 16 i, for every block of columns
        const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
        const unsigned dst = shared + line * 128 + ((chunk ^ (line & 7)) * 16);
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Work work = work_of(t, m_tiles, n_tiles, static_cast<int>(halves), expert_token_offsets);
            const element* p_tile = p + work.half * p_half + work.m0 + chunk * 8;
            const element* q_tile = q + work.half * q_half + work.n0 + chunk * 8;
            // Tokens are loaded AHEAD stages before their use as addresses: one stage is shorter than a load (45% of the
            // consumers' time went into waiting for the producer so).
            constexpr int AHEAD = 3;
            int tokens[AHEAD][ROWS];
            auto load_tokens = [&](int (&into)[ROWS], int first) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int row = first + line + 16 * i;
                    into[i] = row < work.last ? expert_token_indices[row] : 0;
                }
            };
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) load_tokens(tokens[ahead], work.first + ahead * BK);
            for (int first = work.first; first < work.last; first += BK) {
                const unsigned stage = dst + ring.stage * STAGE_BYTES;
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                const bool whole = first + BK <= work.last;
                const unsigned full = barriers.full + 8 * ring.stage;
                if (threadIdx.x == 0) {
                    constexpr int BLOCKS = (GATHER_P ? BN : BM) / 64;
                    mbarrier_arrive_expect_tx(full, whole ? BLOCKS * 8192 : 0);
                    const unsigned to = shared + ring.stage * STAGE_BYTES + (GATHER_P ? A_BYTES : 0);
                    const int column = static_cast<int>(work.half * (GATHER_P ? q_half : p_half)) + (GATHER_P ? work.n0 : work.m0);
                    if (whole)
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
                            tensor_load_3d(to + block * 8192, &routed, column + block * 64, first, 0, full);
                }
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int row = first + line + 16 * i;
                    if (GATHER_P || !whole) {
                        const element* p_row = p_tile + static_cast<int64>(GATHER_P ? tokens[0][i] : row) * ldp;
                        const int left = row < work.last ? M - work.m0 - chunk * 8 : 0;
#pragma unroll
                        for (int block = 0; block < BM / 64; ++block)
                            cp_async_16(stage + block * 8192 + i * 2048, p_row + block * 64, block * 64 < left ? 16u : 0u);
                    }
                    if (GATHER_Q || !whole) {
                        const element* q_row = q_tile + static_cast<int64>(GATHER_Q ? tokens[0][i] : row) * ldq;
                        const int left = row < work.last ? N - work.n0 - chunk * 8 : 0;
#pragma unroll
                        for (int block = 0; block < BN / 64; ++block)
                            cp_async_16(stage + A_BYTES + block * 8192 + i * 2048, q_row + block * 64, block * 64 < left ? 16u : 0u);
                    }
                }
                cp_async_mbarrier_arrive(full);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                    for (int ahead = 0; ahead < AHEAD - 1; ++ahead) tokens[ahead][i] = tokens[ahead + 1][i];
                }
                load_tokens(tokens[AHEAD - 1], first + AHEAD * BK);
                ring.advance();
            }
        }
        return;
    }

    setmaxnreg_inc<224>();
    const int warp_row = consumer_warp() * 16;
    using Staging = RowStaging<1>;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Work work = work_of(t, m_tiles, n_tiles, static_cast<int>(halves), expert_token_offsets);
        element* out = (work.half ? out1 : out0) + work.expert * expert_stride;
        if (work.last == work.first) {
            for (int i = threadIdx.x - 128; i < BM * BN / 8; i += 256) {
                const int m = work.m0 + i / (BN / 8), n = work.n0 + i % (BN / 8) * 8;
                if (m < M && n < N) store_global_16(out + m * ldo + n, make_uint4(0, 0, 0, 0));
            }
            continue;
        }
        float acc[32][4];
        consume<false, false>(acc, (work.last - work.first + BK - 1) / BK, ring, barriers);
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
            const int n = work.n0 + piece * 64 + Staging::column_group() * 8;
            stage_piece<false>(acc, piece);
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                const int m = work.m0 + warp_row + Staging::row(pass);
                float v[1][8];
                Staging::get(v, warp_staging(), pass);
                if (m < M) store_row8<ALIGNED>(out + m * ldo + n, v[0], N - n);
            }
        }
    }
}
