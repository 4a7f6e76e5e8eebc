// The emulator's version of kernels_cu/ptx_sm90.cuh: the same functions in plain C++, by the PTX ISA. What the device does
// beside the threads is late here: a copy's destination holds poison until its barrier is told, and products read their
// operands both at their issue and at the wait for them, which must be the same.
#pragma once
#include "ptx_sm80.cuh"

#include <deque>

typedef unsigned long long uint64;

// What tests/emulator/tensor_map.py encodes: 3 dimensions of 16-bit elements, the contiguous one first.
struct alignas(64) TensorMap {
    uint64 magic, pointer, shape[3], strides[2], box[3], unused[6];  // strides in bytes
};

namespace cuemu {
static inline void leave_if_fibre() {
    if (current) leave();
}
// From a fibre, which ends here, or from work that goes on beside them.
#define CUEMU_REPORT(pc, ...) (cuemu::complain(pc, __VA_ARGS__), cuemu::leave_if_fibre())

// ---- mbarriers ----

struct Barrier {
    Block* of;
    unsigned number, address, count, pending, phase;  // phase: how many are complete
    long tx;                                           // bytes that are announced and have not come
    bool fenced;
    const Fibre* initialised_by;
    const void* pc;
    std::vector<Fibre*> waiting;
};
constexpr uint64 BARRIER_COOKIE = 0x6d62617272000000ull;  // with the barrier's number, what its 8 bytes hold

struct Named { unsigned threads = 0, arrived = 0; std::vector<Fibre*> waiting; };

// The product of one wgmma. Rows of A and B as they lie in shared memory, at the issue; then the result.
struct Product {
    uint64 a, b;
    bool a_transposed, b_transposed, done;
    float (*to_float)(unsigned short);
    const void* pc;
    unsigned issued, retired;  // by how many threads
    unsigned short a_held[64 * 16], b_held[256 * 16];
    float result[64][256];
};

struct Warpgroup {
    Block* of;
    std::deque<Product> products;
    unsigned first;                        // the number of products.front()
    unsigned registers, called_setmaxnreg;  // 0: as compiled; by so many threads
    bool scheduled;
    std::vector<Fibre*> waiting;
    Product* find(unsigned number) { return number - first < products.size() ? &products[number - first] : nullptr; }
};

struct BlockState {
    std::deque<Barrier> barriers;
    Named named[16];
    Warpgroup warpgroups[MAX_THREADS / 128];
    unsigned cluster_arrived, cluster_generation;  // of a cluster's first block
    std::vector<Fibre*> cluster_waiting;
};

struct Pending { unsigned number, group; bool accumulate; };

struct ThreadState {
    const Barrier* barrier;  // it waits for
    unsigned parity, issued, groups, needs, cluster_generation;
    bool cluster_arrived, fenced;
    float (*accumulators)[4];
    float values[32][4];  // of the accumulators while they are in flight
    std::vector<Pending> pending;
};

static BlockState block_states[MAX_BLOCKS];
static ThreadState thread_states[MAX_FIBRES];
static BlockState& state_of(const Block& b) { return block_states[b.place]; }
static ThreadState& state_of(const Fibre& f) { return thread_states[&f - fibres]; }

static void wait_for_event(const char* name, unsigned what, void* pc, void (*describe)(const Fibre&, char*, size_t)) {
    current->describe = describe;
    wait_as(AT_EVENT, name, what, pc);
}

static void wake(std::vector<Fibre*>& waiting) {
    for (Fibre* f : waiting) f->state = READY;
    waiting.clear();
}

// A byte of a block's shared memory, by the address that the block's own threads have.
static unsigned char* shared_of(Block& of, unsigned address, unsigned bytes, const char* what, const void* pc) {
    return in_block(of, shared_at(address, bytes, what, pc));
}

// Addresses in the cluster: the block's rank, plus 1, above the address there.
constexpr unsigned RANK_SHIFT = 24;
static Block& split_cluster_address(unsigned& address, const char* what, const void* pc = here()) {
    const unsigned rank = (address >> RANK_SHIFT) - 1;
    if (rank >= launch.cluster_blocks) fail_at(pc, "%s: 0x%x is not an address of a block in the cluster", what, address);
    address &= (1u << RANK_SHIFT) - 1;
    Block& of = block->cluster[rank];
    if (!of.alive) fail_at(pc, "%s: block %u of the cluster has exited", what, rank);
    return of;
}

static Barrier* find_barrier(Block& of, unsigned address, const char* what, const void* pc = here()) {
    if (address >> RANK_SHIFT) fail_at(pc, "%s: 0x%x is an address in the cluster, expected the block's own", what, address);
    uint64 word;
    memcpy(&word, shared_of(of, address, 8, what, pc), 8);
    auto& barriers = state_of(of).barriers;
    const uint64 number = word - BARRIER_COOKIE;
    if (number < barriers.size() && barriers[number].address == address) return &barriers[number];
    bool was = false;
    for (const Barrier& b : barriers) was = was || b.address == address;
    fail_at(pc, "%s: the mbarrier at shared address %u %s", what, address, was ? "has been overwritten" : "is not initialised");
}

static size_t describe_barrier(const Barrier& b, char* text, size_t size) {
    size_t n = snprintf(text, size, "mbarrier %u (shared address %u, initialised", b.number, b.address);
    n += append_pc(text + n, size - n, b.pc);
    return n + snprintf(text + n, size - n, ") in phase %u, parity %u, lacks %u of %u arrivals and %ld bytes", b.phase, b.phase & 1,
                        b.pending, b.count, b.tx);
}

static void settle(Barrier& b, const void* pc) {
    if (b.pending) return;
    if (b.tx < 0) {
        CUEMU_REPORT(pc, "mbarrier %u (shared address %u), phase %u: %ld bytes more have come than were announced", b.number,
                     b.address, b.phase, -b.tx);
        return;
    }
    if (b.tx > 0) return;
    ++b.phase, b.pending = b.count;
    wake(b.waiting);
}

static void arrive(Barrier& b, const void* pc) {
    if (!b.pending) {
        CUEMU_REPORT(pc, "mbarrier %u (shared address %u), phase %u: an arrival beyond its %u", b.number, b.address, b.phase, b.count);
        return;
    }
    --b.pending;
    settle(b, pc);
}

static void complete_tx(Barrier& b, unsigned bytes, const void* pc) {
    b.tx -= bytes;
    settle(b, pc);
}

static void initialise_barrier(unsigned address, unsigned count, const void* pc) {
    if (count < 1 || count >= 1u << 20) fail_at(pc, "mbarrier.init: a count of %u", count);
    auto& barriers = state_of(*block).barriers;
    for (const Barrier& b : barriers)
        if (b.address == address) fail_at(pc, "mbarrier.init: the mbarrier at shared address %u is initialised already", address);
    const unsigned number = barriers.size();
    const uint64 word = BARRIER_COOKIE + number;
    memcpy(shared_at(address, 8, "mbarrier.init", pc), &word, 8);
    barriers.push_back({block, number, address, count, count, 0, 0, false, current, pc, {}});
}

static void expect_tx(Barrier& b, unsigned bytes, const void* pc) {
    b.tx += bytes;
    if (b.tx >= 1 << 20) fail_at(pc, "mbarrier.arrive.expect_tx: %ld bytes outstanding, at most %d", b.tx, (1 << 20) - 1);
}

static bool is_over(const Barrier& b, unsigned parity, const void* pc = here()) {
    if (parity > 1) fail_at(pc, "mbarrier wait: parity is %u", parity);
    return (b.phase & 1) != parity;
}

static void describe_wait(const Fibre& f, char* text, size_t size) {
    const size_t n = snprintf(text, size, ": parity %u of ", state_of(f).parity);
    describe_barrier(*state_of(f).barrier, text + n, size - n);
}

static void yield() { current->context.switch_to(scheduler); }

static __attribute__((noinline)) bool try_wait(unsigned address, unsigned parity) {
    void* pc = __builtin_return_address(0);
    Barrier& b = *find_barrier(*block, address, "mbarrier.try_wait", before(pc));
    if (is_over(b, parity, before(pc))) return true;
    if (launch.seed && random_number() % 8 == 0) {  // its time limit is over
        yield();
        return is_over(b, parity);
    }
    b.waiting.push_back(current);
    state_of(*current).barrier = &b, state_of(*current).parity = parity;
    wait_for_event("mbarrier.try_wait", b.number * 2 + parity, pc, describe_wait);
    return is_over(b, parity);
}

// ---- copies ----

// A block's exit while a copy to it, or from it, is under way is reported at its end.
struct ToBarrier : Async {
    Barrier* barrier;
    const void* pc;
    ToBarrier(Barrier* barrier, const void* pc) : barrier(barrier), pc(pc) { of = barrier->of; }
    bool awaited() const override { return !barrier->waiting.empty(); }
};

struct CopiesArrive : ToBarrier {
    Fibre* thread;
    unsigned upto;  // of the thread's copies
    CopiesArrive(Barrier* barrier, const void* pc)
        : ToBarrier(barrier, pc), thread(current), upto(current->landed + static_cast<unsigned>(current->copies.size())) {}
    void complete() override {
        if (upto > thread->landed) land(*thread, upto - thread->landed);
        arrive(*barrier, pc);
    }
};

struct RemoteStore : ToBarrier {
    unsigned address;
    int value;
    RemoteStore(Barrier* barrier, const void* pc, unsigned address, int value) : ToBarrier(barrier, pc), address(address), value(value) {
        memset(shared_of(*of, address, 4, "st.async", pc), 0xff, 4);
    }
    void complete() override {
        memcpy(shared_of(*of, address, 4, "st.async", pc), &value, 4);
        complete_tx(*barrier, 4, pc);
    }
};

struct BoxCopy : ToBarrier {
    const unsigned dst;
    const TensorMap map;
    const int at[3];
    std::vector<unsigned char> held;  // the source at the issue
    unsigned line_bytes() const { return map.box[0] * 2; }
    unsigned lines() const { return map.box[1] * map.box[2]; }
    unsigned bytes() const { return line_bytes() * lines(); }

