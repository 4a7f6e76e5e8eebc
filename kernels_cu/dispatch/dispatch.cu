// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in the three steps of
// its section 4.2. It needs no sort, and equal inputs give equal lists: an expert's tokens are in the order of slots.
//
//   slot       one of a token's k choices, num_slots = L*k in all
//   part       part_slots consecutive slots, which a block of dispatch_route works on together
//   run        the consecutive slots of a part that one thread counts, in a column of counters of its own
//   rank       how many slots of the run before this one have the same expert
//   place      index of a slot among the slots of the part, sorted by expert
//   position   index of a slot in expert_token_indices
//
//   step of the paper            here
//   1 dense token-expert map     Not in memory: it has L*E cells. A matrix of counters in shared memory takes its place.
//                                It has a row per expert, one more for "none", and C columns. A column is the dense map of
//                                a run of slots, summed: it counts the slots of its run per expert.
//   2 expert lengths             dispatch_count: each block (CTA) counts its slots per expert and sums the rows of its
//                                matrix into block_counts. dispatch_route: every block sums block_counts over all blocks,
//                                which gives the lengths, and over the blocks before it. The exclusive prefix sums of the
//                                lengths are expert_token_offsets.
//   3 route indices to gates     dispatch_route. The paper's location map is token_index_map. A slot's position is the sum
//                                of the expert's offset, the expert's slots in earlier blocks and parts, its slots in
//                                earlier runs of the part (the exclusive prefix sum along its matrix row), and the rank.
//                                Each thread finds ranks by counting its run in the order of slots: the rank is what the
//                                counter held before. Then tokens go to their positions in expert_token_indices.
//
// dispatch_route works on its block_slots slots in parts of part_slots. Its phases, with a barrier of the block between:
//   store_rows          loads ids and stores the matrix row of every slot; clears the matrix
//   rank_run            C threads count their runs and rank their slots. In the first part other threads run sum_blocks.
//   sum_matrix_rows     the prefix sums of the counters along each row. In the first part add_groups adds up what the
//                       groups of threads of sum_blocks have found.
//   scan_lists          prefix sums over experts, each by one warp
//   add_starts          every counter becomes the place of the first slot that its run has of its expert
//   place_slots         all threads add the counters to the ranks, which gives the places
//   write_map           token_index_map, and the slots in the order of places. In the first part write_schedule writes the
//                       lists that depend on the lengths alone.
//   write_tokens        expert_token_indices, in the order of places, so that neighbouring threads mostly write neighbouring
//                       elements. A single 4-byte store would cost a 32-byte sector of the L2 cache.
// Slots without an expert have the last places and are not written.
//
// Atomics act on integers in shared memory only. In dispatch_count they are sums, the same in any order. In dispatch_route
// each half word belongs to one thread, which adds to it in the order of its slots.
//
// Shared memory, E' = E rounded up to a multiple of 4, G = counted_together, C = columns:
//   dispatch_count    matrix (G, E+1, C) uint32
//   dispatch_route    lists counts (E), offsets, tiles, to_position (E+1 each), starts (E+2) int32; padding to 16 bytes
//                     matrix (E+1, C/2) uint32 of two 16-bit counters; scratch (groups, E', 2) int32, none for one group
//                       over both, once they have been read: by_place (part_slots) uint32
//                     by_slot (part_slots) uint32
//
// Launch, see launch_config.dispatch: B blocks of dispatch_route, before it ceil(B/G) blocks of dispatch_count, G being
// 1 or 2; dispatch_count is left out where one part holds all slots. Both have 512 or 1024 threads. E <= MAX_EXPERTS.
//   dispatch_count    C is a power of two of 4 to 32. Where ids are int64 it writes token_expert_indices, and
//                     dispatch_route reads that in place of ids.
//   dispatch_route    C is a power of two of 8 to 128, C * (E + 1) / 8 is at most HELD_PIECES per thread, and 32 threads or
//                     more remain beside the C that count. part_slots < 65536; part_slots / C is 2 more than a multiple
//                     of 4.
#include "dispatch_count.cuh"
#include "dispatch_route.cuh"

static_assert(4 * MAX_EXPERTS < 65536, "4 * the row of an expert is half a word, beside a rank, a place or a slot");
static_assert((65536ull + MAX_K) * MAX_K < 1ull << 32, "slot / k by a 32-bit reciprocal is exact");
static_assert(MIN_COLUMNS % 8 == 0 && MIN_COUNT_COLUMNS % 4 == 0, "a lane reads 16 bytes of counters");
static_assert(MAX_BLOCK_THREADS <= 1024, "threads of a block");
static_assert(MIN_GROUPS >= 2, "one group writes its sums where they belong, and has no scratch memory");

#define DISPATCH(NAME, ID)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS) dispatch_count_##NAME(const DispatchCountParams<ID> p) { \
        count(p);                                                                                                            \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS) dispatch_route_##NAME(const DispatchRouteParams<ID> p) { \
        route(p);                                                                                                            \
    }

DISPATCH(int32, int)
DISPATCH(int64, long long)
