// Frozen weights in mxfp4 as e4m3 with scales that are powers of two, for products that multiply e4m3. Each group of an
// expert's rows, all or gate's and up's, has one scale: 2^(top - 133), top being the largest scale byte of its blocks, at least
// 7 and not counting NaN. A number then is e2m1 * 2^(6 + s - top), which e4m3 holds exactly for s >= top - 14. Others round to
// the nearest, ties to even, so that they lose at most 2^-10 of the scale. Blocks with a NaN as scale become NaN.
//
// mxfp4_tops: the largest bytes of PARTS parts of each group. Grid (PARTS, E * groups), THREADS threads.
//
// mxfp4_to_e4m3: in the order of the packed elements, as decode.cu. Grid (chunks of THREADS * STEPS * 16 elements, E). Each
// lane has 16 elements per step, which share a scale.
//
// mxfp4_to_e4m3_transposed: (E, K, N). Grid (tiles of TILE_ROWS x TILE_COLUMNS of an expert, E), THREADS threads.
//
// A block does nothing if its expert has no tokens.
#include "fp8.cuh"

static_assert(THREADS == 256 && PARTS == 16, "a tile's threads; a group's parts are 16 bytes");
constexpr int LANE_ELEMENTS = 16, CHUNK = THREADS * STEPS * LANE_ELEMENTS;
constexpr unsigned NAN_BYTE = 255, LEAST_TOP = 7;

struct DecodeE4m3Params {
    const unsigned char* data;        // (E, size / 2), in: two codes of e2m1 in a byte, the first one low
    const unsigned char* scales;      // (E, size / 32) e8m0, in
    unsigned char* tops;              // (E, groups, PARTS): out of mxfp4_tops; into the others
    const int* expert_token_offsets;  // (E+1,) int32, in
    unsigned char* out;               // (E, size) e4m3, out; 16-byte aligned, as data and scales are
    float* out_scales;                // (E, scales_ld) fp32, out: the groups' scales, the last one repeated
    int64 size;                       // elements of an expert, N * K, less than 2^31
    int N, K;                         // multiples of 32
    int groups, scales_ld;            // 1, or 2: half of the N rows each
};

__device__ __forceinline__ bool has_no_tokens(const DecodeE4m3Params& p, int expert) {
    return p.expert_token_offsets && p.expert_token_offsets[expert] == p.expert_token_offsets[expert + 1];
}

// The largest byte of four, but 255.
__device__ __forceinline__ unsigned largest_byte(unsigned found, unsigned word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned byte = word >> 8 * i & 255u;
        if (byte != NAN_BYTE) found = max(found, byte);
    }
    return found;
}

__device__ __forceinline__ void find_tops(const DecodeE4m3Params& p) {
    __shared__ unsigned of_warps[THREADS / 32];
    const int expert = blockIdx.y / p.groups;
    if (has_no_tokens(p, expert)) return;
    const int vectors = static_cast<int>(p.size / p.groups / 32 / 16);  // of the group
    const unsigned char* from = p.scales + blockIdx.y * (p.size / p.groups / 32);
    unsigned found = 0;
#pragma unroll 4
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < vectors; i += PARTS * THREADS) {
        const uint4 v = load_global_16(from + i * 16LL);
        found = largest_byte(largest_byte(largest_byte(largest_byte(found, v.x), v.y), v.z), v.w);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) found = max(found, __shfl_xor_sync(0xffffffffu, found, step));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS / 32; ++i) found = max(found, of_warps[i]);
    p.tops[blockIdx.y * PARTS + blockIdx.x] = static_cast<unsigned char>(found);
}

// The e4m3 of the eight magnitudes of e2m1, for each group and scale byte.
struct Tables {
    uint2 of[2][256];