    BoxCopy(Barrier* barrier, const void* pc, unsigned dst, const TensorMap& map, int c0, int c1, int c2)
        : ToBarrier(barrier, pc), dst(dst), map(map), at{c0, c1, c2}, held(source()) {}

    std::vector<unsigned char> source() const {
        std::vector<unsigned char> box(bytes());
        for (unsigned line = 0; line < lines(); ++line) {
            const long long y = at[1] + static_cast<long long>(line % map.box[1]), z = at[2] + static_cast<long long>(line / map.box[1]);
            const long long first = std::max(at[0], 0), last = std::min<long long>(at[0] + map.box[0], map.shape[0]);
            if (y < 0 || z < 0 || uint64(y) >= map.shape[1] || uint64(z) >= map.shape[2] || first >= last) continue;
            const char* from = reinterpret_cast<const char*>(map.pointer) + first * 2 + y * map.strides[0] + z * map.strides[1];
            if (!check_global_at(pc, from, (last - first) * 2, 2, "cp.async.bulk.tensor")) break;
            memcpy(box.data() + line * line_bytes() + (first - at[0]) * 2, from, (last - first) * 2);
        }
        return box;
    }
    void issue() {
        if (map.magic != 0x70616d726f736e65ull) CUEMU_REPORT(pc, "cp.async.bulk.tensor: the tensor map is not one");
        if (line_bytes() != 128) CUEMU_REPORT(pc, "cp.async.bulk.tensor: lines of %u bytes, expected 128", line_bytes());
        if (dst % 1024) CUEMU_REPORT(pc, "cp.async.bulk.tensor: shared address %u is not 1024-byte aligned", dst);
        if (dst + 0ull + bytes() > launch.shared_bytes)
            CUEMU_REPORT(pc, "cp.async.bulk.tensor: %u bytes at shared address %u, the launch gave %zu", bytes(), dst,
                         size_t(launch.shared_bytes));
        if (!barrier->fenced)
            CUEMU_REPORT(pc, "cp.async.bulk.tensor: no fence.mbarrier_init after that of mbarrier %u", barrier->number);
        for (const auto& other : under_way) {
            const BoxCopy* copy = dynamic_cast<const BoxCopy*>(other.get());
            if (copy && copy->of == of && copy->dst < dst + bytes() && dst < copy->dst + copy->bytes())
                CUEMU_REPORT(pc, "cp.async.bulk.tensor: another copy to shared address %u is under way", dst);
        }
        memset(in_block(*of, dynamic_shared + dst), 0xff, bytes());
    }
    void complete() override {
        // What another thread wrote meanwhile is read before or after. Rows that nobody uses may be written so.
        const std::vector<unsigned char> now = source();
        for (size_t i = 0; i < held.size(); i += 2)
            if (now[i] != held[i] || now[i + 1] != held[i + 1]) held[i] = held[i + 1] = 0xff;
        unsigned char* const to = in_block(*of, dynamic_shared + dst);
        for (unsigned line = 0; line < lines(); ++line)
            for (unsigned chunk = 0; chunk < 8; ++chunk)
                memcpy(to + line * 128 + (chunk ^ (line & 7)) * 16, held.data() + line * 128 + chunk * 16, 16);
        complete_tx(*barrier, bytes(), pc);
    }
};

static void copy_box(Block& of, unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier, const void* pc) {
    if (!of.alive) CUEMU_REPORT(pc, "cp.async.bulk.tensor: block %u of the cluster has exited", of.rank);
    auto copy = std::make_unique<BoxCopy>(find_barrier(of, barrier, "cp.async.bulk.tensor", pc), pc, dst, *map, c0, c1, c2);
    copy->issue();
    if (failed) leave();
    under_way.push_back(std::move(copy));
}

// ---- products ----

// Eight elements along the contiguous dimension, at `row` of the other; descriptors of operands in the 128-byte swizzle. The
// swizzle exchanges chunks of 16 bytes by bits 7 to 9 of the address.
static unsigned element_chunk(uint64 descriptor, bool transposed, unsigned row, unsigned chunk) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    // Transposed: lines of 64 elements of M or N, one for each k. Else: lines of k, of which 16 elements are read.
    const unsigned offset = row / 8 * stride + row % 8 * 128 + chunk % 8 * 16 + (transposed ? chunk / 8 * leading : 0);
    const unsigned address = start + offset;
    return address ^ (address >> 3 & 0x70);
}

