// The state of mbarriers, warpgroups and clusters, for mbarrier.cc, wgmma.cc and ptx_sm90.cc.
#pragma once
#include "cuemu.h"
#include "ptx_sm90.cuh"

#pragma GCC visibility push(hidden)
namespace cuemu {

// From a fibre, which ends here, or from work that goes on beside them.
#define CUEMU_REPORT(pc, ...) (cuemu::complain(pc, __VA_ARGS__), cuemu::leave_if_fibre())
inline void leave_if_fibre() {
    if (current) leave();
}

struct Barrier {
    Block* of;
    unsigned number, address, count, pending, phase;  // phase: how many are complete
    long tx;                                           // bytes that are announced and have not come
    bool fenced;
    const Fibre* initialised_by;
    const void* pc;
    std::vector<Fibre*> waiting;
};

struct NamedBarrier { unsigned threads = 0, arrived = 0; std::vector<Fibre*> waiting; };

// The product of one wgmma. Rows of A and B as they lie in shared memory, at the issue; then the result.
struct Product {
    uint64 a, b;
    bool a_transposed, b_transposed, a_in_registers, done;
    unsigned columns;
    float (*to_float)(unsigned short);  // null: of e4m3, twice as many along K
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
    NamedBarrier named[16];
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
    unsigned fragments;   // of the accumulators
    float values[32][4];  // of the accumulators while they are in flight
    std::vector<Pending> pending;
};

extern BlockState block_states[MAX_BLOCKS];
extern ThreadState thread_states[MAX_FIBRES];
inline BlockState& state_of(const Block& b) { return block_states[b.place]; }
inline ThreadState& state_of(const Fibre& f) { return thread_states[&f - fibres]; }

void wait_for_event(const char* name, unsigned what, void* pc, void (*describe)(const Fibre&, char*, size_t));
void wake(std::vector<Fibre*>& waiting);

// A block's exit while a copy to it, or from it, is under way is reported at its end.
struct ToBarrier : Async {
    Barrier* barrier;
    const void* pc;
    ToBarrier(Barrier* barrier, const void* pc) : barrier(barrier), pc(pc) { of = barrier->of; }
    bool awaited() const override { return !barrier->waiting.empty(); }
};

}  // namespace cuemu
#pragma GCC visibility pop
