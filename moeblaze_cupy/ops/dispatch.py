"""The three dispatch steps of the paper's section 4.2: kernels_cu/dispatch.cu."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.structures import DispatchIndices


def dispatch(context: Context, ids: Array, num_experts: int) -> DispatchIndices:
    """Index lists from ids (L, k), int32 or int64; see `DispatchIndices`."""
    num_slots, k = ids.size, ids.shape[1]
    config = launch_config.dispatch(num_slots, num_experts, loader.device_limits(context.device))
    copies_ids = ids.dtype == "int64"
    expert_token_indices = context.empty((num_slots,), "int32")
    expert_token_offsets = context.empty((num_experts + 1,), "int32")
    token_index_map = context.empty(ids.shape, "int32")
    row_tiles = context.empty((launch_config.max_row_tiles(num_slots, num_experts) + 1, 2), "int32")
    token_expert_indices = context.empty((num_slots,), "int32") if copies_ids else None
    # pairs of uint16; ranks are read four at a time
    ranks = context.empty((2 * launch_config.ceil_div(num_slots, 4),), "int32")
    range_counts = context.empty((config.range_counts(num_experts) // 2,), "int32")
    block_counts = context.empty((config.blocks, num_experts), "int32")
    copied_ids = token_expert_indices.ptr if copies_ids else 0
    counts = (ranks.ptr, range_counts.ptr, block_counts.ptr)

    lists = (expert_token_indices.ptr, expert_token_offsets.ptr, token_index_map.ptr, row_tiles.ptr)
    geometry = (config.ranges, config.range_slots, config.parts)

    def launch(entry: str, threads: int, args: tuple, shared_bytes: int) -> None:
        loader.launch(context, loader.Variant("dispatch.cu", entry), (config.blocks,), threads, args, shared_bytes)

    count = (ids.ptr, copied_ids, *counts)
    route = (num_slots, k, num_experts, *geometry, launch_config.TILE_ROWS)
    if config.blocks == 1 and not copies_ids:
        launch("dispatch_block_int32", config.route_threads, (*count, *lists, *route), config.route_shared_bytes)
    else:
        args = (*count, num_slots, num_experts, *geometry)
        launch(f"dispatch_count_{ids.dtype}", 32 * config.ranges, args, config.count_shared_bytes)
        args = (copied_ids or ids.ptr, *counts, *lists, *route)
        launch("dispatch_route", config.route_threads, args, config.route_shared_bytes)
    return DispatchIndices(
        expert_token_indices=expert_token_indices.owner,
        expert_token_offsets=expert_token_offsets.owner,
        token_expert_indices=token_expert_indices.owner if copies_ids else ids.owner.reshape(-1),
        token_index_map=token_index_map.owner,
        num_experts=num_experts,
        row_tiles=row_tiles.owner,
        ids_copied=copies_ids,
    )