static void read_operand(const Block& of, uint64 descriptor, bool transposed, unsigned extent, unsigned short* to, const void* pc) {
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
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) CUEMU_REPORT(pc, "wgmma: swizzle mode %u of operand %c, expected 1, 128 bytes", unsigned(descriptor >> 62), operand);
    if (descriptor & 0x3fffc000c000c000ull) CUEMU_REPORT(pc, "wgmma: reserved bits or a base offset in the descriptor of operand %c", operand);
    if (start % (transposed ? 1024 : 16) || start >> 7 & 7)
        CUEMU_REPORT(pc, "wgmma: operand %c starts at %u, which is within a 1024-byte pattern of the swizzle", operand, start);
    if (stride == 0 || stride % 1024 || (transposed && (leading == 0 || leading % 1024)))
        CUEMU_REPORT(pc, "wgmma: byte offsets %u (leading) and %u (stride) of operand %c, expected multiples of 1024", leading, stride, operand);
}

static void check_unchanged(const Block& of, const Product& p) {
    static unsigned short now[256 * 16];
    read_operand(of, p.a, p.a_transposed, 64, now, p.pc);
    const bool a_changed = memcmp(now, p.a_held, sizeof p.a_held);
    read_operand(of, p.b, p.b_transposed, 256, now, p.pc);
    if (a_changed || memcmp(now, p.b_held, sizeof p.b_held))
        CUEMU_REPORT(p.pc, "wgmma: operand %c was written before the wait for the product, issued", a_changed ? 'A' : 'B');
}

