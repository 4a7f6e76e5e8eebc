// Blocks and clusters: their shared memory, and the order in which their threads run. cuemu_launch runs a grid, a cluster of
// blocks after the other or several in turns. Races between the points at which fibres wait show only under some orders,
// which the launch seed varies.
#include "blocks.h"

#include <link.h>
#include <sys/mman.h>

#include <csignal>
#include <numeric>

alignas(1024) thread_local unsigned char dynamic_shared[DYNAMIC_SHARED_BYTES];

namespace cuemu {

// Runs on the signal stack and leaves it by switching to the scheduler, hence SA_NODEFER.
static void on_fault(int signal_number, siginfo_t* info, void* context) {
    if (!current) return static_cast<void>(signal(signal_number, SIG_DFL));
    const void* pc = nullptr;
#if defined(__x86_64__)
    pc = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    pc = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
    if (signal_number == SIGFPE) fail_at(pc, "integer division by zero");
    if (signal_number == SIGSEGV || signal_number == SIGBUS)
        fail_at(pc, "invalid access to address %p (out of bounds, null, or the stack is full)", info->si_addr);
    fail_at(pc, "undefined behaviour: misaligned access, array index, shift count or signed overflow");
}

struct FaultHandlers {
    static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    struct sigaction old_actions[5], action = {};
    stack_t old_stack, stack = {};
    FaultHandlers() {
        static unsigned char memory[64 * 1024];
        stack.ss_sp = memory, stack.ss_size = sizeof memory;
        sigaltstack(&stack, &old_stack);
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], &action, &old_actions[i]);
    }
    ~FaultHandlers() {
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], &old_actions[i], nullptr);
        sigaltstack(&old_stack, nullptr);
    }
};

static Range shared_block() {  // this library's TLS: dynamic_shared and every __shared__ variable
    dynamic_shared[0] = 0;      // TLS of a loaded library is allocated at first touch
    Range found = {};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* result) {
            unsigned char* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr)& header = info->dlpi_phdr[i];
                if (header.p_type == PT_TLS && begin && begin <= dynamic_shared && dynamic_shared < begin + header.p_memsz)
                    *static_cast<Range*>(result) = {begin, begin + header.p_memsz};
            }
            return 0;
        },
        &found);
    return found;
}

uint64_t random_number() {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

static std::vector<unsigned> numbers(size_t n) {
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0u);
    return order;
}

static void shuffle(std::vector<unsigned>& order) {
    for (size_t i = order.size(); i > 1 && launch.seed; --i) std::swap(order[i - 1], order[random_number() % i]);
}

// The parts of `shared_range` that belong to a block: all but what lies past the launch's dynamic shared memory.
static void swap_shared(Block& with, bool out) {
    unsigned char* const past = dynamic_shared + launch.shared_bytes;
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    const size_t first = past - shared_range.begin, second = shared_range.end - end;
    with.saved.resize(first + second);
    unsigned char *const one = with.saved.data(), *const two = one + first;
    memcpy(out ? one : shared_range.begin, out ? shared_range.begin : one, first);
    memcpy(out ? two : end, out ? end : two, second);
}

static void give_turn(Block& to) {
    if (block == &to) return;
    if (block) swap_shared(*block, true);
    swap_shared(to, false);
    block = &to;
}

// Where a byte of a block's shared memory is now, by its address in shared_range.
unsigned char* in_block(const Block& of, unsigned char* p) {
    if (&of == block) return p;
    unsigned char* const past = dynamic_shared + launch.shared_bytes;
    unsigned char* const saved = const_cast<unsigned char*>(of.saved.data());
    if (p < past) return saved + (p - shared_range.begin);
    return saved + (past - shared_range.begin) + (p - (dynamic_shared + sizeof dynamic_shared));
}

static void start_block(Block& b, unsigned number, Block* cluster) {
    b.index = {number % grid_dim.x, number / grid_dim.x % grid_dim.y, number / grid_dim.x / grid_dim.y};
    b.cluster = cluster, b.rank = &b - cluster;
    b.alive = threads, b.at_barrier = b.stall = 0;
    b.place = &b - blocks, b.fibres = fibres + b.place * threads;
    give_turn(b);
    memset(shared_range.begin, 0xff, dynamic_shared + launch.shared_bytes - shared_range.begin);
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    memset(end, 0xff, shared_range.end - end);
    for (unsigned first = 0; first < threads; first += 32)
        b.warps[first / 32].alive = ~0u >> (32 - std::min(32u, threads - first)), b.warps[first / 32].num_groups = 0;
    for (unsigned i = 0; i < threads; ++i) {
        Fibre& f = b.fibres[i];
        f.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
        f.id = i, f.state = READY, f.commits = f.landed = 0, f.block = &b;
        f.copies.clear();
        // Equal stack offsets would put all fibres' hot lines into the same cache sets.
        f.context.start(launch.stacks + (&f - fibres) * STACK_BYTES + PAGE, STACK_BYTES - PAGE - i % 32 * 512, fibre_main);
    }
    if (on_block_start) on_block_start(b);
}

// Without a seed warps go in step. With one, some passes let a warp run as far as it can, and others leave a warp behind,
// which shows missing barriers that lockstep hides.
static bool run_pass(Block& b) {
    static std::vector<unsigned> warp_order, lane_order;
    warp_order = numbers((threads + 31) / 32), lane_order = numbers(32);
    shuffle(warp_order);
    shuffle(lane_order);
    bool progress = false, ran;
    const bool ahead = launch.seed && random_number() % 4 == 0;
    if (b.stall)
        --b.stall;
    else if (launch.seed && random_number() % 16 == 0)
        b.stalled = random_number() % warp_order.size(), b.stall = random_number() % 64;
    for (const unsigned w : warp_order) {
        if (b.stall && w == b.stalled) continue;
        do {
            ran = false;
            for (unsigned i : lane_order) {
                i += 32 * w;
                if (i >= threads || b.fibres[i].state != READY) continue;
                ran = progress = true;
                current = &b.fibres[i];
                scheduler.switch_to(current->context);
                current = nullptr;
                if (failed) return true;
            }
        } while (ran && ahead);
    }
    return progress;
}

