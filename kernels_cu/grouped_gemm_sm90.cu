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
//     issues B's boxes. full[s] expects 128 cp.async arrivals and thread 0's, with B's bytes.
//   warpgroups 1 and 2, consumers: 64 rows each, 4 wgmma m64n256k16 per stage, one group in flight; empty[s] expects
//     one arrival of each of the 8 warps. Their epilogue overlaps with the producer's loads of the next tile.
#include "ptx_sm90.cuh"
#include "row_staging.cuh"
#include "activation.cuh"

typedef ELEMENT element;
typedef WEIGHT weight_t;

enum { STORE = 0, ACTIVATE = 1, ACTIVATE_BWD = 2 };

constexpr bool SPLIT = EPILOGUE == ACTIVATE && GATED;
constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, TILE_COLUMNS = SPLIT ? 128 : 256, GROUPS = SPLIT ? 2 : 1;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int LINES_PER_THREAD = 8;  // producer thread t copies chunk t % 8 of lines t / 8 + 16 i
constexpr bool ALIGNED = true;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// Position in the ring of stages: the buffer, and the parity of its barriers' current phase.
struct Ring {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// wgmma descriptor of a 128-byte-swizzled operand: 8-row (or 8-k) groups 1024 bytes apart, and for an N-contiguous
// operand its 64-column blocks 8192 bytes apart.
__device__ __forceinline__ uint64 descriptor(unsigned address) {
    return (address & 0x3ffff) >> 4 | uint64(8192 >> 4) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

struct Work {
    int expert, row0, rows, n0;
};

__device__ __forceinline__ Work work_of(int tile_index, int m_tiles, int n_tiles, const int* row_tiles, const int* expert_token_offsets) {
    const Tile tile = raster(tile_index, m_tiles, n_tiles);
    const int2 entry = reinterpret_cast<const int2*>(row_tiles)[tile.m + 1];
    return {entry.x, entry.y, min(BM, expert_token_offsets[entry.x + 1] - entry.y), tile.n * TILE_COLUMNS};
}

// The router weight of expert row r: the slot of its token that points back at r.
__device__ __forceinline__ float weight_of_row(int r, int token, const weight_t* weights, const int* token_index_map, int k) {
    const int64 first = static_cast<int64>(token) * k;
    int slot = 0;
    for (int j = 0; j < k; ++j)
        if (token_index_map[first + j] == r) slot = j;
    return to_float(weights[first + slot]);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    ENTRY(const element* a, int64 lda, const __grid_constant__ TensorMap b0, const __grid_constant__ TensorMap b1,
          int64 first_column, int64 columns, int64 depth, const int* expert_token_indices, const int* expert_token_offsets,
          const int* row_tiles, element* first_layer, element* first_layer_grad, element* product,
          const element* stored_product, const weight_t* weights, const int* token_index_map, int64 k, float* partial_sums,
          int64 num_slots) {
    __shared__ uint64 barriers[2 * STAGES];
    const unsigned shared = shared_address(dynamic_shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int N = static_cast<int>(columns), K = static_cast<int>(depth);
    const int n_tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS, m_tiles = row_tiles[0], tiles = m_tiles * n_tiles;
    const int steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 128 + 1);
            mbarrier_init(empty + 8 * s, 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

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
                wait(empty + 8 * ring.stage, ring.parity ^ 1);
                if (threadIdx.x == 0) {
                    mbarrier_arrive_expect_tx(full + 8 * ring.stage, B_BYTES);
                    const unsigned b_dst = shared + stage + A_BYTES, barrier = full + 8 * ring.stage;
                    constexpr int BOX = B_K_CONTIGUOUS ? 128 : 64;
#pragma unroll
                    for (int box = 0; box < BN / BOX; ++box) {
                        const TensorMap* map = (SPLIT ? box * BOX >= 128 : segment) ? &b1 : &b0;
                        const int box_n = n + (SPLIT ? box * BOX % 128 : box * BOX);
                        if (B_K_CONTIGUOUS)
                            tensor_load_3d(b_dst + box * BOX * 128, map, k0, box_n, work.expert, barrier);
                        else
                            tensor_load_3d(b_dst + box * BOX * 128, map, box_n, k0, work.expert, barrier);
                    }
                }
                const unsigned bytes = k0 + chunk * 8 < K ? 16u : 0u;
#pragma unroll
                for (int i = 0; i < LINES_PER_THREAD; ++i)
                    cp_async_16(a_dst + stage + i * 16 * 128, a_rows[i] + segment * K + k0, bytes);
                cp_async_mbarrier_arrive(full + 8 * ring.stage);
                ring.advance();
            }
        }
        return;
    }

    setmaxnreg_inc<232>();
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x & 31, warp_row = warp * 16;
    float* staged = reinterpret_cast<float*>(dynamic_shared + STAGES * STAGE_BYTES) + warp * STAGED_FLOATS;
    using Staging = RowStaging<GROUPS>;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Work work = work_of(t, m_tiles, n_tiles, row_tiles, expert_token_offsets);
        float weight = 0.f;  // of row lane % 16 of this warp
        if (EPILOGUE == ACTIVATE_BWD) {
            const int row = work.row0 + min(warp_row + (lane & 15), work.rows - 1);
            weight = weight_of_row(row, expert_token_indices[row], weights, token_index_map, static_cast<int>(k));
        }
        float acc[32][4];
        int previous = 0;
        for (int step = 0; step < steps; ++step) {
            wait(full + 8 * ring.stage, ring.parity);
            const uint64 a_desc = descriptor(shared + ring.stage * STAGE_BYTES + (warp / 4) * 64 * 128);
            const uint64 b_desc = descriptor(shared + ring.stage * STAGE_BYTES + A_BYTES);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BK / 16; ++kk)
                WGMMA<!B_K_CONTIGUOUS>(acc, a_desc + (kk * 32 >> 4), b_desc + (kk * (B_K_CONTIGUOUS ? 32 : 2048) >> 4), step + kk);
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                if (lane == 0) mbarrier_arrive(empty + 8 * previous);
            }
            previous = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        if (lane == 0) mbarrier_arrive(empty + 8 * previous);

        // Four pieces of 64 accumulator columns; with SPLIT 32 of gate and the same 32 of up.
        const int64 layer_ld = GATED ? 2LL * N : N;
        float dots[Staging::PASSES] = {};
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
            const int n = work.n0 + piece * (SPLIT ? 32 : 64) + Staging::column_group() * 8;
            Row8<element> a_loaded[Staging::PASSES], b_loaded[Staging::PASSES];
            if (EPILOGUE == ACTIVATE_BWD) {
#pragma unroll
                for (int pass = 0; pass < Staging::PASSES; ++pass) {
                    const int row = min(warp_row + Staging::row(pass), work.rows - 1);
                    const element* p = first_layer + (work.row0 + row) * layer_ld + n;
                    a_loaded[pass].template load<ALIGNED>(p, N - n);
                    if (GATED) b_loaded[pass].template load<ALIGNED>(p + N, N - n);
                }
            }
            float tile[8][4];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int s = 0; s < 4; ++s) tile[j][s] = acc[SPLIT ? (j / 4) * 16 + piece * 4 + j % 4 : piece * 8 + j][s];
            Staging::put(staged, tile);
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                const int row = warp_row + Staging::row(pass), valid = row < work.rows ? N - n : 0;
                const int64 r = work.row0 + row;
                float v[GROUPS][8];
                Staging::get(v, staged, pass);
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
                    a_loaded[pass].unpack(a_row);
                    if (GATED) b_loaded[pass].unpack(b_row);
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
