"""Sums over the slots of the tokens of several GPUs, stored where these read them: kernels_cu/rows/push.cu."""

from typing import Any, NamedTuple

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.frameworks import Framework
from moeblaze_cupy.rows import config as rows_config
from moeblaze_cupy.rows.aggregation import SUM_ADDRESSES


class PeerOffset(NamedTuple):
    """The place of rows of results in the buffers of P ranks: an array in each, at the same offset."""

    offset: int  #: bytes from a rank's address to its array
    first_row: int  #: row there of what this rank stores
    rows_per_peer: int  #: M, of each rank's tokens


class Destination(NamedTuple):
    """Results of the tokens of P ranks, M each, in place of an array (P*M, d).

    The row of token t of rank r is row first_row + t of rank r's array (any, d), if needed[r * M + t]; others are not
    stored. The ranks read these rows after a barrier, not before it.
    """

    peers: Any  #: (P,) int64, CuPy or torch on CUDA: addresses of the ranks' buffers, multiples of 16
    needed: Any  #: (P*M,) bool, CuPy or torch on CUDA
    place: PeerOffset

    def addresses(self, framework: Framework) -> "Addresses":
        return Addresses(framework.describe(self.peers).ptr, framework.describe(self.needed).ptr)


class Addresses(NamedTuple):
    """Device addresses of the arrays of a `Destination`; 0 without one."""

    peers: int
    needed: int


NOWHERE = Addresses(0, 0)


def push_sum(
    index: IndexLayout,
    dtype: str,
    weights_dtype: str | None,
    d: int,
    first_column: int,
    columns: int,
    panel_ld: int,
    place: PeerOffset,
) -> Launch:
    """Computes columns first_column .. + columns of the ranks' results from the first `columns` of panel's rows.

    Addresses: those of `aggregation.aggregate` but for out, token_offsets and source, and those of `Addresses`. d and
    first_column are multiples of 8.
    """
    P = index.num_tokens // place.rows_per_peer
    blocks_per_peer = launch_config.ceil_div(place.rows_per_peer, rows_config.AGGREGATE_TOKENS)
    return Launch(
        loader.entry("push.cu", f"push_sum_{dtype}_{weights_dtype or 'float32'}"),
        (P * blocks_per_peer, launch_config.ceil_div(columns, launch_config.PANEL_COLUMNS)),
        32 * rows_config.AGGREGATE_TOKENS,
        SUM_ADDRESSES,
        {
            **place._asdict(),
            "P": P,
            "k": index.k or 0,
            "d": d,
            "first_column": first_column,
            "columns": columns,
            "panel_ld": panel_ld,
        },
        why=("stores each sum in the memory of the GPU that has the token",),
    )
