"""The router: kernels_cu/router/router_forward.cu, router_lane.cu, router_sums.cu and router_backward.cu."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.loader import ELEMENTS, Variant, variant_of
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.frameworks import Buffer, Layout
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.router.options import RouterOptions

ROUTED = ("logits", "bias", "ids", "token_offsets", "token_mask", "sequences")  # the caller's arrays
FORWARD = ("logits", "bias", "given", *ROUTED[3:], "weights", "ids", "partial_sums")
ADDED = ("partial_sums", "sequences", "score_sums", "z_sums", "entropy_sums")
BACKWARD = (
    *("logits", "grad_weights", "weights", "ids", "token_offsets", "token_mask", "sequences"),
    *("grad_score_sums", "grad_z_sums", "grad_entropy_sums", "grad_logits"),
)
Layouts = tuple[tuple[str, Layout], ...]  # pairs of an argument's name and its layout
Shape = tuple[int, ...]


def router_variant(
    entry: str, config: router_config.RouterConfig, *, dtype: str, score: str, renormalize: bool, **macros: str | int
) -> Variant:
    """Returns the variant of router_forward, router_lane or router_backward for a configuration and compiled options.

    A kernel that does not hold whole rows ignores `values` of the configuration.
    """
    common: dict[str, str | int] = {
        "ELEMENT": ELEMENTS[dtype],
        "LANES": config.lanes,
        "VALUES": config.values,
        "THREADS": config.threads,
        "ALIGNED": int(config.aligned),
        "FULL": int(config.full),
        "SCORE": score.upper(),
        "RENORMALIZE": int(renormalize),
    }
    return variant_of(f"{entry}.cu", entry, common | macros)


class Forward(NamedTuple):
    """A forward's launches. route and sum are None if there is no work. sums: result shapes, None if not asked for."""

    route: Launch | None
    sum: Launch | None
    shape: Shape  # shape of weights and ids
    partial_sums: Shape
    sums: tuple[Shape | None, Shape | None, Shape | None]


class Backward(NamedTuple):
    launch: Launch | None
    layout: Layout  # the logits' layout


def _bits(value: float) -> int:
    """Returns a float32's bits as the int32 that a parameter struct holds. Too large a value becomes infinite."""
    try:
        packed = struct.pack("=f", value)
    except OverflowError:
        packed = struct.pack("=f", float("inf") if value > 0 else float("-inf"))
    bits: int = struct.unpack("=i", packed)[0]
    return bits


def _sums(shares: str | None, z: bool, entropy: bool) -> dict[str, str | int]:
    return {"SHARES": shares.upper() if shares else "NO_SCORE", "SUM_Z": int(z), "SUM_ENTROPY": int(entropy)}


def _aligned(*layouts: Layout | None) -> bool:
    """Returns whether all arrays that the kernels read in vectors begin at multiples of 16 bytes."""
    return not any(layout is not None and layout.misalignment for layout in layouts)


def _group_top(groups: tuple[int, int, int] | None) -> int:
    return 0 if groups is None else min(groups[2], 3)


