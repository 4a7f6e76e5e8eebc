"""The parameters of every kernel: one table for the host, which fills a struct, and for the compiler, which checks it.

A kernel takes one argument, a struct by value. The kernel sources define these structs with types, shapes and
directions; the tables here name the same fields in the same order. `Params.dtype` lays them out in host memory, and
`Params.assertions` makes the compilation fail where the struct of the source differs.

Tensor maps come first, then pointers, 64-bit and 32-bit numbers, so that only the end of a struct is padded.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_KINDS = (
    *(("maps", MAP_BYTES, f"V{MAP_BYTES}"), ("pointers", 8, "u8")),
    *(("int64", 8, "i8"), ("int32", 4, "i4"), ("float32", 4, "f4")),
)


class Variant(Protocol):
    """What `params_of` reads of a `loader.Variant`."""

    @property
    def source(self) -> str: ...

    @property
    def entry(self) -> str: ...

    @property
    def macros(self) -> tuple[tuple[str, str], ...]: ...


class Field(NamedTuple):
    """A field of a kernel's struct: its name, and its size and offset in bytes."""

    name: str
    size: int
    offset: int


@dataclass(frozen=True)
class Params:
    """The fields of one kernel's struct, by kind.

    struct: the struct's name in C++; where it is a template, one instance of it.
    maps: tensor maps, 128 bytes each. pointers: device addresses, 0 for an absent array.
    """

    struct: str
    maps: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    int64: tuple[str, ...] = ()
    int32: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()

    @property
    def scalars(self) -> tuple[str, ...]:
        """The numbers among the fields."""
        return (*self.int64, *self.int32, *self.float32)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """In the order of their offsets, which is the order in which a launch is given their values."""
        found, offset = [], 0
        for kind, size, _ in _KINDS:
            for name in getattr(self, kind):
                found.append(Field(name, size, offset))
                offset += size
        return tuple(found)

    @cached_property
    def size(self) -> int:
        """Bytes of the struct, a multiple of its alignment."""
        end = self.fields[-1].offset + self.fields[-1].size
        alignment = MAP_ALIGNMENT if self.maps else 8
        return -(-end // alignment) * alignment

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """A structured dtype with the struct's offsets and size."""
        formats = [form for kind, _, form in _KINDS for _ in getattr(self, kind)]
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": formats,
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.size,
            }
        )

    def assertions(self) -> str:
        """C++ to follow the struct's definition and common.cuh: its size, its fields, their sizes and offsets."""
        checks = [(f"sizeof({self.struct})", self.size)]
        for name, size, offset in self.fields:
            checks += [(f"OFFSET_OF({name}, {self.struct})", offset), (f"sizeof({self.struct}::{name})", size)]
        text = '"moeblaze_cupy/params.py has another layout"'
        # A binding has as many names as the struct has fields: one more field might lie in the padding at the end.
        names = ", ".join(field.name for field in self.fields)
        binding = f"[[maybe_unused]] const auto& [{names}] = all;"
        count = f"inline __device__ void all_fields(const {self.struct}& all) {{ {binding} }}\n"
        return count + "".join(f"static_assert({what} == {number}, {text});\n" for what, number in checks)


_GEMM_INPUTS = ("expert_token_indices", "expert_token_offsets", "row_tiles")
_GEMM_OUTPUTS = ("first_layer", "first_layer_grad", "result", "y_swi")

_GEMM_SM80 = Params(
    "GroupedGemmParams",
    pointers=("a", "b0", "b1", *_GEMM_INPUTS, *_GEMM_OUTPUTS, "row_weights", "partial_sums"),
    int64=("lda", "expert_stride", "ldb"),
    int32=("columns", "depth", "num_slots"),
)
_GEMM_SM90_POINTERS = (*_GEMM_INPUTS, *_GEMM_OUTPUTS, "weights", "partial_sums", "token_index_map", "tile_counter")
_GEMM_SM90 = {
    "0": Params(
        "GroupedGemmParams",
        maps=("a", "b0", "b1"),
        pointers=_GEMM_SM90_POINTERS,
        int64=("result_ld",),
        int32=("columns", "depth", "num_slots"),
    ),
    "1": Params(
        "GroupedGemmParams",
        maps=("b0", "b1"),
        pointers=("a", *_GEMM_SM90_POINTERS),
        int64=("lda", "result_ld"),
        int32=("columns", "depth", "num_slots"),
    ),
}


