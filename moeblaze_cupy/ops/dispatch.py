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
    experts_by_load = context.empty((num_experts,), "int32")
    token_expert_indices = context.empty((num_slots,), "int32") if copies_ids else None
    block_counts = context.empty((config.workspace_bytes(num_experts) // 4,), "int32") if config.counts else None
    counts = block_counts.ptr if config.counts else 0

    def launch(entry: str, threads: int, args: tuple, shared_bytes: int) -> None:
        variant = loader.Variant("dispatch.cu", f"dispatch_{entry}_{ids.dtype}")
        loader.launch(context, variant, (config.blocks,), threads, args, shared_bytes)

    if config.counts:
        args = (ids.ptr, counts, num_slots, num_experts, config.count_columns, config.block_slots)
        launch("count", launch_config.COUNT_THREADS, args, config.count_shared_bytes)
    outputs = (expert_token_indices, expert_token_offsets, token_index_map, row_tiles, experts_by_load)
    launch(
        "route",
        config.route_threads,
        (
            ids.ptr,
            token_expert_indices.ptr if copies_ids else 0,
            counts,
            *(array.ptr for array in outputs),
            *(
                num_slots,
                k,
                num_experts,
                config.columns,
                config.block_slots,
                config.part_slots,
                launch_config.TILE_ROWS,
            ),
        ),
        config.route_shared_bytes,
    )
    return DispatchIndices(
        expert_token_indices=expert_token_indices.owner,
        expert_token_offsets=expert_token_offsets.owner,
        token_expert_indices=token_expert_indices.owner if copies_ids else ids.owner.reshape(-1),
        token_index_map=token_index_map.owner,
        num_experts=num_experts,
        row_tiles=row_tiles.owner,
        experts_by_load=experts_by_load.owner,
        ids_copied=copies_ids,
    )
