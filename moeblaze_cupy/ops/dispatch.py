"""The three dispatch steps of the paper's section 4.2: kernels_cu/dispatch.cu."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.structures import PackedIndices


def dispatch(context: Context, ids: Array, num_experts: int) -> PackedIndices:
    """Index lists from ids (L, k), int32 or int64; see `DispatchIndices`."""
    (L, k), num_slots = ids.shape, ids.size
    config = launch_config.dispatch(num_slots, num_experts, loader.device_limits(context.device))
    copies_ids = ids.dtype == "int64"
    block_counts = context.empty((config.workspace_bytes(num_experts) // 4,), "int32") if config.counts else None
    counts = block_counts.ptr if config.counts else 0

    token_expert_indices = context.empty(ids.shape, "int32") if copies_ids else None
    copy = token_expert_indices.ptr if copies_ids else 0

    def launch(entry: str, dtype: str, blocks: int, threads: int, args: tuple, shared_bytes: int) -> None:
        variant = loader.entry("dispatch.cu", f"dispatch_{entry}_{dtype}")
        context.launch(variant, (blocks,), threads, args, shared_bytes)

    source, copy_of_route, dtype = ids.ptr, copy, ids.dtype
    if config.counts:
        args = (ids.ptr, copy, counts, config.block_slots, num_slots, num_experts, config.count_columns)
        launch(
            "count",
            ids.dtype,
            config.count_blocks,
            config.count_threads,
            (*args, config.counted_together),
            config.count_shared_bytes,
        )
        if copies_ids:
            source, copy_of_route, dtype = copy, 0, "int32"
    places, size = launch_config.index_lists(L, k, num_experts)
    lists = context.empty((size,), "int32")
    outputs = ("expert_token_indices", "expert_token_offsets", "token_index_map", "row_tiles", "experts_by_load")
    launch(
        "route",
        dtype,
        config.blocks,
        config.route_threads,
        (
            source,
            copy_of_route,
            counts,
            *(lists.ptr + 4 * places[name][0] for name in outputs),
            *(
                config.block_slots,
                num_slots,
                k,
                num_experts,
                config.columns,
                config.part_slots,
                config.counted_together,
            ),
        ),
        config.route_shared_bytes,
    )
    ids_kept = token_expert_indices if copies_ids else ids
    return PackedIndices(lists.owner, ids_kept.owner, places, num_experts, copies_ids)