@cache
def _gemm(source: str, macros: tuple[tuple[str, str], ...]) -> Params:
    """The table of a grouped GEMM: biases, scales, constants and peers are in it only where the kernel uses them."""
    given = dict(macros)
    # On Hopper gathered rows are copied from a pointer, others come through a tensor map.
    table = _GEMM_SM80 if source == "grouped_gemm_sm80.cu" else _GEMM_SM90[given["GATHER"]]
    if "OPERAND" in given:
        pointers = (*table.pointers, "a_scales", "b_scales", "quantised", "quantised_scales")
        table = replace(table, pointers=pointers, int64=(*table.int64, "scales_ld"))
    if given.get("BIASED") == "1":
        pointers, int64 = (*table.pointers, "bias0", "bias1"), (*table.int64, "bias_stride")
        table = replace(table, pointers=pointers, int64=int64)
    if given.get("PUSHES") == "1":
        int64, int32 = (*table.int64, "offset", "first_row"), (*table.int32, "rows_per_peer")
        table = replace(table, pointers=(*table.pointers, "peers", "needed"), int64=int64, int32=int32)
    return replace(table, float32=tuple(f"constant{i}" for i in range(int(given.get("CONSTANTS", "0")))))


_WGRAD_POINTERS = ("p", "q", "expert_token_indices", "expert_token_offsets", "out0", "out1")
_WGRAD_INT64 = ("ldp", "ldq", "expert_stride", "ldo")
_CAPACITY_INT32 = ("k", "num_experts", "num_sequences", "parts")
_WGRAD_INT32 = ("p_half", "q_half", "rows", "columns")
_WGRAD_SM90 = Params(
    "GroupedWgradParams",
    maps=("routed",),
    pointers=(*_WGRAD_POINTERS, "experts_by_load"),
    int64=_WGRAD_INT64,
    int32=(*_WGRAD_INT32, "num_experts", "halves", "splits"),
)
_WGRAD_SM90_OTHERS = replace(
    _WGRAD_SM90,
    pointers=(*_WGRAD_SM90.pointers, "others"),
    int64=(*_WGRAD_INT64, "others_stride"),
    int32=(*_WGRAD_SM90.int32, "num_others"),
    float32=("scale",),
)

