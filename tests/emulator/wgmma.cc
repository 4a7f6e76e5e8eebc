// Products of wgmma. Operands are read at the issue and again at the waits, which must find the same; accumulators hold poison
// in between.
#include "mbarrier.h"

namespace cuemu {

struct Descriptor {
    const unsigned start, leading, stride;  // bytes
    explicit Descriptor(uint64 d)
        : start((d & 0x3fff) << 4), leading((d >> 16 & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4) {}
};

// Eight elements along the contiguous dimension, at `row` of the other; descriptors of operands in the 128-byte swizzle. The
// swizzle exchanges chunks of 16 bytes by bits 7 to 9 of the address.
static unsigned element_chunk(uint64 descriptor, bool transposed, unsigned row, unsigned chunk) {
    const Descriptor d(descriptor);
    // Transposed: lines of 64 elements of M or N, one for each k. Else: lines of k, of which 16 elements are read.
    const unsigned offset = row / 8 * d.stride + row % 8 * 128 + chunk % 8 * 16 + (transposed ? chunk / 8 * d.leading : 0);
    const unsigned address = d.start + offset;
    return address ^ (address >> 3 & 0x70);
}

static void read_operand(const Block& of, uint64 descriptor, bool transposed, unsigned extent, unsigned short* to,
                         const void* pc) {
    const unsigned rows = transposed ? 16 : extent, chunks = (transposed ? extent : 16) / 8;
    const unsigned char* const from = in_block(of, dynamic_shared);
    for (unsigned row = 0; row < rows; ++row)
        for (unsigned chunk = 0; chunk < chunks; ++chunk) {
            const unsigned address = element_chunk(descriptor, transposed, row, chunk);
            if (address + 16ull > launch.shared_bytes)
                return CUEMU_REPORT(pc, "wgmma: an operand at shared address %u, the launch gave %zu", address,
                                    size_t(launch.shared_bytes));
            memcpy(to + (row * chunks + chunk) * 8, from + address, 16);
        }
}

static void check_descriptor(uint64 descriptor, bool transposed, char operand, const void* pc) {
    const Descriptor d(descriptor);
    const unsigned swizzle = descriptor >> 62;
    if (swizzle != 1) CUEMU_REPORT(pc, "wgmma: swizzle mode %u of operand %c, expected 1, 128 bytes", swizzle, operand);
    if (descriptor & 0x3fffc000c000c000ull)
        CUEMU_REPORT(pc, "wgmma: reserved bits or a base offset in the descriptor of operand %c", operand);
    if (d.start % (transposed ? 1024 : 16) || d.start >> 7 & 7)
        CUEMU_REPORT(pc, "wgmma: operand %c starts at %u, within a 1024-byte pattern of the swizzle", operand, d.start);
    if (d.stride == 0 || d.stride % 1024 || (transposed && (d.leading == 0 || d.leading % 1024)))
        CUEMU_REPORT(pc, "wgmma: byte offsets %u (leading) and %u (stride) of operand %c, no multiples of 1024", d.leading,
                     d.stride, operand);
}

static void check_unchanged(const Block& of, const Product& p) {
    static unsigned short now[256 * 16];
    if (!p.a_in_registers) read_operand(of, p.a, p.a_transposed, 64, now, p.pc);
    const bool a_changed = !p.a_in_registers && memcmp(now, p.a_held, sizeof p.a_held);
    read_operand(of, p.b, p.b_transposed, p.columns, now, p.pc);
    if (a_changed || memcmp(now, p.b_held, p.columns * 32))
        CUEMU_REPORT(p.pc, "wgmma: operand %c was written before the wait for the product, issued", a_changed ? 'A' : 'B');
}

// Lines of 32 e4m3. Sums are of fp32: the tensor cores keep fewer bits.
static void multiply_e4m3(Product& p) {
    static const auto* const table = [] {
        static float values[256];
        for (unsigned bits = 0; bits < 256; ++bits) values[bits] = cvt_f32x2_from_e4m3x2(static_cast<unsigned short>(bits)).x;
        return values;
    }();
    static float b[32][256];
    const auto* const b_bits = reinterpret_cast<const unsigned char*>(p.b_held);
    for (unsigned n = 0; n < p.columns; ++n)
        for (unsigned k = 0; k < 32; ++k) b[k][n] = table[b_bits[n * 32 + k]];
    for (unsigned m = 0; m < 64; ++m) {
        float* const row = p.result[m];
        std::fill(row, row + 256, 0.f);
        for (unsigned k = 0; k < 32; ++k) {
            const float a = table[reinterpret_cast<const unsigned char*>(p.a_held)[m * 32 + k]];
            for (unsigned n = 0; n < p.columns; ++n) row[n] += a * b[k][n];
        }
    }
    p.done = true;
}

static void multiply(Product& p) {
    if (!p.to_float) return multiply_e4m3(p);
    static float b[16][256];
    for (unsigned i = 0; i < 16 * p.columns; ++i) {
        const unsigned k = p.b_transposed ? i / p.columns : i % 16, n = p.b_transposed ? i % p.columns : i / 16;
        b[k][n] = p.to_float(p.b_held[i]);
    }
    for (unsigned m = 0; m < 64; ++m) {
        float* const row = p.result[m];
        std::fill(row, row + 256, 0.f);
        for (unsigned k = 0; k < 16; ++k) {
            const float a = p.to_float(p.a_held[p.a_transposed ? k * 64 + m : m * 16 + k]);
            for (unsigned n = 0; n < p.columns; ++n) row[n] += a * b[k][n];
        }
    }
    p.done = true;
}

static void schedule(Warpgroup& group);

struct Products : Async {  // of a warpgroup, as far as its threads wait for them
    Warpgroup& group;
    explicit Products(Warpgroup& group) : group(group) { of = group.of; }
    bool awaited() const override { return true; }
    bool yields() const override { return true; }
    void complete() override {
        group.scheduled = false;
        std::vector<Fibre*> waiting, ready;
        for (Fibre* f : group.waiting) (group.find(state_of(*f).needs)->issued == 128 ? ready : waiting).push_back(f);
        for (const Fibre* f : ready)
            for (unsigned number = group.first; number <= state_of(*f).needs; ++number) {
                Product& p = *group.find(number);
                if (p.done) continue;
                check_unchanged(*of, p);
                multiply(p);
            }
        group.waiting = waiting;
        wake(ready);
        schedule(group);
    }
};

static void schedule(Warpgroup& group) {
    for (const Fibre* f : group.waiting)
        if (!group.scheduled && group.find(state_of(*f).needs)->issued == 128) {
            under_way.push_back(new Products(group));
            group.scheduled = true;
        }
}

static bool is_poison(const float (*d)[4], unsigned fragments) {
    const unsigned char* p = reinterpret_cast<const unsigned char*>(d);
    return p[0] == 0xff && !memcmp(p, p + 1, fragments * sizeof *d - 1);
}

void issue_product(float (*d)[4], unsigned fragments, uint64 a, uint64 b, bool accumulate, bool a_transposed, bool b_transposed,
                   float (*to_float)(unsigned short), const unsigned* a_fragment) {
    const void* pc = before(__builtin_return_address(0));
    ThreadState& me = state_of(*current);
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    if (me.pending.empty()) {
        if (!me.fenced) CUEMU_REPORT(pc, "wgmma: no wgmma.fence since the accumulators were in the thread's hands");
        me.accumulators = d, me.fragments = fragments;
        memcpy(me.values, d, fragments * sizeof *d);
        memset(static_cast<void*>(d), 0xff, fragments * sizeof *d);
    } else if (me.accumulators != d || me.fragments != fragments) {
        CUEMU_REPORT(pc, "wgmma: other accumulators are in flight, which the emulator cannot do");
    } else if (!is_poison(d, fragments)) {
        CUEMU_REPORT(pc, "wgmma: its accumulators were written while products were in flight");
    }
    Product* p = group.find(me.issued);
    if (!p) {
        if (!a_fragment) check_descriptor(a, a_transposed, 'A', pc);
        check_descriptor(b, b_transposed, 'B', pc);
        group.products.emplace_back();
        p = &group.products.back();
        p->a = a, p->b = b, p->a_transposed = a_transposed, p->b_transposed = b_transposed, p->to_float = to_float, p->pc = pc;
        p->columns = fragments * 8, p->a_in_registers = a_fragment;
    }
    for (unsigned i = 0; a_fragment && i < 8; ++i) {  // as of mma.m16n8k16
        const unsigned row = current->id % 128 / 32 * 16 + current->id % 32 / 4 + i / 2 % 2 * 8, k = i / 4 * 8 + i % 2;
        p->a_held[row * 16 + current->id % 4 * 2 + k] = static_cast<unsigned short>(a_fragment[i / 2] >> i % 2 * 16);
    }
    if (p->a != a || p->b != b || p->a_transposed != a_transposed || p->b_transposed != b_transposed)
        CUEMU_REPORT(pc, "wgmma: threads of a warpgroup have different descriptors");
    me.pending.push_back({me.issued++, me.groups, accumulate});
    if (++p->issued < 128) return;
    if (!a_fragment) read_operand(*block, a, a_transposed, 64, p->a_held, pc);
    read_operand(*block, b, b_transposed, p->columns, p->b_held, pc);
    schedule(group);
}

void fence_products() { state_of(*current).fenced = true; }
void commit_products() { ++state_of(*current).groups; }

static void describe_product(const Fibre& f, char* text, size_t size) {
    const Product& p = *state_of(*f.block).warpgroups[f.id / 128].find(state_of(f).needs);
    size_t n = snprintf(text, size, " for the wgmma issued");
    n += append_pc(text + n, size - n, p.pc);
    snprintf(text + n, size - n, " by %u of the warpgroup's 128 threads", p.issued);
}

// Until at most `left` of the thread's groups are in flight.
void wait_for_products(unsigned left) {
    void* pc = __builtin_return_address(0);
    ThreadState& me = state_of(*current);
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    size_t due = 0;
    while (due < me.pending.size() && me.pending[due].group + left < me.groups) ++due;
    if (!due) return;
    me.needs = me.pending[due - 1].number;
    if (!group.find(me.needs)->done) {
        group.waiting.push_back(current);
        schedule(group);
        wait_for_event("wgmma.wait_group", me.needs, pc, describe_product);
    }
    const unsigned warp = current->id % 128 / 32, lane = current->id % 32;
    for (size_t i = 0; i < due; ++i) {
        Product& p = *group.find(me.pending[i].number);
        for (unsigned j = 0; j < me.fragments; ++j)
            for (unsigned r = 0; r < 4; ++r) {
                const float v = p.result[warp * 16 + lane / 4 + r / 2 * 8][j * 8 + lane % 4 * 2 + r % 2];
                me.values[j][r] = me.pending[i].accumulate ? me.values[j][r] + v : v;
            }
        if (++p.retired == 128) check_unchanged(*block, p);
    }
    me.pending.erase(me.pending.begin(), me.pending.begin() + due);
    while (!group.products.empty() && group.products.front().retired == 128) group.products.pop_front(), ++group.first;
    if (!me.pending.empty()) return;
    if (!is_poison(me.accumulators, me.fragments))
        CUEMU_REPORT(before(pc), "wgmma.wait_group: the accumulators were written while products were in flight");
    memcpy(me.accumulators, me.values, me.fragments * sizeof *me.accumulators);
    me.fenced = false;
}

}  // namespace cuemu
