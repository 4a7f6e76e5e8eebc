// Grouped GEMMs over the rows of each expert, Hopper tier (sm_90a, bf16 and fp16, sizes that are multiples of 8): the
// steps, arguments and results of grouped_gemm_sm80.cu, on wgmma and the bulk copy engine.
//
//   b0, b1          tensor maps of the weight, 3-D: (k, n, expert) with B_K_CONTIGUOUS, else (n, k, expert), boxes of
//                   64 x 128 x 1 or 64 x 64 x 1 elements, 128-byte swizzle; gate and up, or K segments 0 and 1
//   first_column    of B's n extent: where the panel starts; N = columns of the result, K = depth of one segment
//   the rest        as in grouped_gemm_sm80.cu, except
//   partial_sums    (column tiles, num_slots) fp32, one column tile being 256 columns (128 of a gated ACTIVATE)
//
// Launch: a persistent grid of at most one block per multiprocessor, 384 threads, dynamic shared memory 224 KiB.
// Tile: 128 rows x 256 columns (of them 128 gate beside 128 up), K in steps of 64, STAGES = 4 buffers of 48 KiB.
//   warpgroup 0, producer: its 128 threads gather A's rows by cp.async into the 128-byte swizzle; thread 0 also
//     issues B's boxes and announces their bytes. full[s] expects 129 arrivals.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh.
#include "gemm_core_sm90.cuh"
#include "activation.cuh"

typedef WEIGHT weight_t;

enum { STORE = 0, ACTIVATE = 1, ACTIVATE_BWD = 2 };

constexpr bool SPLIT = EPILOGUE == ACTIVATE && GATED;
constexpr int TILE_COLUMNS = SPLIT ? 128 : 256, GROUPS = SPLIT ? 2 : 1;
constexpr int LINES_PER_THREAD = 8;  // producer thread t copies chunk t % 8 of lines t / 8 + 16 i

struct Work {
    int expert, row0, rows, n0;
};

__device__ __forceinline__ Work work_of(int tile_index, int m_tiles, int n_tiles, const int* row_tiles, const int* expert_token_offsets) {
    const Tile tile = raster(tile_index, m_tiles, n_tiles);
    const int2 entry = reinterpret_cast<const int2*>(row_tiles)[tile.m + 1];
    return {entry.x, entry.y, min(BM, expert_token_offsets[entry.x + 1] - entry.y), tile.n * TILE_COLUMNS};
}

extern "C" __global__ void __launch_bounds__(384, 1)
    ENTRY(const element* a, int64 lda, const __grid_constant__ TensorMap b0, const __grid_constant__ TensorMap b1,
          int64 first_column, int64 columns, int64 depth, const int* expert_token_indices, const int* expert_token_offsets,
          const int* row_tiles, element* first_layer, element* first_layer_grad, element* product,
          const element* stored_product, const weight_t* weights, const int* token_index_map, int64 k, float* partial_sums,
          int64 num_slots) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    const Barriers barriers(barrier_storage, 128 + 1);
    const unsigned shared = shared_address(dynamic_shared);
    const int N = static_cast<int>(columns), K = static_cast<int>(depth);
    const int n_tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS, m_tiles = row_tiles[0], tiles = m_tiles * n_tiles;
    const int steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;

    Ring ring;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
        const unsigned a_dst = shared + line * 128 + ((chunk ^ (line & 7)) * 16);
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Work work = work_of(t, m_tiles, n_tiles, row_tiles, expert_token_offsets);
            const element* a_rows[LINES_PER_THREAD];