@cached
def configure_forward(layouts: Layouts, k: int | None, options: RouterOptions) -> Forward:
    """Returns the launches of a route with settled options. k: slots per token, None with token_offsets."""
    given = dict(layouts)
    logits, ids, bias, sequences = (given.get(name) for name in ("logits", "ids", "bias", "sequences"))
    assert logits is not None
    L, E = logits.shape
    shape = ids.shape if ids is not None else (L, k or 0)
    number = (sequences.shape[0] - 1) if sequences is not None else options.sequences or 1
    groups = options.groups if ids is None else None
    n, kept, top = groups or (1, 1, 1)
    biased = bias is not None and ids is None
    cut = options.top_p is not None or options.threshold is not None
    config = router_config.router_forward(
        *(L, E, k),
        itemsize=logits.itemsize,
        aligned=_aligned(logits, bias),
        selects=ids is None,
        groups=(n if groups else 0, top),
        sums=bool(options.sums),
        biased=biased,
        cut=cut,
        over_row=options.score == "softmax" and not options.renormalize,
        narrow=options.shares not in (None, "softmax") or "entropy" in options.sums,
    )
    variant = router_variant(
        "router_lane" if config.lane_k else "router_forward",
        config,
        dtype=logits.dtype,
        score=options.score,
        renormalize=bool(options.renormalize),
        GIVEN=int(ids is not None),
        BIAS=(1 if options.bias_on == "scores" else 2) if biased else 0,
        GROUP_TOP=_group_top(groups),
        GROUP_LANES=config.group_lanes,
        CUT=int(cut),
        LANE_K=config.lane_k,
        **_sums(options.shares, "z" in options.sums, "entropy" in options.sums),
    )
    infinity = float("inf")
    scalars = {
        "bias_stride": E if biased and bias is not None and len(bias.shape) == 2 else 0,
        "L": L,
        "num_experts": E,
        "k": k or 0,
        "num_pairs": ids.shape[0] if ids is not None and k is None else 0,
        "given_wide": int(ids is not None and ids.dtype == "int64"),
        "groups": n,
        "kept": kept,
        "top": top,
        "group_size": E // n,
        "group_reciprocal": _reciprocal(E // n),
        "tokens_per_block": config.tokens_per_block,
        "num_sequences": number,
        "scale": _bits(options.scale),
        "eps": _bits(options.eps),
        "top_p": _bits(infinity if options.top_p is None else options.top_p),
        "threshold": _bits(-infinity if options.threshold is None else options.threshold),
    }
    idle = not L and not (ids is not None and ids.shape[0])
    route = Launch(variant, (config.blocks,), config.threads, FORWARD, scalars, config.shared_bytes)
    add = Launch(
        loader.entry("router_sums.cu", "router_sums"),
        (launch_config.ceil_div(E + 2, 32), number),
        32 * router_config.ROUTER_SUM_ROWS,
        ADDED,
        {name: scalars[name] for name in ("L", "num_experts", "tokens_per_block", "num_sequences")},
        overlaps=not idle,
    )
    shapes = (
        (number, E) if options.shares else None,
        (number,) if "z" in options.sums else None,
        (number,) if "entropy" in options.sums else None,
    )
    return Forward(
        None if idle else route, add if options.sums else None, shape, (config.blocks + number, E + 2), shapes
    )


def _reciprocal(size: int) -> int:
    """Returns 2^32 / size, rounded up, as an int32; 0 for 1. (column * it) >> 32 is column // size."""
    value = 0 if size == 1 else 2**32 // size + 1
    return value - 2**32 if value >= 2**31 else value


def route(run: Runtime, steps: Forward, pointers: Sequence[int]) -> tuple[Buffer | None, ...]:
    """Returns weights float32, ids int32, and with sums those of scores, z and entropy, float32.

    pointers: the addresses of the arrays in ROUTED.
    """
    weights, ids = run.empty(steps.shape, "float32"), run.empty(steps.shape, "int32")
    if steps.sum is None:
        if steps.route:
            run.launch(steps.route, *pointers, weights.ptr, ids.ptr, 0)
        return weights, ids
    partial = run.empty(steps.partial_sums, "float32")
    if steps.route:
        run.launch(steps.route, *pointers, weights.ptr, ids.ptr, partial.ptr)
    score, z, entropy = (None if shape is None else run.empty(shape, "float32") for shape in steps.sums)
    run.launch(steps.sum, partial.ptr, pointers[-1], *(0 if b is None else b.ptr for b in (score, z, entropy)))
    return weights, ids, score, z, entropy


@cached
def configure_backward(layouts: Layouts, options: RouterOptions) -> Backward:
    """Returns the launch of a route's backward. The layouts include those of the given gradients."""
    given = dict(layouts)
    logits, ids, sequences = given["logits"], given["ids"], given.get("sequences")
    L, E = logits.shape
    aligned = _aligned(logits, given.get("grad_score_sums"))
    config = router_config.router_backward(L, E, itemsize=logits.itemsize, aligned=aligned)
    ragged = "token_offsets" in given
    variant = router_variant(
        "router_backward",
        config,
        dtype=logits.dtype,
        score=options.score,
        renormalize=bool(options.renormalize),
        **_sums(
            options.shares if "grad_score_sums" in given else None,
            "grad_z_sums" in given,
            "grad_entropy_sums" in given,
        ),
    )
    scalars = {
        "L": L,
        "num_experts": E,
        "k": 0 if ragged else ids.shape[1],
        "num_pairs": ids.shape[0] if ragged else 0,
        "num_sequences": (sequences.shape[0] - 1) if sequences is not None else options.sequences or 1,
        "scale": _bits(options.scale),
        "eps": _bits(options.eps),
    }
    launch = Launch(variant, (config.blocks,), config.threads, BACKWARD, scalars, config.shared_bytes)
    return Backward(launch if L else None, logits)


def route_backward(run: Runtime, steps: Backward, pointers: Sequence[int]) -> Buffer:
    """Returns the gradient of the logits (L, E), in their layout. pointers: those of BACKWARD but the last."""
    grad_logits = run.empty(steps.layout.shape, steps.layout.dtype)
    if steps.launch:
        run.launch(steps.launch, *pointers, grad_logits.ptr)
    return grad_logits
