// Lists the experts of each rank apart, in the order of experts_by_load, for weight gradients that are summed where a rank has
// the weights (grouped_wgrad_sm90.cu). Rank r has experts r * E / P to (r + 1) * E / P, and counts them from 0. The paper has
// one GPU.
//
// Launch: P blocks of THREADS threads, one for each rank.
#include "common.cuh"

static_assert(THREADS == 32, "a block is one warp");

struct RankExpertsParams {
    const int* experts_by_load;  // (E,) int32, in: experts by falling number of rows
    int* rank_experts;           // (P, E / P) int32, out: the experts of each rank, in the same order, from 0
    int num_experts, each;       // E, E / P
};

extern "C" __global__ void __launch_bounds__(THREADS) rank_experts(const RankExpertsParams p) {
    const int lane = threadIdx.x, rank = blockIdx.x;
    int* out = p.rank_experts + rank * p.each;
    for (int first = 0; first < p.num_experts; first += 32) {
        const int expert = first + lane < p.num_experts ? p.experts_by_load[first + lane] : -1;
        const bool own = expert >= rank * p.each && expert < (rank + 1) * p.each;
        const unsigned owned = __ballot_sync(~0u, own);
        if (own) out[__popc(owned & ((1u << lane) - 1))] = expert - rank * p.each;
        out += __popc(owned);
    }
}
