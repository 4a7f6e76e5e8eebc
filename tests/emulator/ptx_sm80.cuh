// The emulator's version of kernels_cu/ptx_sm80.cuh: the same functions in plain C++. Fragment layouts
// follow the PTX ISA; shared addresses are byte offsets into dynamic_shared.
#pragma once

namespace cuemu {
// The access lies inside one array argument; reads past an end would pass unseen otherwise.
static __forceinline__ void check_global(const void* p, unsigned bytes, unsigned alignment, const char* what) {
    const unsigned char* a = static_cast<const unsigned char*>(p);
    bool inside = bytes == 0;
    for (const Range* r = launch.arrays; r < launch.arrays + launch.num_arrays && !inside; ++r)
        inside = a >= r->begin && a + bytes <= r->end;
    if (reinterpret_cast<uintptr_t>(p) % alignment)
        CUEMU_FAIL("%s: global address %p is not %u-byte aligned", what, p, alignment);
    if (!inside) CUEMU_FAIL("%s: %u bytes at %p lie outside every array argument", what, bytes, p);
}

static __forceinline__ void check_shared(unsigned address, const char* what) {
    if (address % 16) CUEMU_FAIL("%s: shared address %u is not 16-byte aligned", what, address);
    if (address + 16ull > launch.shared_bytes)
        CUEMU_FAIL("%s: 16 bytes at shared address %u, the launch gave %zu", what, address, size_t(launch.shared_bytes));
}
}  // namespace cuemu

__device__ __forceinline__ unsigned shared_address(const void* p) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(p) - dynamic_shared;
    if (offset < 0 || offset > static_cast<ptrdiff_t>(sizeof dynamic_shared))
        CUEMU_FAIL("shared_address: %p is not in dynamic_shared", p);
    return static_cast<unsigned>(offset);
}

// The destination holds poison from issue to wait: reading it early shows, and so does overwriting a
// buffer that another warp still reads.
__device__ __forceinline__ void cp_async_16(unsigned dst_shared, const void* src, unsigned src_bytes) {
    if (src_bytes > 16) CUEMU_FAIL("cp_async_16: src_bytes is %u", src_bytes);
    cuemu::check_shared(dst_shared, "cp_async_16");
    cuemu::check_global(src, src_bytes, 16, "cp_async_16");
    cuemu::Fibre& me = *cuemu::current;
    cuemu::Copy copy = {me.commits, dst_shared, {}};
    if (src_bytes) memcpy(copy.data, src, src_bytes);
    memset(dynamic_shared + dst_shared, 0xff, 16);
    me.copies.push_back(copy);
}

__device__ __forceinline__ void cp_async_commit() { ++cuemu::current->commits; }

template <int N>
__device__ __forceinline__ void cp_async_wait() {
    cuemu::Fibre& me = *cuemu::current;
    size_t done = 0;
    for (; done < me.copies.size() && me.copies[done].group + N < me.commits; ++done)
        memcpy(dynamic_shared + me.copies[done].dst, me.copies[done].data, 16);
    me.copies.erase(me.copies.begin(), me.copies.begin() + done);
}

namespace cuemu {
struct MatrixOperand { unsigned* r; unsigned address; };

template <bool TRANS>
void load_matrices(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("ldmatrix: all 32 lanes must take part, here 0x%08x", lanes);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned short rows[8][8];
        for (unsigned row = 0; row < 8; ++row)
            memcpy(rows[row], dynamic_shared + static_cast<MatrixOperand*>(operands[8 * matrix + row])->address, 16);
        for (unsigned lane = 0; lane < 32; ++lane) {
            const unsigned i = lane / 4, j = lane % 4 * 2;
            const unsigned low = TRANS ? rows[j][i] : rows[i][j], high = TRANS ? rows[j + 1][i] : rows[i][j + 1];
            static_cast<MatrixOperand*>(operands[lane])->r[matrix] = low | high << 16;
        }
    }
}
}  // namespace cuemu

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    cuemu::check_shared(address, "ldmatrix_x4");
    cuemu::MatrixOperand mine = {r, address};
    cuemu::collective("ldmatrix_x4", ~0u, &mine, cuemu::load_matrices<false>);
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    cuemu::check_shared(address, "ldmatrix_x4_trans");
    cuemu::MatrixOperand mine = {r, address};
    cuemu::collective("ldmatrix_x4_trans", ~0u, &mine, cuemu::load_matrices<true>);
}

__device__ __forceinline__ float cvt_f32_from_bf16(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float cvt_f32_from_fp16(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint(mantissa * 0x1p-24f));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

namespace cuemu {
static inline unsigned bf16_bits(float v) {
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline unsigned fp16_bits(float v) {
    const unsigned bits = __float_as_uint(v) & 0x7fffffffu, sign = __float_as_uint(v) >> 16 & 0x8000u;
    if (v != v) return 0x7fff;
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    // Below 2^-14 the addition of 0.5 rounds to multiples of 2^-24, the smallest fp16.
    if (bits < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u);
    return sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

struct MmaOperand { float* d; const unsigned* a; unsigned b[2]; };

// Lane 4g+t holds rows g, g+8 of A and D, column g of B, and the pairs 2t, 2t+1 (+8) along the other side.
template <float (*TO_FLOAT)(unsigned short)>
void multiply(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("mma: all 32 lanes must take part, here 0x%08x", lanes);
    float a[16][16], b[16][8], d[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
        const MmaOperand& o = *static_cast<MmaOperand*>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned shift = 16 * half;
            for (unsigned i = 0; i < 4; ++i)
                a[g + i % 2 * 8][t + i / 2 * 8 + half] = TO_FLOAT(static_cast<unsigned short>(o.a[i] >> shift));
            for (unsigned i = 0; i < 2; ++i) b[t + i * 8 + half][g] = TO_FLOAT(static_cast<unsigned short>(o.b[i] >> shift));
            for (unsigned i = 0; i < 2; ++i) d[g + i * 8][t + half] = o.d[2 * i + half];
        }
    }
    for (unsigned m = 0; m < 16; ++m)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned i = 0; i < 4; ++i)
            static_cast<MmaOperand*>(operands[lane])->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
}  // namespace cuemu

__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cuemu::MmaOperand mine = {d, a, {b0, b1}};
    cuemu::collective("mma_bf16", ~0u, &mine, cuemu::multiply<cvt_f32_from_bf16>);
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cuemu::MmaOperand mine = {d, a, {b0, b1}};
    cuemu::collective("mma_fp16", ~0u, &mine, cuemu::multiply<cvt_f32_from_fp16>);
}

__device__ __forceinline__ unsigned cvt_bf16x2(float low, float high) {
    return cuemu::bf16_bits(low) | cuemu::bf16_bits(high) << 16;
}

__device__ __forceinline__ unsigned cvt_fp16x2(float low, float high) {
    return cuemu::fp16_bits(low) | cuemu::fp16_bits(high) << 16;
}

__device__ __forceinline__ float reciprocal(float v) { return 1.f / v; }

__device__ __forceinline__ uint4 load_global_16(const void* p) {
    cuemu::check_global(p, 16, 16, "load_global_16");
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}

__device__ __forceinline__ void store_global_16(void* p, uint4 v) {
    cuemu::check_global(p, 16, 16, "store_global_16");
    memcpy(p, &v, 16);
}
