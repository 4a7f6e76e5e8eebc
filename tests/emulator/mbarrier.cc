// mbarriers, and the copies that arrive on them. A copy's destination holds poison from its issue until it is delivered, which
// is as late as can be: when a thread waits for its barrier.
#include "mbarrier.h"

namespace cuemu {

constexpr uint64 BARRIER_COOKIE = 0x6d62617272000000ull;  // with the barrier's number, what its 8 bytes hold

BlockState block_states[MAX_BLOCKS];
ThreadState thread_states[MAX_FIBRES];

void wait_for_event(const char* name, unsigned what, void* pc, void (*describe)(const Fibre&, char*, size_t)) {
    current->describe = describe;
    wait_as(AT_EVENT, name, what, pc);
}

void wake(std::vector<Fibre*>& waiting) {
    for (Fibre* f : waiting) f->state = READY;
    waiting.clear();
}

// A byte of a block's shared memory, by the address that the block's own threads have.
static unsigned char* shared_of(Block& of, unsigned address, unsigned bytes, const char* what, const void* pc) {
    return in_block(of, shared_at(address, bytes, what, pc));
}

Block& split_cluster_address(unsigned& address, const char* what, const void* pc) {
    const unsigned rank = (address >> RANK_SHIFT) - 1;
    if (rank >= launch.cluster_blocks) fail_at(pc, "%s: 0x%x is not an address of a block in the cluster", what, address);
    address &= (1u << RANK_SHIFT) - 1;
    Block& of = block->cluster[rank];
    if (!of.alive) fail_at(pc, "%s: block %u of the cluster has exited", what, rank);
    return of;
}

Barrier* find_barrier(Block& of, unsigned address, const char* what, const void* pc) {
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
    return n + snprintf(text + n, size - n, ") in phase %u, parity %u, lacks %u of %u arrivals and %ld bytes", b.phase,
                        b.phase & 1, b.pending, b.count, b.tx);
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

void arrive(Barrier& b, const void* pc) {
    if (!b.pending) {
        CUEMU_REPORT(pc, "mbarrier %u (shared address %u), phase %u: an arrival beyond its %u", b.number, b.address, b.phase,
                     b.count);
        return;
    }
    --b.pending;
    settle(b, pc);
}

static void complete_tx(Barrier& b, unsigned bytes, const void* pc) {
    b.tx -= bytes;
    settle(b, pc);
}

void initialise_barrier(unsigned address, unsigned count, const void* pc) {
    if (count < 1 || count >= 1u << 20) fail_at(pc, "mbarrier.init: a count of %u", count);
    auto& barriers = state_of(*block).barriers;
    for (const Barrier& b : barriers)
        if (b.address == address)
            fail_at(pc, "mbarrier.init: the mbarrier at shared address %u is initialised already", address);
    const unsigned number = barriers.size();
    const uint64 word = BARRIER_COOKIE + number;
    memcpy(shared_at(address, 8, "mbarrier.init", pc), &word, 8);
    barriers.push_back({block, number, address, count, count, 0, 0, false, current, pc, {}});
}

void fence_barriers() {
    for (Barrier& b : state_of(*block).barriers)
        if (b.initialised_by == current) b.fenced = true;
}

void expect_tx(Barrier& b, unsigned bytes, const void* pc) {
    b.tx += bytes;
    if (b.tx >= 1 << 20) fail_at(pc, "mbarrier.arrive.expect_tx: %ld bytes outstanding, at most %d", b.tx, (1 << 20) - 1);
}

bool is_over(const Barrier& b, unsigned parity, const void* pc) {
    if (parity > 1) fail_at(pc, "mbarrier wait: parity is %u", parity);
    return (b.phase & 1) != parity;
}

static void describe_wait(const Fibre& f, char* text, size_t size) {
    const size_t n = snprintf(text, size, ": parity %u of ", state_of(f).parity);
    describe_barrier(*state_of(f).barrier, text + n, size - n);
}

void yield() { current->context.switch_to(scheduler); }

bool try_wait(unsigned address, unsigned parity) {
    void* pc = __builtin_return_address(0);
    Barrier& b = *find_barrier(*block, address, "mbarrier.try_wait", before(pc));
    if (is_over(b, parity, before(pc))) return true;
    if (launch.seed && random_number() % 8 == 0) {  // its time limit is over
        yield();
        return is_over(b, parity, before(pc));
    }
    b.waiting.push_back(current);
    state_of(*current).barrier = &b, state_of(*current).parity = parity;
    wait_for_event("mbarrier.try_wait", b.number * 2 + parity, pc, describe_wait);
    return is_over(b, parity, before(pc));
}

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

void arrive_after_copies(Barrier& b, const void* pc) { under_way.push_back(new CopiesArrive(&b, pc)); }

struct RemoteStore : ToBarrier {
    unsigned address;
    int value;
    RemoteStore(Barrier* barrier, const void* pc, unsigned address, int value)
        : ToBarrier(barrier, pc), address(address), value(value) {
        memset(shared_of(*of, address, 4, "st.async", pc), 0xff, 4);
    }
    void complete() override {
        memcpy(shared_of(*of, address, 4, "st.async", pc), &value, 4);
        complete_tx(*barrier, 4, pc);
    }
};

void store_remote(Barrier& b, unsigned address, int value, const void* pc) {
    under_way.push_back(new RemoteStore(&b, pc, address, value));
}

struct BoxCopy : ToBarrier {
    const unsigned dst;
    const TensorMap map;
    const int at[3];
    std::vector<unsigned char> held;  // the source at the issue
    unsigned line_bytes() const { return map.box[0] * map.itemsize; }
    unsigned lines() const { return map.box[1] * map.box[2]; }
    unsigned bytes() const { return line_bytes() * lines(); }

    BoxCopy(Barrier* barrier, const void* pc, unsigned dst, const TensorMap& map, int c0, int c1, int c2)
        : ToBarrier(barrier, pc), dst(dst), map(map), at{c0, c1, c2}, held(source()) {}

    std::vector<unsigned char> source() const {
        std::vector<unsigned char> box(bytes());
        for (unsigned line = 0; line < lines(); ++line) {
            const long long y = at[1] + static_cast<long long>(line % map.box[1]);
            const long long z = at[2] + static_cast<long long>(line / map.box[1]);
            const long long first = std::max(at[0], 0), last = std::min<long long>(at[0] + map.box[0], map.shape[0]);
            if (y < 0 || z < 0 || uint64(y) >= map.shape[1] || uint64(z) >= map.shape[2] || first >= last) continue;
            const char* from = reinterpret_cast<const char*>(map.pointer) + first * map.itemsize + y * map.strides[0] + z * map.strides[1];
            if (!check_global_at(pc, from, (last - first) * map.itemsize, map.itemsize, "cp.async.bulk.tensor")) break;
            memcpy(box.data() + line * line_bytes() + (first - at[0]) * map.itemsize, from, (last - first) * map.itemsize);
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
        for (const Async* other : under_way) {
            const BoxCopy* copy = dynamic_cast<const BoxCopy*>(other);
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

void copy_box(Block& of, unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier, const void* pc) {
    if (!of.alive) CUEMU_REPORT(pc, "cp.async.bulk.tensor: block %u of the cluster has exited", of.rank);
    auto* copy = new BoxCopy(find_barrier(of, barrier, "cp.async.bulk.tensor", pc), pc, dst, *map, c0, c1, c2);
    copy->issue();
    if (failed) leave();
    under_way.push_back(copy);
}

}  // namespace cuemu