    // Also stores the expert's scales, by one block of it.
    __device__ __forceinline__ void make(const DecodeE4m3Params& p, int expert) {
        for (int group = 0; group < p.groups; ++group) {
            unsigned top = max(unsigned(p.tops[(expert * p.groups + group) * PARTS + threadIdx.x % PARTS]), LEAST_TOP);
#pragma unroll
            for (int step = PARTS / 2; step > 0; step >>= 1) top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
            const unsigned s = threadIdx.x;
            // 2^(6 + s - top), or 0 where that is 0 in e4m3
            const float unit = __uint_as_float(s + 60 < top ? 0u : s + 133 - top << 23);
            uint2 found = make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu);
            if (s != NAN_BYTE) {
                found.x = cvt_e4m3x2(0.f, .5f * unit) | unsigned(cvt_e4m3x2(unit, 1.5f * unit)) << 16;
                found.y = cvt_e4m3x2(2.f * unit, 3.f * unit) | unsigned(cvt_e4m3x2(4.f * unit, 6.f * unit)) << 16;
            }
            of[group][s] = found;
            const bool is_mine = threadIdx.x == group || (threadIdx.x > group && group == p.groups - 1);
            if (blockIdx.x == 0 && is_mine && threadIdx.x < p.scales_ld)
                p.out_scales[expert * p.scales_ld + threadIdx.x] = __uint_as_float(top - 6 << 23);
        }
        __syncthreads();
    }
};

// Four codes, in the low half of `codes`, as e4m3.
__device__ __forceinline__ unsigned e4m3_of(unsigned codes, uint2 magnitudes) {
    const unsigned signs = permute_bytes(0x80808080u, 0x80808080u, codes) << 1;  // in the first bits of bytes
    return __byte_perm(magnitudes.x, magnitudes.y, codes & 0x7777u) | (signs & 0x80808080u);
}
__device__ __forceinline__ uint4 e4m3_of(uint2 codes, uint2 magnitudes) {
    return make_uint4(e4m3_of(codes.x, magnitudes), e4m3_of(codes.x >> 16, magnitudes), e4m3_of(codes.y, magnitudes),
                      e4m3_of(codes.y >> 16, magnitudes));
}

