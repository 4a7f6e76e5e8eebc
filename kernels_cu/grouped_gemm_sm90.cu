// Grouped GEMMs over the rows of each expert, Hopper tier (sm_90a, bf16 and fp16, sizes that are multiples of 8): up_fwd and
// down_bwd of grouped_gemm_sm80.cu, with its arguments and results, on wgmma and the bulk copy engine.
//
//   b0, b1          tensor maps of the weight, 3-D: (k, n, expert) with B_K_CONTIGUOUS, else (n, k, expert), boxes of
//                   64 x 128 x 1 or 64 x 64 x 1 elements, 128-byte swizzle; gate and up
//   the rest        as in grouped_gemm_sm80.cu, except
//   partial_sums    (column tiles, num_slots) fp32, one column tile being 256 columns (128 of a gated ACTIVATE)
//   claims          (1,) int32, zeroed: blocks claim their tiles; null: each takes every gridDim.x-th
//
// Launch: a persistent grid of at most one block per multiprocessor, 384 threads, dynamic shared memory 224 KiB.
// Tile: 128 rows x 256 columns (of them 128 gate beside 128 up), K in steps of 64, STAGES = 3 buffers of 48 KiB, the
// finished tile's 64 KiB, and 16 KiB for the a and b that ACTIVATE_BWD reads, two rows per warp.
//   warpgroup 0, producer: its 128 threads gather A's rows by cp.async into the 128-byte swizzle; thread 0 also issues B's
//     boxes, announces their bytes, claims tiles and says which comes next: full[s] expects 129 arrivals, and who has waited
//     for a tile's last one may read on.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh.
#include "epilogue_sm90.cuh"

typedef EPILOGUE Epilogue;
constexpr int TILE_COLUMNS = Epilogue::TILE_COLUMNS;
constexpr bool SPLIT = TILE_COLUMNS == 128;  // gate beside up
constexpr int LINES_PER_THREAD = 8;  // producer thread t copies chunk t % 8 of lines t / 8 + 16 i