static void multiply(Product& p) {
    static float b[16][256];
    for (unsigned i = 0; i < 16 * 256; ++i) {
        const unsigned k = p.b_transposed ? i / 256 : i % 16, n = p.b_transposed ? i % 256 : i / 16;
        b[k][n] = p.to_float(p.b_held[i]);
    }
    for (unsigned m = 0; m < 64; ++m) {
        float* const row = p.result[m];
        std::fill(row, row + 256, 0.f);
        for (unsigned k = 0; k < 16; ++k) {
            const float a = p.to_float(p.a_held[p.a_transposed ? k * 64 + m : m * 16 + k]);
            for (unsigned n = 0; n < 256; ++n) row[n] += a * b[k][n];
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
            under_way.push_back(std::make_unique<Products>(group));
            group.scheduled = true;
        }
}

static bool is_poison(const float (&d)[32][4]) {
    const unsigned char* p = reinterpret_cast<const unsigned char*>(d);
    return p[0] == 0xff && !memcmp(p, p + 1, sizeof d - 1);
}

static __attribute__((noinline)) void issue_product(float (&d)[32][4], uint64 a, uint64 b, bool accumulate, bool a_transposed,
                                                    bool b_transposed, float (*to_float)(unsigned short)) {
    const void* pc = before(__builtin_return_address(0));
    ThreadState& me = state_of(*current);
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    if (me.pending.empty()) {
        if (!me.fenced) CUEMU_REPORT(pc, "wgmma: no wgmma.fence since the accumulators were in the thread's hands");
        me.accumulators = d;
        memcpy(me.values, d, sizeof d);
        memset(static_cast<void*>(d), 0xff, sizeof d);
    } else if (me.accumulators != d) {
        CUEMU_REPORT(pc, "wgmma: other accumulators are in flight, which the emulator cannot do");
    } else if (!is_poison(d)) {
        CUEMU_REPORT(pc, "wgmma: its accumulators were written while products were in flight");
    }
    Product* p = group.find(me.issued);
    if (!p) {
        check_descriptor(a, a_transposed, 'A', pc);
        check_descriptor(b, b_transposed, 'B', pc);
        group.products.emplace_back();
        p = &group.products.back();
        p->a = a, p->b = b, p->a_transposed = a_transposed, p->b_transposed = b_transposed, p->to_float = to_float, p->pc = pc;
    }
    if (p->a != a || p->b != b || p->a_transposed != a_transposed || p->b_transposed != b_transposed)
        CUEMU_REPORT(pc, "wgmma: threads of a warpgroup have different descriptors");
    me.pending.push_back({me.issued++, me.groups, accumulate});
    if (++p->issued < 128) return;
    read_operand(*block, a, a_transposed, 64, p->a_held, pc);
    read_operand(*block, b, b_transposed, 256, p->b_held, pc);
    schedule(group);
}

static void describe_product(const Fibre& f, char* text, size_t size) {
    const Product& p = *state_of(*f.block).warpgroups[f.id / 128].find(state_of(f).needs);
    size_t n = snprintf(text, size, " for the wgmma issued");
    n += append_pc(text + n, size - n, p.pc);
    snprintf(text + n, size - n, " by %u of the warpgroup's 128 threads", p.issued);
}

// Until at most `left` of the thread's groups are in flight.
static __attribute__((noinline)) void wait_for_products(unsigned left) {
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
        for (unsigned j = 0; j < 32; ++j)
            for (unsigned r = 0; r < 4; ++r) {
                const float v = p.result[warp * 16 + lane / 4 + r / 2 * 8][j * 8 + lane % 4 * 2 + r % 2];
                me.values[j][r] = me.pending[i].accumulate ? me.values[j][r] + v : v;
            }
        if (++p.retired == 128) check_unchanged(*block, p);
    }
    me.pending.erase(me.pending.begin(), me.pending.begin() + due);
    while (!group.products.empty() && group.products.front().retired == 128) group.products.pop_front(), ++group.first;
    if (!me.pending.empty()) return;
    float(&d)[32][4] = *reinterpret_cast<float(*)[32][4]>(me.accumulators);
    if (!is_poison(d)) CUEMU_REPORT(before(pc), "wgmma.wait_group: the accumulators were written while products were in flight");
    memcpy(d, me.values, sizeof d);
    me.fenced = false;
}