#pragma unroll
            for (int i = 0; i < LINES_PER_THREAD; ++i) {  // past the expert's end its last row again, never stored
                const int row = work.row0 + min(line + 16 * i, work.rows - 1);
                a_rows[i] = a + static_cast<int64>(GATHER ? expert_token_indices[row] : row) * lda + chunk * 8;
            }
            const int n = static_cast<int>(first_column) + work.n0;
            for (int step = 0; step < steps; ++step) {
                const int segment = K_SEGMENTS == 2 && step >= steps_per_segment;
                const int k0 = (step - segment * steps_per_segment) * BK;
                const unsigned stage = ring.stage * STAGE_BYTES;
                const unsigned full = barriers.full + 8 * ring.stage;
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                if (threadIdx.x == 0) {
                    mbarrier_arrive_expect_tx(full, B_BYTES);
                    const unsigned b_dst = shared + stage + A_BYTES;
                    constexpr int BOX = B_K_CONTIGUOUS ? 128 : 64;
#pragma unroll
                    for (int box = 0; box < BN / BOX; ++box) {
                        const TensorMap* map = (SPLIT ? box * BOX >= 128 : segment) ? &b1 : &b0;
                        const int box_n = n + (SPLIT ? box * BOX % 128 : box * BOX);
                        if (B_K_CONTIGUOUS)
                            tensor_load_3d(b_dst + box * BOX * 128, map, k0, box_n, work.expert, full);
                        else
                            tensor_load_3d(b_dst + box * BOX * 128, map, box_n, k0, work.expert, full);
                    }
                }
                const unsigned bytes = k0 + chunk * 8 < K ? 16u : 0u;
#pragma unroll
                for (int i = 0; i < LINES_PER_THREAD; ++i)
                    cp_async_16(a_dst + stage + i * 16 * 128, a_rows[i] + segment * K + k0, bytes);
                cp_async_mbarrier_arrive(full);
                ring.advance();
            }
        }
        return;
    }

    setmaxnreg_inc<232>();
    const int warp_row = consumer_warp() * 16;
    using Staging = RowStaging<GROUPS>;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Work work = work_of(t, m_tiles, n_tiles, row_tiles, expert_token_offsets);
        const int64 layer_ld = GATED ? 2LL * N : N;
        float weight = 0.f;  // of row lane % 16 of this warp
        // a and b of two passes of a piece, loaded while the two before are worked on, the first during the main loop.
        Row8<element> a_loaded[2][2], b_loaded[2][2];
        auto load = [&](int two) {
            const int n = work.n0 + two / 2 * 64 + Staging::column_group() * 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(warp_row + Staging::row(two % 2 * 2 + i), work.rows - 1);
                const element* p = first_layer + (work.row0 + row) * layer_ld + n;
                a_loaded[two % 2][i].template load<ALIGNED>(p, N - n);
                if (GATED) b_loaded[two % 2][i].template load<ALIGNED>(p + N, N - n);
            }
        };
        if (EPILOGUE == ACTIVATE_BWD) {
            const int row = work.row0 + min(warp_row + static_cast<int>(threadIdx.x & 15), work.rows - 1);
            weight = weight_of_row(row, expert_token_indices[row], weights, token_index_map, static_cast<int>(k));
            load(0);
        }
        float acc[32][4];
        consume<true, B_K_CONTIGUOUS>(acc, steps, ring, barriers);

        // Four pieces of 64 accumulator columns; with SPLIT 32 of gate and the same 32 of up.
        float dots[Staging::PASSES] = {};
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
            const int n = work.n0 + piece * (SPLIT ? 32 : 64) + Staging::column_group() * 8;
            stage_piece<SPLIT>(acc, piece);
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                if (EPILOGUE == ACTIVATE_BWD && pass % 2 == 0 && piece * 2 + pass / 2 < 7) load(piece * 2 + pass / 2 + 1);
                const int row = warp_row + Staging::row(pass), valid = row < work.rows ? N - n : 0;
                const int64 r = work.row0 + row;
                float v[GROUPS][8];
                Staging::get(v, warp_staging(), pass);
                if (EPILOGUE == STORE) {
                    store_row8<ALIGNED>(product + r * N + n, v[0], valid);
                } else if (EPILOGUE == ACTIVATE) {
                    if (first_layer) {
                        store_row8<ALIGNED>(first_layer + r * layer_ld + n, v[0], valid);
                        if (SPLIT) store_row8<ALIGNED>(first_layer + r * layer_ld + N + n, v[SPLIT], valid);
                    }
                    float p[8];
#pragma unroll
                    for (int c = 0; c < 8; ++c) p[c] = activate<ACTIVATION>(v[0][c]).value * (SPLIT ? v[SPLIT][c] : 1.f);
                    if (product) store_row8<ALIGNED>(product + r * N + n, p, valid);
                } else {
                    const float row_weight = __shfl_sync(0xffffffffu, weight, Staging::row(pass));
                    float a_row[8], b_row[8], p[8], grad_a[8], grad_b[8];
                    a_loaded[pass / 2 % 2][pass % 2].unpack(a_row);
                    if (GATED) b_loaded[pass / 2 % 2][pass % 2].unpack(b_row);
                    if (stored_product) {
                        Row8<element> stored;
                        stored.template load<ALIGNED>(stored_product + r * N + n, valid);
                        stored.unpack(p);
                    }
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        const Activated s = activate<ACTIVATION>(a_row[c]);
                        const float b = GATED ? b_row[c] : 1.f;
                        if (!stored_product) p[c] = s.value * b;
                        dots[pass] = fmaf(v[0][c], p[c], dots[pass]);
                        const float grad = row_weight * v[0][c];
                        grad_a[c] = grad * b * s.derivative;
                        grad_b[c] = grad * s.value;
                        p[c] *= row_weight;
                    }
                    if (first_layer_grad) {
                        store_row8<ALIGNED>(first_layer_grad + r * layer_ld + n, grad_a, valid);
                        if (GATED) store_row8<ALIGNED>(first_layer_grad + r * layer_ld + N + n, grad_b, valid);
                    }
                    if (product) store_row8<ALIGNED>(product + r * N + n, p, valid);
                }
            }
        }
        if (EPILOGUE == ACTIVATE_BWD && partial_sums) {
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                float dot = dots[pass];
#pragma unroll
                for (int step = 1; step < 8; step <<= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                const int row = warp_row + Staging::row(pass);
                if (Staging::column_group() == 0 && row < work.rows)
                    partial_sums[work.n0 / TILE_COLUMNS * num_slots + work.row0 + row] = dot;
            }
        }
    }
}