// An expert's row tiles, in even groups of about 16, by all column tiles: what runs at one time is near a square, which reads
// the fewest bytes, and the weights of an expert with few tokens come from memory once.
struct Order {
    unsigned n_tiles;
    __device__ __forceinline__ int listed(int t) const { return unsigned(t) / n_tiles; }
    __device__ __forceinline__ Place place(int t, int2 entry, int first, int end) const {
        constexpr unsigned GROUP = 16;
        const unsigned tiles = max((end - first + BM - 1) / BM, 1), index = unsigned(entry.y - first) / BM;
        const unsigned groups = max((tiles + GROUP / 2) / GROUP, 1u), height = (tiles + groups - 1) / groups;
        const unsigned start = index / height * height, rows = min(height, tiles - start);
        const unsigned within = t - (listed(t) - index + start) * n_tiles;
        return {entry.x, first + static_cast<int>(start + within % rows) * BM, static_cast<int>(within / rows)};
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    ENTRY(const element* a, int64 lda, const __grid_constant__ TensorMap b0, const __grid_constant__ TensorMap b1,
          int64 columns, int64 depth, const int* expert_token_indices, const int* expert_token_offsets,
          const int* row_tiles, element* first_layer, element* first_layer_grad, element* product,
          const element* stored_product, const float* row_weights, float* partial_sums, int64 num_slots, int* claims) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    __shared__ Found found[FOUND];  // by the number of the tile, as
    __shared__ int claimed[FOUND];  // what thread 0 claims while it fills its stages
    const Barriers barriers(barrier_storage, 128 + 1);
    const unsigned shared = shared_address(dynamic_shared);
    const int N = static_cast<int>(columns), K = static_cast<int>(depth);
    const int n_tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = row_tiles[0] * n_tiles;
    const int steps = (K + BK - 1) / BK;

    if (threadIdx.x < 128) {
        Ring ring;
        setmaxnreg_dec<72>();
        Schedule<Order> schedule({unsigned(n_tiles)}, row_tiles, expert_token_offsets, tiles);
        if (threadIdx.x == 0) found[0] = schedule.own;
        __syncthreads();
        const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
        const unsigned a_dst = shared + line * 128 + ((chunk ^ (line & 7)) * 16);
        int tokens[LINES_PER_THREAD];
        auto load_tokens = [&](const Found& tile) {  // past the expert's end its last row again, never stored
#pragma unroll
            for (int i = 0; i < LINES_PER_THREAD; ++i)
                tokens[i] = expert_token_indices[tile.place.row + min(line + 16 * i, tile.rows - 1)];
        };
        if (schedule.valid()) load_tokens(schedule.own);
        for (int number = 0; schedule.valid(); ++number) {
            const int claim = threadIdx.x == 0 ? schedule.claim(claims) : 0;
            const element* a_rows[LINES_PER_THREAD];
#pragma unroll
            for (int i = 0; i < LINES_PER_THREAD; ++i) a_rows[i] = a + static_cast<int64>(tokens[i]) * lda + chunk * 8;
            const Place place = schedule.own.place;
            const int n0 = place.n * TILE_COLUMNS;
            schedule.prefetch();
            for (int step = 0; step < steps; ++step) {
                const int k0 = step * BK;
                const unsigned stage = ring.stage * STAGE_BYTES;
                const unsigned full = barriers.full + 8 * ring.stage, bytes = k0 + chunk * 8 < K ? 16 : 0;
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                if (threadIdx.x == 0) {
                    if (step == steps - 1) claimed[number % FOUND] = claim, found[(number + 1) % FOUND] = schedule.next();
                    mbarrier_arrive_expect_tx(full, B_BYTES);
                    const unsigned b_dst = shared + stage + A_BYTES;
                    constexpr int BOX = B_K_CONTIGUOUS ? 128 : 64;
#pragma unroll
                    for (int box = 0; box < BN / BOX; ++box) {
                        const TensorMap* map = SPLIT && box * BOX >= 128 ? &b1 : &b0;
                        const int box_n = n0 + (SPLIT ? box * BOX % 128 : box * BOX);
                        if (B_K_CONTIGUOUS)
                            tensor_load_3d(b_dst + box * BOX * 128, map, k0, box_n, place.expert, full);
                        else
                            tensor_load_3d(b_dst + box * BOX * 128, map, box_n, k0, place.expert, full);
                    }
                }
#pragma unroll
                for (int i = 0; i < LINES_PER_THREAD; ++i) cp_async_16(a_dst + stage + i * 16 * 128, a_rows[i], bytes);
                cp_async_mbarrier_arrive(full);
#pragma unroll
                for (int i = 0; i < LINES_PER_THREAD; ++i) a_rows[i] += BK;  // here, as consumers wait for what follows a wait
                ring.advance();
                if (step == min(2, steps - 1)) {
                    const Found next = schedule.next();
                    if (next.rows > 0) load_tokens(next);
                }
            }
            named_barrier(1, 128);
            schedule.advance(claimed[number % FOUND]);
        }
        return;
    }

    setmaxnreg_inc<216>();
    __syncthreads();
    const int warp_row = consumer_warp() * 16;
    Ring ring;
    const Operands operands = {N, first_layer, first_layer_grad, product, stored_product, row_weights, partial_sums, num_slots};
    Epilogue epilogue(operands);
    for (int number = 0;; ++number) {
        const int rows = found[number % FOUND].rows;
        const bool last = rows == 0, active = warp_row / 64 * 64 < rows;  // of the warpgroup
        float acc[32][4];
        consume<true, B_K_CONTIGUOUS>(acc, last ? 0 : steps, active, ring, barriers, epilogue);
        if (last) return;
        if (active) epilogue.finished.put(acc);
        const Found tile = found[number % FOUND];
        epilogue.begin(tile.place.row + warp_row, min(16, tile.rows - warp_row), tile.place.n * TILE_COLUMNS);
    }
}