# By source, then by the start of an entry's name. Without an entry of its own, a source's kernels have one table.
_TABLES = {
    "aggregation.cu": {
        "aggregate": Params(
            "AggregateParams<float, float>",
            pointers=("panel", "token_index_map", "weights", "out"),
            int64=("panel_ld",),
            int32=("L", "k", "d", "first_column", "columns"),
        ),
        "weights_bwd": Params(
            "WeightsBwdParams<float>",
            pointers=("partial_sums", "token_index_map", "grad_weights"),
            int32=("num_slots", "num_rows", "parts"),
        ),
        "weights_by_row": Params(
            "WeightsByRowParams<float>",
            pointers=("weights", "token_index_map", "row_weights"),
            int32=("num_slots",),
        ),
    },
    "bound_slots.cu": {
        "bound_slots": Params(
            "BoundSlotsParams",
            pointers=(
                *("token_index_map", "expert_token_indices", "row_tiles", "expert_token_offsets", "experts_by_load"),
                "dropped",
            ),
            int32=("num_slots", "num_experts", "max_slots"),
        ),
    },
    "split_tiles.cu": {
        "split_tiles": Params(
            "SplitTilesParams",
            pointers=("expert_token_indices", "expert_token_offsets", "row_tiles", "ranges"),
            int32=("first_token", "end_token", "num_experts", "max_row_tiles"),
        ),
    },
    "square_tiles.cu": {
        "square_tiles": Params(
            "SquareTilesParams", pointers=("expert_token_offsets", "row_tiles"), int32=("num_experts",)
        ),
    },
    "dispatch.cu": {
        "dispatch_count": Params(
            "DispatchCountParams<int>",
            pointers=("ids", "token_expert_indices", "block_counts"),
            int64=("block_slots",),
            int32=("num_slots", "num_experts", "columns", "counted_together"),
        ),
        "dispatch_route": Params(
            "DispatchRouteParams<int>",
            pointers=(
                *("ids", "token_expert_indices", "block_counts", "expert_token_indices", "expert_token_offsets"),
                *("token_index_map", "row_tiles", "experts_by_load"),
            ),
            int64=("block_slots",),
            int32=("num_slots", "k", "num_experts", "columns", "part_slots", "counted_together"),
        ),
    },
    "pull.cu": {
        "pull_slots": Params(
            "PullSlotsParams<int, unsigned>",
            pointers=("peers", "local_ids", "weights", "needed"),
            int64=("ids_offset", "weights_offset"),
            int32=("num_rows", "rows_per_peer", "k", "first_expert", "experts_per_peer"),
        ),
        "pull_rows": Params(
            "PullRowsParams",
            pointers=("peers", "needed", "out"),
            int64=("offset",),
            int32=("P", "rows_per_peer", "pieces"),
        ),
        "pull_scaled_rows": Params(
            "PullScaledRowsParams",
            pointers=("peers", "needed", "out", "scales"),
            int64=("offset", "scales_offset"),
            int32=("P", "rows_per_peer", "pieces"),
        ),
        "pull_sum": Params(
            "PullSumParams<float, int>",
            pointers=("peers", "ids", "out"),
            int64=("offset", "first_row"),
            int32=("L", "P", "k", "d", "experts_per_peer"),
        ),
        "pull_values": Params(
            "PullValuesParams<int, unsigned>",
            pointers=("peers", "ids", "out"),
            int64=("offset", "first_slot"),
            int32=("num_slots", "num_experts", "experts_per_peer"),
        ),
    },
    "push.cu": {
        "push_sum": Params(
            "PushSumParams<float, float>",
            pointers=("panel", "token_index_map", "weights", "peers", "needed"),
            int64=("panel_ld", "offset", "first_row"),
            int32=("P", "rows_per_peer", "k", "d", "first_column", "columns"),
        ),
    },
    "router_forward.cu": {
        "": Params(
            "RouterForwardParams",
            pointers=(
                *("logits", "bias", "given", "token_offsets", "token_mask", "sequences", "weights", "ids"),
                "partial_sums",
            ),
            int64=("bias_stride",),
            int32=(
                *("L", "num_experts", "k", "num_pairs", "given_wide"),
                *("groups", "kept", "top", "group_size", "group_reciprocal"),
                *("tokens_per_block", "num_sequences", "scale", "eps", "top_p", "threshold"),
            ),
        ),
    },
    "router_sums.cu": {
        "": Params(
            "RouterSumsParams",
            pointers=("partial_sums", "sequences", "score_sums", "z_sums", "entropy_sums"),
            int32=("L", "num_experts", "tokens_per_block", "num_sequences"),
        ),
    },
    "router_backward.cu": {
        "": Params(
            "RouterBackwardParams",
            pointers=(
                *("grad_weights", "logits", "weights", "ids", "token_offsets", "token_mask", "sequences"),
                *("grad_score_sums", "grad_z_sums", "grad_entropy_sums", "grad_logits"),
            ),
            int32=("L", "num_experts", "k", "num_pairs", "num_sequences", "scale", "eps"),
        ),
    },
    "slots.cu": {
        "list_tokens": Params(
            "ListTokensParams<int>",
            pointers=("ids", "offsets", "masked_ids", "tokens", "token_offsets"),
            int32=("num_slots", "num_tokens", "num_experts"),
        ),
        "rows_to_tokens": Params(
            "RowsToTokensParams", pointers=("tokens", "expert_token_indices"), int32=("num_slots",)
        ),
        "mark_identity": Params(
            "MarkIdentityParams<int>",
            pointers=("ids", "tokens", "token_index_map"),
            int32=("num_slots", "num_experts", "identity_experts"),
        ),
        "slots_by_row": Params(
            "SlotsByRowParams",
            pointers=("token_index_map", "expert_token_offsets", "slots", "row_weights"),
            int32=("num_slots", "num_experts"),
        ),
        "aggregate_slots": Params(
            "SlotAggregateParams<float, float>",
            pointers=("panel", "token_index_map", "token_offsets", "weights", "source", "out"),
            int64=("panel_ld",),
            int32=("L", "k", "d", "first_column", "columns", "scales_rows"),
        ),
        "identity_weights": Params(
            "IdentityWeightsParams<float, float>",
            pointers=("x", "grad_out", "token_index_map", "token_offsets", "grad_weights"),
            int32=("L", "k", "d"),
        ),
    },
    "wgrad_parts.cu": {
        "wgrad_parts": Params(
            "WgradPartsParams<float>",
            pointers=("sums", "expert_token_offsets", "out0", "out1"),
            int64=("expert_stride", "ldo"),
            int32=("rows", "columns", "halves", "splits", "accumulate"),
        ),
    },
    "quantize.cu": {
        "quantize_rows": Params(
            "QuantizeRowsParams<float>",
            pointers=("rows", "out", "scales"),
            int64=("L",),
            int32=("d", "threads_per_row"),
        ),
        "dequantize_rows": Params(
            "DequantizeRowsParams<float>",
            pointers=("rows", "scales", "out"),
            int64=("L",),
            int32=("d", "threads_per_row"),
        ),
        "": Params(
            "QuantizeWeightsParams<float>",
            pointers=("first", "second", "amax", "same", "transposed", "scales"),
            int64=("expert_stride", "ld", "size", "same_half", "transposed_half"),
            int32=("outer", "inner", "halves", "amax_ld", "scales_ld", "same_ld", "transposed_ld"),
        ),
    },
    "saved_fp8.cu": {
        "": Params(
            "SavedFp8Params<float>",
            pointers=("first_layer", "expert_token_offsets", "saved"),
            int32=("num_rows", "num_experts", "columns", "halves", "interleaved"),
        ),
    },
    "selection.cu": {
        "columns_count": Params(
            "ColumnsCountParams<float>",
            pointers=("scores", "chosen", "sequences", "columns", "histogram", "done", "reserved"),
            int64=("L", "room"),
            int32=("num_experts", "num_sequences", "parts", "width", "wanted"),
        ),
        "columns_split": Params(
            "ColumnsSplitParams<float>",
            pointers=(
                *("scores", "chosen", "columns", "sequences", "taken", "candidates", "list", "listed"),
                "block_counts",
            ),
            int64=("L",),
            int32=("num_experts", "num_sequences", "parts", "width", "block_shift"),
        ),
        "columns_finish": Params(
            "ColumnsFinishParams<float>",
            pointers=("scores", "columns", "sequences", "candidates", "list", "listed", "taken", "block_counts"),
            int64=("L",),
            int32=("num_experts", "num_sequences", "width", "block_shift"),
        ),
        "chosen_bits": Params(
            "ChosenBitsParams<int>",
            pointers=("ids", "chosen", "frequencies", "done", "columns"),
            int64=("L",),
            int32=("k", "num_experts", "parts", "tile", "rounding"),
        ),
    },
    "pairs.cu": {
        "mask_bits": Params("MaskBitsParams", pointers=("mask", "taken"), int64=("L",), int32=("num_experts",)),
        "pairs_count": Params(
            "PairsCountParams",
            pointers=("taken", "block_counts"),
            int64=("num_words",),
            int32=("row_words", "block_shift"),
        ),
        "pairs_write": Params(
            "PairsWriteParams",
            pointers=("taken", "block_counts", "token_offsets", "ids"),
            int64=("num_words", "num_pairs"),
            int32=("row_words", "block_shift"),
        ),
    },
    "capacity.cu": {
        "capacity_count": Params(
            "CapacityCountParams<int>",
            pointers=("ids", "values", "sequences", "histogram"),
            int64=("L",),
            int32=(*_CAPACITY_INT32, "order", "value_type", "width"),
        ),
        "capacity_pick": Params(
            "CapacityPickParams",
            pointers=("histogram", "columns", "reserved"),
            int64=("room",),
            int32=("num_experts", "width", "capacity"),
        ),
        "capacity_list": Params(
            "CapacityListParams<int>",
            pointers=("ids", "values", "columns", "sequences", "list", "listed", "kept"),
            int64=("L",),
            int32=(*_CAPACITY_INT32, "order", "value_type", "width"),
        ),
        "capacity_finish": Params(
            "CapacityFinishParams",
            pointers=("columns", "sequences", "list", "listed", "kept"),
            int64=("L",),
            int32=("k", "num_experts", "num_sequences", "order", "width"),
        ),
        "capacity_parts": Params(
            "CapacityPartsParams<int>",
            pointers=("ids", "sequences", "counts", "totals"),
            int64=("L",),
            int32=(*_CAPACITY_INT32, "choices"),
        ),
        "capacity_mark": Params(
            "CapacityMarkParams<int>",
            pointers=("ids", "sequences", "counts", "totals", "kept"),
            int64=("L",),
            int32=(*_CAPACITY_INT32, "choices", "capacity", "walkers"),
        ),
    },
    "balance.cu": {
        "tokens_per_expert": Params(
            "TokensPerExpertParams<int>",
            pointers=("ids", "sequences", "counts"),
            int64=("L", "row_stride"),
            int32=("k", "num_experts", "num_sequences", "parts"),
        ),
        "quantile_lines": Params(
            "QuantileLinesParams<float, int>",
            pointers=("logits", "ids", "bias", "lines"),
            int64=("L",),
            int32=("k", "num_experts", "score"),
        ),
        "quantile_counts": Params(
            "QuantileCountsParams<float>",
            pointers=("logits", "lines", "bounds", "histogram"),
            int64=("L",),
            int32=("num_experts", "score", "bins", "columns"),
        ),
    },
    "clear.cu": {"clear": Params("ClearParams", pointers=("memory",), int64=("number",))},
    "bias_bwd.cu": {
        "": Params(
            "BiasBwdParams",
            pointers=(
                *("rows", "expert_token_indices", "expert_token_offsets", "experts_by_load", "row_weights", "bias"),
                *("partial_sums", "out0", "out1"),
            ),
            int64=("ld", "bias_stride", "out_stride"),
            int32=("columns", "half", "num_slots", "accumulate"),
        ),
    },
    "grouped_wgrad_sm80.cu": {
        "": Params("GroupedWgradParams", pointers=_WGRAD_POINTERS, int64=_WGRAD_INT64, int32=_WGRAD_INT32),
    },
    "rank_experts.cu": {
        "": Params("RankExpertsParams", pointers=("experts_by_load", "rank_experts"), int32=("num_experts", "each")),
    },
}


def tables(source: str, macros: tuple[tuple[str, str], ...] = ()) -> dict[str, Params]:
    """The tables of a source's kernels under these JIT constants, by the start of an entry's name."""
    if source in ("grouped_gemm_sm80.cu", "grouped_gemm_sm90.cu"):
        return {"": _gemm(source, macros)}
    if source == "grouped_wgrad_sm90.cu":
        return {"": _WGRAD_SM90_OTHERS if dict(macros).get("OTHERS") == "1" else _WGRAD_SM90}
    return _TABLES[source]


def params_of(variant: Variant) -> Params:
    """The table of a kernel, given as a `loader.Variant` with an entry. Raises KeyError for one that does not exist."""
    for start, found in tables(variant.source, variant.macros).items():
        if variant.entry.startswith(start) and variant.entry:
            return found
    raise KeyError(f"{variant.source}: no parameters of an entry {variant.entry!r}")