__device__ __forceinline__ void decode_in_order(const DecodeE4m3Params& p) {
    __shared__ Tables tables;
    const int expert = blockIdx.y;
    if (has_no_tokens(p, expert)) return;
    constexpr int STEP = 32 * LANE_ELEMENTS;
    const unsigned first = blockIdx.x * unsigned(CHUNK) + threadIdx.x / 32 * (STEPS * STEP) + threadIdx.x % 32 * LANE_ELEMENTS;
    const unsigned size = static_cast<unsigned>(p.size), second_group = p.groups == 2 ? size / 2 : size;
    const unsigned char* data = p.data + (expert * p.size + first) / 2;
    const unsigned char* scales = p.scales + (expert * p.size + first) / 32;
    unsigned char* out = p.out + expert * p.size + first;
    uint2 codes[STEPS];
    unsigned bytes[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (first + i * STEP < size) {
            codes[i] = load_once_8(data + i * (STEP / 2));
            bytes[i] = scales[i * (STEP / 32)];
        }
    tables.make(p, expert);
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (first + i * STEP < size)
            store_global_16(out + i * STEP, e4m3_of(codes[i], tables.of[first + i * STEP >= second_group][bytes[i]]));
}

// Transposes four words of four bytes: word i becomes byte i of each word.
__device__ __forceinline__ void transpose_bytes(unsigned& v0, unsigned& v1, unsigned& v2, unsigned& v3) {
    const unsigned a = __byte_perm(v0, v1, 0x5140), b = __byte_perm(v0, v1, 0x7362);
    const unsigned c = __byte_perm(v2, v3, 0x5140), d = __byte_perm(v2, v3, 0x7362);
    v0 = __byte_perm(a, c, 0x5410), v1 = __byte_perm(a, c, 0x7632);
    v2 = __byte_perm(b, d, 0x5410), v3 = __byte_perm(b, d, 0x7632);
}

__device__ __forceinline__ void decode_transposed(const DecodeE4m3Params& p) {
    // A thread has blocks of four rows and 16 columns: eight lanes span half a tile's columns. In shared memory a column has
    // TILE_ROWS bytes. The swizzle of its words keeps the stores and the loads free of bank conflicts.
    constexpr int ROWS = 4, BLOCKS = TILE_ROWS * TILE_COLUMNS / (ROWS * LANE_ELEMENTS) / THREADS, LANES = 8;
    constexpr int COLUMN_WORDS = TILE_ROWS / 4, BLOCK_COLUMNS = LANES * LANE_ELEMENTS, STORED_COLUMNS = THREADS / LANES;
    static_assert(TILE_COLUMNS == BLOCKS * BLOCK_COLUMNS && TILE_ROWS == THREADS / LANES * ROWS, "the tile's blocks");
    static_assert(TILE_ROWS == LANES * 16, "eight lanes store a column");
    __shared__ Tables tables;
    __shared__ __align__(16) unsigned words[TILE_COLUMNS * COLUMN_WORDS];
    auto word = [](int column, int w) { return column * COLUMN_WORDS + (w ^ column / LANE_ELEMENTS % LANES * 4); };
    const int expert = blockIdx.y, group_of_threads = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (has_no_tokens(p, expert)) return;
    const int column_tiles = (p.K + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int n0 = blockIdx.x / column_tiles * TILE_ROWS, k0 = blockIdx.x % column_tiles * TILE_COLUMNS;
    const int line = group_of_threads * ROWS, column = lane * LANE_ELEMENTS;  // of the thread's first block
    const unsigned group = p.groups == 2 && n0 + line >= p.N / 2;
    const int64 first = expert * p.size + int64(n0 + line) * p.K + k0 + column;
    const unsigned char *data = p.data + first / 2, *scales = p.scales + first / 32;
    uint2 codes[BLOCKS][ROWS];
    unsigned bytes[BLOCKS][ROWS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const bool inside = n0 + line < p.N && k0 + column + i * BLOCK_COLUMNS < p.K;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            codes[i][j] = make_uint2(0, 0), bytes[i][j] = 0;
            if (inside) {
                codes[i][j] = load_once_8(data + j * (p.K / 2) + i * BLOCK_COLUMNS / 2);
                bytes[i][j] = scales[j * (p.K / 32) + i * BLOCK_COLUMNS / 32];
            }
        }
    }
    tables.make(p, expert);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        uint4 v[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) v[j] = e4m3_of(codes[i][j], tables.of[group][bytes[i][j]]);
        transpose_bytes(v[0].x, v[1].x, v[2].x, v[3].x);
        transpose_bytes(v[0].y, v[1].y, v[2].y, v[3].y);
        transpose_bytes(v[0].z, v[1].z, v[2].z, v[3].z);
        transpose_bytes(v[0].w, v[1].w, v[2].w, v[3].w);
        unsigned* const to = words + word(column + i * BLOCK_COLUMNS, line / 4);  // the swizzle is that of all 16 columns
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            to[j * COLUMN_WORDS] = v[j].x, to[(4 + j) * COLUMN_WORDS] = v[j].y;
            to[(8 + j) * COLUMN_WORDS] = v[j].z, to[(12 + j) * COLUMN_WORDS] = v[j].w;
        }
    }
    __syncthreads();
    unsigned char* out = p.out + expert * p.size + int64(k0 + group_of_threads) * p.N + n0 + lane * 16;
    const bool inside = n0 + lane * 16 < p.N;
#pragma unroll
    for (int i = 0; i < TILE_COLUMNS / STORED_COLUMNS; ++i) {
        const int k = i * STORED_COLUMNS + group_of_threads;
        const uint4 v = *reinterpret_cast<const uint4*>(words + word(k, lane * 4));
        if (inside && k0 + k < p.K) store_global_16(out, v);
        out += int64(STORED_COLUMNS) * p.N;
    }
}

#define MXFP4_ENTRY(NAME, FUNCTION) \
    extern "C" __global__ void __launch_bounds__(THREADS) mxfp4_##NAME(const DecodeE4m3Params p) { FUNCTION(p); }
MXFP4_ENTRY(tops, find_tops)
MXFP4_ENTRY(to_e4m3, decode_in_order)
MXFP4_ENTRY(to_e4m3_transposed, decode_transposed)
