"""Launches products of the experts summed over the k slots of each token, through panels of columns.

The kernels kernels_cu/grouped_gemm_*.cu and aggregation.cu run in turn.
"""

from dataclasses import dataclass

from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.dispatch.launches import TOKEN_INDEX_MAP, TOKEN_OFFSETS, Lists
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import products as grouped_gemm
from moeblaze_cupy.gemm.products import PLAIN, Gemm, GemmExtras, PlacedFactor, Product, Rows
from moeblaze_cupy.rows import push
from moeblaze_cupy.rows.aggregation import Source, aggregate


@dataclass(frozen=True, eq=False)
class Panels:
    """A product for one panel of columns after another, each followed by its sum over the slots.

    panel: shape of the buffer of routed rows between the two; None where it lies in the left operand's rows, or where
    rows go straight to their tokens, as with k = 1 on Hopper.
    """

    products: tuple[Gemm, ...]
    sums: tuple[Launch, ...]  # empty where rows go to their tokens
    panel: tuple[int, int] | None
    dtype: str

    @property
    def lora(self) -> PlacedFactor | None:
        """Returns the low-rank factor beside the weight, which all products read alike."""
        return self.products[0].lora

    @property
    def square(self) -> bool:
        """Returns True if the products have square tiles, and take the lists of `square_tiles.listed`."""
        return self.products[0].square


def configure(
    product: Product,
    limits: DeviceLimits,
    *,
    weights_dtype: str | None = None,
    overwrites: bool = False,
    source: Source | None = None,
    place: push.PeerOffset | None = None,
) -> Panels:
    """Configures down_fwd, or up_bwd; the result is (L, d).

    down_fwd is the sum over slots of weights * row of product w2, up_bwd that of rows of first_layer_grad w1^T.
    product: the one of all d columns. Its bias is added to each slot's row. up_bwd has one segment where gate and up
    columns are interleaved. overwrites: the left operand may be used as scratch. weights_dtype: that of the router
    weights that scale the rows. source: the rows that identity experts add, where there are such experts. place: where
    the results of several GPUs' tokens go; there are no identity experts then.
    """
    index, a, d = product.lists, product.a, product.N
    tier = grouped_gemm.config_of(product, limits)[0].tier
    if gemm_config.rows_go_to_tokens(index.k, tier) and source is None:
        to_tokens = Rows(d, why=(gemm_config.TO_TOKENS,), to_tokens=True, weights_dtype=weights_dtype, place=place)
        return Panels((grouped_gemm.configure(product, limits, to_tokens),), (), None, a.result_dtype)
    panels, of_panels = gemm_config.panels(d, index.num_rows)
    spare = a.ld if overwrites and not a.is_fp8 else 0
    in_place = gemm_config.panel_takes_left_operands_rows(d, spare, tier)
    widths = tuple(width for _, width in panels)
    why = (of_panels + gemm_config.IN_PLACE if in_place else of_panels,)
    products, sums = [], []
    for first_column, width in panels:
        ld = a.ld if in_place else width
        of_panel = product._replace(N=width), limits, Rows(ld, first_column, widths, why)
        products.append(grouped_gemm.configure(*of_panel))
        of_sums = index, a.result_dtype, weights_dtype, d, first_column, width, ld
        sums.append(aggregate(*of_sums, source) if place is None else push.push_sum(*of_sums, place))
    panel = None if in_place else (index.num_rows, panels[0][1])
    return Panels(tuple(products), tuple(sums), panel, a.result_dtype)


def sum_of_rows(
    run: Runtime,
    step: Panels,
    lists: Lists,
    a: int,
    halves: tuple[int, int],
    weights: int,
    out: int,
    *,
    bias: int = 0,
    source: int = 0,
    extras: GemmExtras = PLAIN,
) -> None:
    """Writes out (L, d). a: the left operand. halves: where the weight's gate and up begin.

    weights, bias: 0 for none. source: the rows of identity experts. Where results go to several GPUs out is 0.
    """
    biases = bias, bias
    if not step.sums:
        product, to = step.products[0], {"result": out, "weights": weights}
        grouped_gemm.gemm(run, product, lists, a, halves, bias=biases, extras=extras, **to)
        return
    memory = run.empty(step.panel, step.dtype) if step.panel else None
    panel = memory.ptr if memory else a
    token_index_map, token_offsets = lists[TOKEN_INDEX_MAP], lists[TOKEN_OFFSETS]
    for product, sums in zip(step.products, step.sums, strict=True):
        grouped_gemm.gemm(run, product, lists, a, halves, result=panel, bias=biases, extras=extras)
        run.launch(sums, panel, token_index_map, weights, out, token_offsets, source, extras.peers, extras.needed)