// ---- blocks, clusters, named barriers ----

static void start_state(Block& b) {
    BlockState& s = state_of(b);
    s.barriers.clear();
    for (Named& named : s.named) named = {};
    for (Warpgroup& group : s.warpgroups) group = {&b, {}, 0, 0, 0, false, {}};
    s.cluster_arrived = s.cluster_generation = 0;
    s.cluster_waiting.clear();
    for (unsigned i = 0; i < threads; ++i) state_of(b.fibres[i]) = {};
}

static void settle_cluster() {  // exited threads count as arrived
    BlockState& s = state_of(*block->cluster);
    unsigned expected = 0;
    for (unsigned rank = 0; rank < launch.cluster_blocks; ++rank) expected += block->cluster[rank].alive;
    if (s.cluster_arrived < expected) return;
    s.cluster_arrived = 0, ++s.cluster_generation;
    wake(s.cluster_waiting);
}

static void end_thread(Fibre& f) {
    if (!state_of(f).pending.empty()) complain(nullptr, "the thread exits with products in flight");
    settle_cluster();
}

static void end_block(Block& b) {
    for (const auto& work : under_way)
        if (work->of == &b) {
            const auto* copy = dynamic_cast<const ToBarrier*>(work.get());
            return complain(copy ? copy->pc : nullptr, "the block exits while a copy to its shared memory is under way, issued");
        }
    unsigned registers = 0;
    for (unsigned w = 0; w < threads / 128; ++w) {
        const Warpgroup& group = state_of(b).warpgroups[w];
        if (group.called_setmaxnreg % 128) return complain(nullptr, "only %u threads of warpgroup %u call setmaxnreg", group.called_setmaxnreg, w);
        registers += group.registers * 128;
    }
    if (registers > 65536) complain(nullptr, "setmaxnreg: the warpgroups ask for %u registers, there are 65536", registers);
}

