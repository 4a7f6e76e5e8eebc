// Threads as fibres, which run until they reach a barrier or a collective that others have not reached. What they wait for,
// and reports of errors.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#pragma GCC visibility push(hidden)  // for declarations too

namespace cuemu {

constexpr size_t STACK_BYTES = 64 * 1024, PAGE = 4096;
constexpr unsigned MAX_THREADS = 1024, MAX_FIBRES = 2 * MAX_THREADS, MAX_BLOCKS = 8;
constexpr uint16_t OUTSIDE = 0x7fc1;  // shared memory past the launch's size: NaN as fp32, bf16 and fp16

#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
// swapcontext makes a system call per switch; this saves the callee-saved registers and nothing else.
extern "C" void cuemu_switch(void** save, void* to);
struct Context {
    void* sp;
    void start(unsigned char* stack, size_t bytes, void (*entry)()) {
        void** top = reinterpret_cast<void**>(stack + bytes);
        top[-2] = reinterpret_cast<void*>(entry);  // `ret` leaves the stack pointer 8 off 16, as a call would
        std::fill(top - 8, top - 2, nullptr);
        sp = top - 8;
    }
    void switch_to(Context& to) { cuemu_switch(&sp, to.sp); }
};
#else
struct Context {
    ucontext_t state;
    void start(unsigned char* stack, size_t bytes, void (*entry)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = stack, state.uc_stack.ss_size = bytes, state.uc_link = nullptr;
        makecontext(&state, entry, 0);
    }
    void switch_to(Context& to) { swapcontext(&state, &to.state); }
};
#endif

struct Index { unsigned x, y, z; };
struct Range { unsigned char *begin, *end; };
struct Copy { unsigned group, size; unsigned char *dst, data[16]; };  // a cp.async that no wait has retired
using Complete = void (*)(void* const* operands, unsigned lanes);

struct Launch {  // mirrored by the Python driver
    void (*call)(const void* params);
    const char* name;
    const void* params;  // the struct that the kernel takes
    const Range* arrays;
    unsigned char* stacks;
    uint64_t num_arrays, shared_bytes, seed, cluster_blocks, clusters_at_once;
    Index grid, block;
};

enum State { READY, AT_COLLECTIVE, AT_BARRIER, AT_EVENT, EXITED };
struct Block;
struct Fibre {
    Context context;
    Index index;
    unsigned id, commits, mask, landed;  // landed: how many of its copies
    State state;
    const char* at;  // what it waits for (under `mask`), called from `pc`
    void* pc;
    Block* block;
    void (*describe)(const Fibre&, char* text, size_t size);  // AT_EVENT: more of what it waits for
    std::vector<Copy> copies;
};
// Lanes that arrived at a collective under one mask. Lanes under disjoint or nested masks may wait in
// several groups at once.
struct Group { unsigned mask, arrived; const char* name; Complete complete; };
struct Warp { unsigned alive, num_groups; Group groups[32]; void* operands[32]; };

// A block that runs, in one of MAX_BLOCKS places. Its shared memory lies in `saved` while another block has its turn.
struct Block {
    Index index;
    unsigned place, rank, alive, at_barrier;  // rank: in its cluster
    unsigned stalled, stall;  // a warp that does not run for so many passes more
    Fibre* fibres;
    Warp warps[MAX_THREADS / 32];
    std::vector<unsigned char> saved;
    Block* cluster;  // the first of the cluster's blocks, which have neighbouring places
};

// Work that goes on beside the threads: copies, products of the tensor cores. It completes as late as can be, when no
// thread can go on; under a seed sometimes earlier.
struct Async {
    Block* of;  // whose shared memory it reads or writes
    virtual ~Async() = default;
    virtual bool awaited() const = 0;  // by some thread
    virtual bool yields() const { return false; }  // without a seed, to all that do not
    virtual void complete() = 0;
};

extern Fibre fibres[MAX_FIBRES];
extern Fibre* current;  // null while the scheduler runs
extern Block blocks[MAX_BLOCKS];
extern Block* block;  // whose turn it is
extern std::vector<Async*> under_way;
extern void (*on_block_start)(Block&);  // of the Hopper tier
extern void (*on_block_end)(Block&);
extern void (*on_thread_end)(Fibre&);
extern Context scheduler;
extern Launch launch;
extern Index block_dim, grid_dim;
extern Range shared_range;
extern unsigned threads;
extern uint64_t random_state;
extern bool failed;
extern char error[4096];

// The Python driver turns "[pc+0x...]" into file and line.
size_t append_pc(char* text, size_t size, const void* pc);

#define CUEMU_APPEND(...) n += snprintf(error + n, sizeof error - n, __VA_ARGS__)
size_t begin_report();

// Ends the launch with an error, from the scheduler or from a fibre, which then has to leave. The first error is kept.
__attribute__((format(printf, 2, 3))) void complain(const void* pc, const char* format, ...);

[[noreturn]] void leave();  // a fibre, never to be resumed

// As complain(), from a fibre.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail_at(const void* pc, const char* format, ...);

// A return address may belong to the line after the call.
inline const void* before(const void* return_address) { return static_cast<const char*>(return_address) - 1; }
const void* here();
#define CUEMU_FAIL(...) cuemu::fail_at(cuemu::here(), __VA_ARGS__)

void wait_as(State state, const char* name, unsigned mask, void* pc);

// Posts `operand` and returns once all lanes of `mask` that have not exited arrived under that mask; the
// last to arrive has called `complete` on everyone's operands, which live on the lanes' own stacks.
void collective(const char* name, unsigned mask, void* operand, Complete complete);

void barrier();  // __syncthreads

void fibre_main();
void report_deadlock(const std::vector<Block*>& running);

// A kernel, which takes one struct by value. The Python driver adds an Entry for each to the preprocessed source.
struct Entry { void (*call)(const void* params); uint64_t params_bytes; };
template <class Params>
constexpr uint64_t bytes_of(void (*)(Params)) { return sizeof(Params); }
template <auto KERNEL>
struct Call;
template <class Params, void (*KERNEL)(Params)>
struct Call<KERNEL> {
    static void with(const void* params) { KERNEL(*static_cast<const Params*>(params)); }
};

}  // namespace cuemu

#pragma GCC visibility pop