// Completes all the work that threads wait for, or under a seed some of it. Returns whether there was any.
static bool complete_awaited() {
    std::vector<unsigned> found;
    bool all_yield = true;
    for (unsigned i = 0; i < under_way.size(); ++i)
        if (under_way[i]->awaited()) found.push_back(i), all_yield = all_yield && under_way[i]->yields();
    if (found.empty()) return false;
    shuffle(found);
    if (launch.seed) found.resize(1 + random_number() % found.size());
    std::vector<Async*> chosen;
    for (const unsigned i : found)
        if (launch.seed || all_yield || !under_way[i]->yields()) chosen.push_back(under_way[i]), under_way[i] = nullptr;
    under_way.erase(std::remove(under_way.begin(), under_way.end(), nullptr), under_way.end());
    for (Async* work : chosen) {
        if (!failed) work->complete();
        delete work;
    }
    return true;
}

static bool written_outside() {
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    unsigned char* outside = dynamic_shared + (launch.shared_bytes + 1) / 2 * 2;
    if (!memcmp(outside, &OUTSIDE, 2) && !memcmp(outside, outside + 2, end - outside - 2)) return false;
    while (!memcmp(outside, &OUTSIDE, 2)) outside += 2;
    snprintf(error + begin_report(), 200, "dynamic shared memory was written at byte %td, the launch gave %zu",
             outside - dynamic_shared, size_t(launch.shared_bytes));
    return true;
}

// A block's turn: until none of its threads can go on, or under a seed for some passes.
static bool take_turn(Block& b) {
    give_turn(b);
    bool progress = false;
    while (b.alive && run_pass(b)) {
        progress = true;
        if (failed || (launch.seed && random_number() % 8 == 0)) break;
    }
    if (!failed && !b.alive && progress && !written_outside() && on_block_end) on_block_end(b);
    return progress;
}

static void run_grid() {
    const FaultHandlers handlers;
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    unsigned char* const outside = dynamic_shared + (launch.shared_bytes + 1) / 2 * 2;
    std::fill(reinterpret_cast<uint16_t*>(outside), reinterpret_cast<uint16_t*>(end), OUTSIDE);
    block = nullptr;
    for (const Async* work : under_way) delete work;
    under_way.clear();
    const unsigned of_cluster = launch.cluster_blocks;
    std::vector<unsigned> clusters = numbers(size_t(grid_dim.x) * grid_dim.y * grid_dim.z / of_cluster);
    shuffle(clusters);
    std::reverse(clusters.begin(), clusters.end());
    const size_t room = std::min(MAX_BLOCKS, MAX_FIBRES / threads) / of_cluster;
    std::vector<Block*> free_places, running;  // a cluster's first block; blocks
    for (size_t i = 0; i < std::min<size_t>(room, launch.clusters_at_once); ++i) free_places.push_back(blocks + i * of_cluster);
    while (!clusters.empty() || !running.empty()) {
        while (!clusters.empty() && !free_places.empty()) {
            for (unsigned rank = 0; rank < of_cluster; ++rank) {
                start_block(free_places.back()[rank], clusters.back() * of_cluster + rank, free_places.back());
                running.push_back(free_places.back() + rank);
            }
            clusters.pop_back(), free_places.pop_back();
        }
        std::vector<unsigned> order = numbers(running.size());
        shuffle(order);
        bool progress = false;
        for (const unsigned i : order) {
            progress |= take_turn(*running[i]);
            if (failed) return;
        }
        if (!progress || (launch.seed && random_number() % 4 == 0)) progress |= complete_awaited();
        if (failed) return;
        for (Block* b : running)
            if (!progress && b->stall) b->stall = 0, progress = true;
        if (!progress) return report_deadlock(running);
        for (size_t i = 0; i < running.size(); i += of_cluster) {
            const auto first = running.begin() + i;
            if (std::any_of(first, first + of_cluster, [](const Block* b) { return b->alive; })) continue;
            free_places.push_back(*first);
            running.erase(first, first + of_cluster);
            i -= of_cluster;
        }
    }
}

#define CUEMU_EXPORT extern "C" __attribute__((visibility("default")))

// The stacks of a block, each over a page without access; null where memory is short.
CUEMU_EXPORT unsigned char* cuemu_stacks() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, MAX_FIBRES * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    for (unsigned i = 0; i < MAX_FIBRES; ++i) mprotect(static_cast<unsigned char*>(p) + i * STACK_BYTES, PAGE, PROT_NONE);
    return static_cast<unsigned char*>(p);
}

// Returns null or an error text. Not reentrant: the driver holds a lock.
CUEMU_EXPORT const char* cuemu_launch(const Launch* description) {
    launch = *description;
    grid_dim = launch.grid, block_dim = launch.block;
    threads = block_dim.x * block_dim.y * block_dim.z;
    random_state = launch.seed;
    failed = false;
    shared_range = shared_block();
    if (!launch.stacks || reinterpret_cast<uintptr_t>(dynamic_shared) % 1024)
        return "the emulator got no stacks, or shared memory off its 1024-byte alignment";
    run_grid();
    return failed ? error : nullptr;
}

}  // namespace cuemu