static const bool hooked = (on_block_start = start_state, on_block_end = end_block, on_thread_end = end_thread, true);

static void describe_nothing(const Fibre&, char*, size_t) {}

static __attribute__((noinline)) void wait_for_cluster() {
    void* pc = __builtin_return_address(0);
    ThreadState& me = state_of(*current);
    BlockState& s = state_of(*block->cluster);
    if (!me.cluster_arrived) fail_at(before(pc), "barrier.cluster.wait without barrier.cluster.arrive");
    me.cluster_arrived = false;
    if (me.cluster_generation != s.cluster_generation) return;
    s.cluster_waiting.push_back(current);
    wait_for_event("barrier.cluster.wait", 0, pc, describe_nothing);
}

static void describe_named(const Fibre& f, char* text, size_t size) {
    const Named& named = state_of(*f.block).named[f.mask];
    snprintf(text, size, " %u: %u of %u threads are there", f.mask, named.arrived, named.threads);
}

static __attribute__((noinline)) void wait_at_named(unsigned id, unsigned count) {
    void* pc = __builtin_return_address(0);
    if (id < 1 || id > 15 || count % 32 || count < 32 || count > threads)
        fail_at(before(pc), "bar.sync %u, %u: expected 1 to 15 (0 is __syncthreads) and warps of the block", id, count);
    Named& named = state_of(*block).named[id];
    if (named.arrived && named.threads != count)
        fail_at(before(pc), "bar.sync %u: %u threads here, %u in those that are there", id, count, named.threads);
    named.threads = count;
    if (++named.arrived == count) {
        named.arrived = 0;
        wake(named.waiting);
    } else {
        named.waiting.push_back(current);
        wait_for_event("bar.sync", id, pc, describe_named);
    }
}

static void set_registers(unsigned registers, bool more, const void* pc) {
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    if (threads % 128 || registers % 8 || registers < 24 || registers > 256)
        CUEMU_REPORT(pc, "setmaxnreg: %u registers in a block of %u threads", registers, threads);
    const bool begun = group.called_setmaxnreg % 128, known = group.registers;
    if (known && (begun ? registers != group.registers : (registers > group.registers) != more))
        CUEMU_REPORT(pc, "setmaxnreg.%s: %u registers, the warpgroup has %u", more ? "inc" : "dec", registers, group.registers);
    group.registers = registers;
    ++group.called_setmaxnreg;
}

