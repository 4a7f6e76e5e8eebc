// Weight gradients, Hopper tier (sm_90a, bf16 and fp16, sizes that are multiples of 8): the steps and results of
// grouped_wgrad_sm80.cu, on wgmma.
//
// Launch: a persistent grid of at most one block per multiprocessor, THREADS threads, dynamic shared memory as below.
// Tile: BM = 128 (M) x BN = 256 (N) of one expert's gradient, K = its rows, or a part of them, in steps of BK = 64. Shared
// memory: STAGES = 3 buffers of STAGE_BYTES = 48 KiB, TILE_BYTES = 64 KiB of the finished tile, and 4 KiB of SPARE_BYTES for
// tokens.
//   warpgroup 0, producer: gathers 64 token rows per stage by cp.async, a line of 128 bytes per row and block of 64
//     columns; thread 0 fetches the other operand's boxes. (By cp.async alone, 24 copies per thread and stage, the copies
//     bound the kernel.) The last stage of an expert with fewer rows takes both by cp.async, with zeros for rows of
//     others: those may hold anything. full[s] expects 128 cp.async arrivals and thread 0's.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh; both operands are MN-contiguous.
#include "gemm_core_sm90.cuh"

#if !defined(GATHER_P) || !defined(GATHER_Q) || !defined(ACCUMULATE) || !defined(OUT) || !defined(SPLIT_K)
#error "GATHER_P, GATHER_Q, ACCUMULATE, OUT and SPLIT_K are given by loader.gemm_variant"
#endif
static_assert(GATHER_P != GATHER_Q, "one operand is gathered, the other comes through a tensor map");
static_assert(!(ACCUMULATE && SPLIT_K), "wgrad_parts.cu adds the sums of parts");

struct GroupedWgradParams {
    TensorMap routed;                 // the operand that is not gathered, (columns, R, 1) element, in, boxes of 64 x 64 x 1
    const element *p, *q;             // (L or R, ldp / ldq) element, in; gathered by token with GATHER_P / GATHER_Q, else by row
    const int* expert_token_indices;  // (L*k,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    OUT *out0, *out1;                 // (M, N) of each expert, OUT, out: gate's, and up's if gated. With SPLIT_K fp32 sums of part
                                      // j of expert e, at (e * parts + j) * expert_stride, which wgrad_parts.cu adds up
    const int* experts_by_load;       // (E,) int32, in: the order in which experts are worked on, so that the last tiles are
                                      // short (qwen30b's down_wgrad with skewed routing 481 -> 599 TFLOP/s)
    int64 ldp, ldq;                   // elements from row to row
    int64 expert_stride, ldo;         // elements of out0 and out1 from expert to expert, and from row to row
    int p_half, q_half;               // elements from the gate's columns to the up's in P or Q, 0 in the other operand
    int rows, columns;                // M, N
    int num_experts, halves;          // E; 2 if gated, else 1
    int splits;                        // with SPLIT_K of an expert's rows, of which a tile takes one; else 1
};

struct Work {
    int to, half, m0, n0, first, last;  // to: its place in out0 and out1, in units of expert_stride
};

struct Tiles {
    const int m_tiles, n_tiles, halves, parts;
    const int* const expert_token_offsets;
    const int* const experts_by_load;

    __device__ __forceinline__ Work work(int index) const {
        const int per_expert = m_tiles * n_tiles * halves, of = index / per_expert, within = index % per_expert;
        const Tile tile = raster(within % (m_tiles * n_tiles), m_tiles, n_tiles);
        const int expert = experts_by_load[SPLIT_K ? of / parts : of];
        int first = expert_token_offsets[expert], last = expert_token_offsets[expert + 1], to = expert;
#if SPLIT_K
        const unsigned part = of % parts, rows = last - first, of_a_part = ((rows + BK - 1) / BK + parts - 1) / parts * BK;
        to = expert * parts + part;
        first += min(part * of_a_part, rows);
        last = min(unsigned(first) + of_a_part, unsigned(last));
#endif
        return {to, within / (m_tiles * n_tiles), tile.m * BM, tile.n * BN, first, last};
    }
};

// A warp's 16 rows of a finished tile, from row m on, stored behind the next tile's products.
struct StoredRows : EpilogueBase {
    const int M, N;
    const int64 ldo;
    element* out;
    bool inside;
    __device__ __forceinline__ StoredRows(int M, int N, int64 ldo) : M(M), N(N), ldo(ldo) {}
    __device__ __forceinline__ void finish(const float (&acc)[32][4], element* expert, int m, int n0) {
        finished.put(acc);
        const int n = n0 + (threadIdx.x & 31) * 8;
        rows = min(16, M - m), done = 0, inside = n < N;
        out = expert + m * ldo + n;
    }
    __device__ __forceinline__ void next() {
        const Row8<element> v = finished.get(done, threadIdx.x & 31);
        if (inside) v.store(out);
        out += ldo;
        ++done;
    }
};

