#include "cuemu.h"
#include "ptx_sm80.cuh"

namespace cuemu {

bool check_global_at(const void* pc, const void* p, unsigned bytes, unsigned alignment, const char* what) {
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

unsigned char* shared_at(unsigned address, unsigned bytes, const char* what, const void* pc) {
    if (address % bytes) fail_at(pc, "%s: shared address %u is not %u-byte aligned", what, address, bytes);
    if (address >= STATIC && address - STATIC + bytes <= size_t(shared_range.end - shared_range.begin))
        return shared_range.begin + (address - STATIC);
    if (address + 0ull + bytes > launch.shared_bytes)
        fail_at(pc, "%s: %u bytes at shared address %u, the launch gave %zu", what, bytes, address,
                size_t(launch.shared_bytes));
    return dynamic_shared + address;
}

void start_copy(unsigned char* dst, const void* src, unsigned bytes, unsigned size) {
    Copy copy = {current->commits, size, dst, {}};
    if (bytes) memcpy(copy.data, src, bytes);
    memset(dst, 0xff, size);
    current->copies.push_back(copy);
}

void land(Fibre& thread, size_t count) {
    for (size_t i = 0; i < count; ++i) memcpy(in_block(*thread.block, thread.copies[i].dst), thread.copies[i].data, thread.copies[i].size);
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + count);
    thread.landed += count;
}

void wait_for_copies(unsigned left) {
    Fibre& me = *current;
    size_t done = 0;
    while (done < me.copies.size() && me.copies[done].group + left < me.commits) ++done;
    land(me, done);
}

template <bool TRANS>
static void load(void* const* operands, unsigned lanes) {
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
void load_matrices(void* const* operands, unsigned lanes) { load<false>(operands, lanes); }
void load_matrices_trans(void* const* operands, unsigned lanes) { load<true>(operands, lanes); }

// Lane 4g+t holds rows g, g+8 of A and D, column g of B, and the pairs 2t, 2t+1 (+8) along the other side.
template <float (*TO_FLOAT)(unsigned short)>
static void multiply(void* const* operands, unsigned lanes) {
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
void multiply_bf16(void* const* operands, unsigned lanes) { multiply<cvt_f32_from_bf16>(operands, lanes); }
void multiply_fp16(void* const* operands, unsigned lanes) { multiply<cvt_f32_from_fp16>(operands, lanes); }

// Lane 4g+t holds rows g, g+8 of A and column g of B at t and t+4 along the other side, and of D what it has of other dtypes.
// Mantissas are cut to 10 bits, as the hardware does.
void multiply_tf32(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("mma: all 32 lanes must take part, here 0x%08x", lanes);
    float a[16][8], b[8][8];
    const auto cut = [](unsigned bits) { return __uint_as_float(bits & ~0x1fffu); };
    for (unsigned lane = 0; lane < 32; ++lane) {
        const MmaOperand& o = *static_cast<MmaOperand*>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = cut(o.a[i]);
        for (unsigned i = 0; i < 2; ++i) b[t + i * 4][g] = cut(o.b[i]);
    }
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned i = 0; i < 4; ++i)
            for (unsigned k = 0; k < 8; ++k)
                static_cast<MmaOperand*>(operands[lane])->d[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
}

}  // namespace cuemu