struct StoreOperand { unsigned char* row; unsigned r[4]; };
static void store_matrices(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("stmatrix: all 32 lanes must take part, here 0x%08x", lanes);
    for (unsigned i = 0; i < 32; ++i)
        for (unsigned lane = 0; lane < 4; ++lane)
            memcpy(static_cast<StoreOperand*>(operands[i])->row + 4 * lane,
                   &static_cast<StoreOperand*>(operands[i % 8 * 4 + lane])->r[i / 8], 4);
}
}  // namespace cuemu

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
    cuemu::initialise_barrier(barrier, count, cuemu::here());
}
__device__ __forceinline__ void fence_mbarrier_init() {
    for (cuemu::Barrier& b : cuemu::state_of(*cuemu::block).barriers)
        if (b.initialised_by == cuemu::current) b.fenced = true;
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    cuemu::arrive(*cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.arrive"), cuemu::here());
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    cuemu::Barrier& b = *cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.arrive.expect_tx");
    cuemu::expect_tx(b, bytes, cuemu::here());
    cuemu::arrive(b, cuemu::here());
}
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) { return cuemu::try_wait(barrier, parity); }
__device__ __forceinline__ bool mbarrier_test_wait(unsigned barrier, unsigned parity) {
    const cuemu::Barrier& b = *cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.test_wait");
    if (!cuemu::is_over(b, parity)) cuemu::yield();
    return cuemu::is_over(b, parity);
}
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
    cuemu::Barrier* b = cuemu::find_barrier(*cuemu::block, barrier, "cp.async.mbarrier.arrive");
    cuemu::under_way.push_back(std::make_unique<cuemu::CopiesArrive>(b, cuemu::here()));
}
__device__ __forceinline__ void tma_load_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier) {
    cuemu::copy_box(*cuemu::block, dst, map, c0, c1, c2, barrier, cuemu::here());
}
__device__ __forceinline__ void tma_load_multicast_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier,
                                                      unsigned short cta_mask) {
    if (!cta_mask || cta_mask >> cuemu::launch.cluster_blocks)
        CUEMU_FAIL("multicast to CTAs 0x%x of a cluster of %u", unsigned(cta_mask), unsigned(cuemu::launch.cluster_blocks));
    for (unsigned rank = 0; rank < cuemu::launch.cluster_blocks; ++rank)
        if (cta_mask >> rank & 1) cuemu::copy_box(cuemu::block->cluster[rank], dst, map, c0, c1, c2, barrier, cuemu::here());
}
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned block) {
    if (block >= cuemu::launch.cluster_blocks || address >> cuemu::RANK_SHIFT)
        CUEMU_FAIL("mapa: address 0x%x in block %u of a cluster of %u", address, block, unsigned(cuemu::launch.cluster_blocks));
    return address | (block + 1) << cuemu::RANK_SHIFT;
}
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    cuemu::Block& of = cuemu::split_cluster_address(barrier, "mbarrier.arrive.shared::cluster");
    cuemu::arrive(*cuemu::find_barrier(of, barrier, "mbarrier.arrive.shared::cluster"), cuemu::here());
}
__device__ __forceinline__ void store_async(unsigned address, int v, unsigned barrier) {
    if (cuemu::launch.cluster_blocks < 2) CUEMU_FAIL("st.async in a kernel that has no clusters");
    cuemu::Block& of = cuemu::split_cluster_address(address, "st.async");
    if (&cuemu::split_cluster_address(barrier, "st.async") != &of) CUEMU_FAIL("st.async: data and mbarrier in different blocks");
    cuemu::Barrier* b = cuemu::find_barrier(of, barrier, "st.async");
    cuemu::under_way.push_back(std::make_unique<cuemu::RemoteStore>(b, cuemu::here(), address, v));
}
__device__ __forceinline__ void cluster_arrive() {
    cuemu::ThreadState& me = cuemu::state_of(*cuemu::current);
    cuemu::BlockState& s = cuemu::state_of(*cuemu::block->cluster);
    if (me.cluster_arrived) CUEMU_FAIL("barrier.cluster.arrive twice without barrier.cluster.wait");
    me.cluster_arrived = true, me.cluster_generation = s.cluster_generation;
    ++s.cluster_arrived;
    cuemu::settle_cluster();
}
__device__ __forceinline__ void cluster_wait() { cuemu::wait_for_cluster(); }

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() { cuemu::set_registers(REGISTERS, false, cuemu::here()); }
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() { cuemu::set_registers(REGISTERS, true, cuemu::here()); }

__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    cuemu::StoreOperand mine = {cuemu::shared_at(address, 16, "stmatrix_x4"), {r0, r1, r2, r3}};
    cuemu::collective("stmatrix_x4", ~0u, &mine, cuemu::store_matrices);
}
__device__ __forceinline__ uint4 load_shared_16(unsigned address) {
    uint4 v;
    memcpy(&v, cuemu::shared_at(address, 16, "load_shared_16"), 16);
    return v;
}
__device__ __forceinline__ void store_shared_4(unsigned address, float v) {
    memcpy(cuemu::shared_at(address, 4, "store_shared_4"), &v, 4);
}
__device__ __forceinline__ void store_global_vector(void* p, uint4 v) { store_global_16(p, v); }

template <class T>
__device__ __forceinline__ T* add_product(T* p, unsigned a, unsigned b) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + uint64(a) * b);
}

__device__ __forceinline__ void named_barrier(int id, int threads) { cuemu::wait_at_named(id, threads); }

__device__ __forceinline__ void wgmma_fence() { cuemu::state_of(*cuemu::current).fenced = true; }
__device__ __forceinline__ void wgmma_commit() { ++cuemu::state_of(*cuemu::current).groups; }
template <int N>
__device__ __forceinline__ void wgmma_wait() { cuemu::wait_for_products(N); }

template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_bf16(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    cuemu::issue_product(d, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_bf16);
}
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_fp16(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    cuemu::issue_product(d, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_fp16);
}