__device__ __forceinline__ float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <class Half>
__device__ __forceinline__ float4 load_four(const Half* p) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    auto element_of = [](unsigned bits) { return to_float(Half{static_cast<unsigned short>(bits)}); };
    return make_float4(element_of(v.x), element_of(v.x >> 16), element_of(v.y), element_of(v.y >> 16));
}
__device__ __forceinline__ void store_four(float* p, float4 v) {
    store_global_vector(p, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)));
}
template <class Half>
__device__ __forceinline__ void store_four(Half* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2(Half(), v.x, v.y), pack2(Half(), v.z, v.w));
}

// Or unrounded, with ACCUMULATE added to what is there, at once: a tile of floats does not fit behind the stages, and elements
// would be rounded before they are added. By halves of the columns, through shared memory, 16-byte chunk c of row r at
// c ^ 2 (r & 3), so that a warp reads and writes 128 columns of a row at a time. (DeepSeek-V3's down_wgrad: 12 ms, 39 from the
// accumulators, 32 bytes of 8 rows at a time; 7 without adding.) The producer fills the stages meanwhile.
struct UnroundedRows : EpilogueBase {
    static constexpr int HALF = BN / 2;
    static_assert(8 * 16 * HALF * sizeof(float) <= TILE_BYTES, "8 warps stage 16 rows each behind the stages");
    const int M, N;
    const int64 ldo;
    float* const staged;
    __device__ __forceinline__ UnroundedRows(int M, int N, int64 ldo)
        : M(M), N(N), ldo(ldo),
          staged(reinterpret_cast<float*>(dynamic_shared + STAGES * STAGE_BYTES) + consumer_warp() * 16 * HALF) {}
    __device__ __forceinline__ void finish(const float (&acc)[32][4], OUT* expert, int m, int n0) const {
        const int lane = threadIdx.x & 31, valid = min(16, M - m), n = n0 + lane * 4;
        float* places[4];  // of this lane's two columns of its row in tile j of mma.m16n8k16, as j % 4
#pragma unroll
        for (int j = 0; j < 4; ++j) places[j] = staged + lane / 4 * HALF + (j ^ (lane / 4 & 3)) * 8 + (lane & 3) * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    *reinterpret_cast<float2*>(places[j % 4] + j / 4 * 32 + s * 8 * HALF) =
                        make_float2(acc[16 * half + j][2 * s], acc[16 * half + j][2 * s + 1]);
            __syncwarp();
            if (valid <= 0 || n + half * HALF >= N) continue;
            OUT* to = expert + m * ldo + n + half * HALF;
            const OUT* from = to;
            float4 before[16];  // asked for together; past the last row that one again
#pragma unroll
            for (int r = 0; ACCUMULATE && r < 16; ++r) {
                before[r] = load_four(from);
                if (r + 1 < valid) from += ldo;
            }
#pragma unroll
            for (int r = 0; r < 16; ++r, to += ldo) {
                float4 v = *reinterpret_cast<const float4*>(staged + r * HALF + (lane ^ 2 * (r & 3)) * 4);
                if (ACCUMULATE) v = make_float4(before[r].x + v.x, before[r].y + v.y, before[r].z + v.z, before[r].w + v.w);
                if (r < valid) store_four(to, v);
            }
        }
    }
    __device__ __forceinline__ void next() {}  // nothing is left for the next tile's products
};

