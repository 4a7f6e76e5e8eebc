// The emulator's version of kernels_cu/ptx_sm80.cuh: the same functions in plain C++. Fragment layouts
// follow the PTX ISA. Shared addresses are byte offsets into dynamic_shared, or of static arrays those from STATIC on.
#pragma once

namespace cuemu {
// The access lies inside one array argument; reads past an end would pass unseen otherwise.
static inline bool check_global_at(const void* pc, const void* p, unsigned bytes, unsigned alignment, const char* what) {
    const unsigned char* a = static_cast<const unsigned char*>(p);
    bool inside = bytes == 0;
    for (const Range* r = launch.arrays; r < launch.arrays + launch.num_arrays && !inside; ++r)
        inside = a >= r->begin && a + bytes <= r->end;
    if (reinterpret_cast<uintptr_t>(p) % alignment)
        complain(pc, "%s: global address %p is not %u-byte aligned", what, p, alignment);
    else if (!inside)
        complain(pc, "%s: %u bytes at %p lie outside every array argument", what, bytes, p);
    return !failed;
}

static __forceinline__ void check_global(const void* p, unsigned bytes, unsigned alignment, const char* what) {
    if (!check_global_at(here(), p, bytes, alignment, what)) leave();
}

constexpr unsigned STATIC = 1 << 20;

// `bytes` of the running block's shared memory.
static inline unsigned char* shared_at(unsigned address, unsigned bytes, const char* what, const void* pc = here()) {
    if (address % bytes) fail_at(pc, "%s: shared address %u is not %u-byte aligned", what, address, bytes);
    if (address >= STATIC && address - STATIC + bytes <= size_t(shared_range.end - shared_range.begin))
        return shared_range.begin + (address - STATIC);
    if (address + 0ull + bytes > launch.shared_bytes)
        fail_at(pc, "%s: %u bytes at shared address %u, the launch gave %zu", what, bytes, address,
                size_t(launch.shared_bytes));
    return dynamic_shared + address;
}
}  // namespace cuemu

__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned char* const byte = static_cast<unsigned char*>(const_cast<void*>(p));
    if (byte >= dynamic_shared && byte <= dynamic_shared + sizeof dynamic_shared)
        return static_cast<unsigned>(byte - dynamic_shared);
    if (byte < cuemu::shared_range.begin || byte >= cuemu::shared_range.end)
        CUEMU_FAIL("shared_address: %p is not in shared memory", p);
    return cuemu::STATIC + static_cast<unsigned>(byte - cuemu::shared_range.begin);
}

__device__ __forceinline__ void store_shared_8(unsigned address, uint2 v) {
    memcpy(cuemu::shared_at(address, 8, "store_shared_8"), &v, 8);
}

// The destination holds poison from issue to wait: reading it early shows, and so does overwriting a
// buffer that another warp still reads.
__device__ __forceinline__ void cp_async_16(unsigned dst_shared, const void* src, unsigned src_bytes) {
    if (src_bytes > 16) CUEMU_FAIL("cp_async_16: src_bytes is %u", src_bytes);
    unsigned char* const dst = cuemu::shared_at(dst_shared, 16, "cp_async_16");
    cuemu::check_global(src, src_bytes, 16, "cp_async_16");
    cuemu::Fibre& me = *cuemu::current;
    cuemu::Copy copy = {me.commits, dst, {}};
    if (src_bytes) memcpy(copy.data, src, src_bytes);
    memset(dst, 0xff, 16);
    me.copies.push_back(copy);
}

__device__ __forceinline__ void cp_async_commit() { ++cuemu::current->commits; }

namespace cuemu {
static inline void land(Fibre& thread, size_t count) {  // its first copies
    for (size_t i = 0; i < count; ++i) memcpy(in_block(*thread.block, thread.copies[i].dst), thread.copies[i].data, 16);
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + count);
    thread.landed += count;
}
}  // namespace cuemu

template <int N>
__device__ __forceinline__ void cp_async_wait() {
    cuemu::Fibre& me = *cuemu::current;
    size_t done = 0;
    while (done < me.copies.size() && me.copies[done].group + N < me.commits) ++done;
    cuemu::land(me, done);
}

namespace cuemu {
struct MatrixOperand { unsigned* r; const unsigned char* row; };

template <bool TRANS>
void load_matrices(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("ldmatrix: all 32 lanes must take part, here 0x%08x", lanes);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned short rows[8][8];
        for (unsigned row = 0; row < 8; ++row)
            memcpy(rows[row], static_cast<MatrixOperand*>(operands[8 * matrix + row])->row, 16);
        for (unsigned lane = 0; lane < 32; ++lane) {
            const unsigned i = lane / 4, j = lane % 4 * 2;
            const unsigned low = TRANS ? rows[j][i] : rows[i][j], high = TRANS ? rows[j + 1][i] : rows[i][j + 1];
            static_cast<MatrixOperand*>(operands[lane])->r[matrix] = low | high << 16;
        }
    }
}
}  // namespace cuemu

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    cuemu::MatrixOperand mine = {r, cuemu::shared_at(address, 16, "ldmatrix_x4")};
    cuemu::collective("ldmatrix_x4", ~0u, &mine, cuemu::load_matrices<false>);
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    cuemu::MatrixOperand mine = {r, cuemu::shared_at(address, 16, "ldmatrix_x4_trans")};
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

__device__ __forceinline__ float canonical(float v) { return v != v ? __uint_as_float(0x7fffffffu) : v + 0.f; }

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
