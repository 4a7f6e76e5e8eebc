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
    warp_counts = context.empty((config.warp_counts(num_experts) // 2,), "int32")  # pairs of uint16
    block_counts = context.empty((config.blocks, num_experts), "int32")

    def launch(entry: str, args: tuple, shared_bytes: int) -> None:
        variant = loader.Variant("dispatch.cu", entry)
        loader.launch(context, variant, (config.blocks,), 32 * config.warps, args, shared_bytes)

    copied_ids = token_expert_indices.ptr if copies_ids else 0
    geometry = (num_experts, config.slots_per_warp, config.parts)
    counts = (warp_counts.ptr, block_counts.ptr)
    launch(f"dispatch_count_{ids.dtype}", (ids.ptr, copied_ids, *counts, num_slots, *geometry), config.count_shared_bytes)
    lists = (expert_token_indices.ptr, expert_token_offsets.ptr, token_index_map.ptr, row_tiles.ptr)
    launch(
        "dispatch_route",
        (copied_ids or ids.ptr, *counts, *lists, num_slots, k, *geometry, launch_config.TILE_ROWS),
        config.route_shared_bytes,
    )
    return DispatchIndices(
        expert_token_indices=expert_token_indices.owner,
        expert_token_offsets=expert_token_offsets.owner,
        token_expert_indices=token_expert_indices.owner if copies_ids else ids.owner.reshape(-1),
        token_index_map=token_index_map.owner,
        num_experts=num_experts,
        row_tiles=row_tiles.owner,
        ids_copied=copies_ids,
    )