#if ACCUMULATE || SPLIT_K
typedef UnroundedRows Epilogue;
#else
typedef StoredRows Epilogue;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ENTRY(const __grid_constant__ GroupedWgradParams p) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    const Barriers<1> barriers(barrier_storage, 128 + 1);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const int M = p.rows, N = p.columns;
    const Tiles order = {(M + BM - 1) / BM,      (N + BN - 1) / BN, p.halves, p.splits,
                         p.expert_token_offsets, p.experts_by_load};
    const int tiles = p.num_experts * p.halves * p.splits * order.m_tiles * order.n_tiles;

    auto tile = [&](int t) { return t < tiles ? order.work(t) : Work{}; };

    if (threadIdx.x < 128) {
        Ring ring;
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        constexpr int ROWS = BK / 16;  // thread t copies chunk t % 8 of token rows t / 8 + 16 i, for every block of columns
        const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
        const unsigned dst = shared + line * 128 + ((chunk ^ (line & 7)) * 16);
        // Tokens come to shared memory TOKENS at a time, one such block ahead: loaded by each thread for itself, even stages ahead,
        // they kept the producer waiting. That of row line + 16 i of 64 is at 4 line + i, so that a thread's are in 16 bytes.
        static_assert(ROWS == 4, "a thread's tokens of a stage are one int4");
        constexpr int TOKENS = 512;
        static_assert(2 * TOKENS * sizeof(int) <= SPARE_BYTES, "two blocks of tokens");
        int4* token_blocks = reinterpret_cast<int4*>(dynamic_shared + STAGES * STAGE_BYTES + TILE_BYTES);
        int block_parity = 0;
        constexpr int COLUMNS = GATHER_P ? BM : BN;  // of the gathered operand
        const unsigned gathered_to = GATHER_P ? 0 : A_BYTES, routed_to = GATHER_P ? A_BYTES : 0;
        const unsigned ld_bytes = static_cast<unsigned>((GATHER_P ? p.ldp : p.ldq) * sizeof(element));
        const int extent = GATHER_P ? M : N, routed_extent = GATHER_P ? N : M;
        int mine[TOKENS / 128];
        auto load_tokens = [&](int first, int last) {
#pragma unroll
            for (int i = 0; i < TOKENS / 128; ++i) {
                const int row = first + threadIdx.x + 128 * i;
                mine[i] = row < last ? p.expert_token_indices[row] : 0;
            }
        };
        Work work = tile(blockIdx.x);
        load_tokens(work.first, work.last);
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Work next = tile(t + gridDim.x);
            const int column0 = GATHER_P ? work.m0 : work.n0, routed_column0 = GATHER_P ? work.n0 : work.m0;
            const bool inside = column0 + COLUMNS <= extent;
            const int routed_half = GATHER_P ? p.q_half : p.p_half;
            const int64 routed_ld = GATHER_P ? p.ldq : p.ldp;
            const element* gathered = (GATHER_P ? p.p : p.q) + work.half * (GATHER_P ? p.p_half : p.q_half) + column0 + chunk * 8;
            const element* others = (GATHER_P ? p.q : p.p) + work.half * routed_half + routed_column0 + chunk * 8;
            auto fill = [&](const int4 of_rows, int first) {
                const int tokens[ROWS] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
                const unsigned stage = ring.stage * STAGE_BYTES, full = barriers.full + 8 * ring.stage;
                const char* token_rows[ROWS];  // found before the wait: the copies after it are what the consumers wait for
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
                    token_rows[i] = advanced(reinterpret_cast<const char*>(gathered), tokens[i], ld_bytes);
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                const bool whole = first + BK <= work.last;
                if (threadIdx.x == 0) {
                    constexpr int BLOCKS = (BM + BN - COLUMNS) / 64;
                    mbarrier_arrive_expect_tx(full, whole ? BLOCKS * 8192 : 0);
                    if (whole)
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
                            tensor_load_3d(shared + stage + routed_to + block * 8192, &p.routed,
                                           work.half * routed_half + routed_column0 + block * 64, first, 0, full);
                }
                if (whole && inside) {
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int block = 0; block < COLUMNS / 64; ++block)
                            cp_async_16(dst + stage + gathered_to + block * 8192 + i * 2048, token_rows[i] + block * 128, 16);
                } else {
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        const int row = first + line + 16 * i;
                        const element* from = reinterpret_cast<const element*>(token_rows[i]);
                        for (int block = 0; block < COLUMNS; block += 64)
                            cp_async_16(dst + stage + gathered_to + block * 128 + i * 2048, from + block,
                                        row < work.last && column0 + chunk * 8 + block < extent ? 16 : 0);
                        if (whole) continue;
                        for (int block = 0; block < BM + BN - COLUMNS; block += 64)
                            cp_async_16(dst + stage + routed_to + block * 128 + i * 2048, others + row * routed_ld + block,
                                        row < work.last && routed_column0 + chunk * 8 + block < routed_extent ? 16 : 0);
                    }
                }
                cp_async_mbarrier_arrive(full);
                ring.advance();
            };
            if (work.first == work.last) load_tokens(next.first, next.last);
            for (int block = work.first; block < work.last; block += TOKENS) {
                int4* tokens = token_blocks + block_parity * (TOKENS / ROWS);
                block_parity ^= 1;
                int* const place = reinterpret_cast<int*>(tokens) + threadIdx.x / 64 * 64 + (threadIdx.x & 15) * 4;
#pragma unroll
                for (int i = 0; i < TOKENS / 128; ++i) place[128 * i + threadIdx.x / 16 % 4] = mine[i];
                named_barrier(1, 128);
                const bool more = block + TOKENS < work.last;
                load_tokens(more ? block + TOKENS : next.first, more ? work.last : next.last);
                for (int first = block; first < min(block + TOKENS, work.last); first += BK)
                    fill(tokens[(first - block) / ROWS + line], first);
            }
            work = next;
        }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warp_row = consumer_warp() * 16;
    Ring ring;
    Epilogue epilogue(M, N, p.ldo);
    Work work = tile(blockIdx.x), next;
    for (int t = blockIdx.x;; t += gridDim.x, work = next) {
        const bool last = t >= tiles;
        next = tile(t + gridDim.x);
        OUT* out = (work.half ? p.out1 : p.out0) + work.to * p.expert_stride;
        const int tokens = work.last - work.first;
        if (!last && tokens == 0) {
            const float zeros[8] = {};
            for (int i = threadIdx.x - 128; !ACCUMULATE && i < BM * BN / 8; i += 256) {
                const int m = work.m0 + i / (BN / 8), n = work.n0 + i % (BN / 8) * 8;
                if (m < M && n < N) store_vector8(out + m * p.ldo + n, zeros);
            }
            continue;
        }
        float acc[32][4];
        consume<false, false>(acc, static_cast<int>(uniform((tokens + BK - 1) / BK)), true, ring, barriers, epilogue);
        if (last) return;
        epilogue.finish(acc, out, work.m0 + warp_row, work.n0);
    }
}
