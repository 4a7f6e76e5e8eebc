"""Cases of products in e4m3 over ranks: weight gradients, low-rank factors and packed weights.

Every result is compared with float64, and with one process that has all tokens and the same options.
"""

import copy
import itertools

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.types import FACTORS, QuantizedWeight
from tests.parallel.ranks_common import E, Inputs, case, counts_of, difference, expect, gpu_case
from tests.parallel.ranks_exchange import peers_over_gloo
from tests.parallel.ranks_gpus import GPU_ROUTES, on_gpu
from tests.parallel.ranks_lora import ROUTES
from tests.parallel.ranks_quantised import factors_of, in_float64, of_experts, packed, results_of

WIDTHS = {"d": 32, "h": 64}
IN_FP8 = {"precision": "fp8"}
BOTH = (True, True)
# e4m3 rounds by 0.026 of the norm, and most results pass three products of two such operands. Beside cancelled sums, as
# of the router weights, it is more.
EXACT = 0.12
# A result is rounded to bf16 on each rank, and their sum once more.
OF_RANKS = 2.0**-7
# Each piece of rows rounds the two operands of a gradient of weights with scales of its own.
OF_PIECES = 0.04


def inputs_of(rank, size, kind="uneven"):
    counts = [40, 33, 17, 5][:size] if kind == "uneven" else counts_of(size, kind)
    return Inputs(rank, counts, "absent", dtype=torch.bfloat16, **WIDTHS)


def one_process(inputs, weights, lora, trains, **options):
    """By name, this rank's part of the results of one process with all tokens."""
    out, saved = mb.moe_forward(inputs.x, inputs.ids, inputs.weights, *weights, lora=lora, **options)
    trained = [name for name, of in zip(("w1", "w2"), trains, strict=True) if of]
    needs = ("x", "weights", *trained, *(("lora",) if lora else ()))
    grads = mb.moe_backward(inputs.grad, saved, needs=needs)
    found = {"out": out[inputs.here], "x": grads.x[inputs.here], "weights": grads.weights[inputs.here]}
    found |= {name: getattr(grads, name)[inputs.experts] for name in trained}
    of_factors = zip(FACTORS, grads.lora.factors, strict=True) if lora else ()
    return found | {f"lora.{name}": factor[inputs.experts] for name, factor in of_factors}


def exact(inputs, weights, lora):
    """The same in float64, of the numbers that packed weights have."""
    numbers = copy.copy(inputs)
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        if isinstance(weight, QuantizedWeight):
            setattr(numbers, name, mb.dequantize(weight).transpose(1, 2))
    return in_float64(numbers, lora)


def compared(got, want, of_float64, tolerances):
    """tolerances: by name, beside one process; 0 for equal bits, and `OF_RANKS` for the others."""
    assert got.keys() == want.keys() <= of_float64.keys()
    for name, value in got.items():
        error, tolerance = difference(value, want[name]), tolerances.get(name, OF_RANKS)
        assert error <= tolerance, f"{name}: {error} beside one process"
        error = difference(value.cpu(), of_float64[name])
        assert error <= EXACT, f"{name}: {error} beside float64"
        assert bool(value.any()) == bool(of_float64[name].any()), name


def compare(inputs, weights, experts, lora=None, trains=(False, False), exact_names=(), **options):
    """On the CPU. exact_names: results with the bits of one process."""
    got = results_of(inputs, weights, experts, lora, trains=trains, **options)
    again = results_of(inputs, weights, experts, lora, trains=trains, **options)
    assert all(torch.equal(got[name], again[name]) for name in got)
    of_one = {name: value for name, value in options.items() if name != "row_precision"}
    want = one_process(inputs, weights, lora, trains, **of_one)
    in_pieces = experts.slots is not None
    tolerances = dict.fromkeys(("w1", "w2"), OF_PIECES) if in_pieces else dict.fromkeys(exact_names, 0)
    compared(got, want, exact(inputs, weights, lora), tolerances)
    return got


@case
def weight_gradients_in_e4m3(rank, size, group):
    """They have the bits of one process where a rank's rows are one piece, and are not those that bf16 gives.

    Rows in e4m3 change no bit, also where some are zeros.
    """
    options = IN_FP8 | {"fp8_wgrad": True}
    with peers_over_gloo():
        for route, of_group in ROUTES:
            experts = ExpertGroup(group, E, route=route, **of_group)
            for kind in ("equal",) if route == "static" else ("uneven", "none_here"):
                inputs = inputs_of(rank, size, kind)
                inputs.x[::7], inputs.grad[::5] = 0, 0
                got = compare(inputs, (inputs.w1, inputs.w2), experts, None, BOTH, ("w1", "w2"), **options)
                plain = results_of(inputs, (inputs.w1, inputs.w2), experts, trains=BOTH, **IN_FP8)
                for name in ("w1", "w2"):
                    assert difference(got[name], plain[name]) > 0.02, name
                assert all(torch.equal(got[name], plain[name]) for name in ("out", "x", "weights"))
                in_e4m3 = results_of(
                    inputs, (inputs.w1, inputs.w2), experts, trains=BOTH, row_precision="fp8", **options
                )
                assert all(torch.equal(got[name], in_e4m3[name]) for name in got), (route, kind)
    for save in ("paper", "recompute"):
        inputs = inputs_of(rank, size)
        compare(inputs, (inputs.w1, inputs.w2), ExpertGroup(group, E), None, BOTH, save=save, **options)
    inputs = inputs_of(rank, size, "none")
    compare(inputs, (inputs.w1, inputs.w2), ExpertGroup(group, E), None, BOTH, **options)


@case
def weight_gradients_in_e4m3_are_accumulated(rank, size, group):
    """In float32 main_grad of two steps, whose sums are those of float32 gradients; in pieces too."""
    inputs, options = inputs_of(rank, size), IN_FP8 | {"fp8_wgrad": True}
    for of_group in ({}, {"slots": 20}):
        experts = ExpertGroup(group, E, **of_group)
        plain = results_of(inputs, (inputs.w1, inputs.w2), experts, trains=BOTH, **options)
        x, ids, weights, *_ = inputs.local()
        parameters = [torch.nn.Parameter(w[inputs.experts].clone()) for w in (inputs.w1, inputs.w2)]
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        for _ in range(2):
            out = expert_parallel_moe(x, ids, weights, *parameters, experts, accumulate_into_main_grad=True, **options)
            out.backward(inputs.grad[inputs.here])
        for name, parameter in zip(("w1", "w2"), parameters, strict=True):
            assert parameter.grad is None, name
            half = parameter.main_grad / 2
            # `plain` is rounded to the bfloat16 of the parameters once.
            assert difference(half, plain[name]) <= 2.0**-9, name
            assert not torch.equal(half, plain[name].float()), f"{name} is rounded to bfloat16"


@case
def weight_gradients_in_e4m3_are_checked(rank, size, group):
    inputs, experts = inputs_of(rank, size), ExpertGroup(group, E)
    narrow = Inputs(rank, counts_of(size, "uneven"), dtype=torch.bfloat16, d=32, h=32)
    for of, error, text, options in (
        (inputs, ValueError, "False without precision='fp8', got True", {}),
        (inputs, TypeError, "True or False, got 1", IN_FP8 | {"fp8_wgrad": 1}),
        (narrow, ValueError, "False unless h is a multiple of 64, got h = 32", IN_FP8),
    ):
        call = lambda of=of, o=options: expert_parallel_moe(*of.local(), experts, **{"fp8_wgrad": True} | o)  # noqa: E731
        expect(error, f"expert_parallel_moe: fp8_wgrad: expected {text}", call)
    for formats in (("mxfp4", "mxfp4"), ("mxfp4", None), ("int8", "mxfp4")):
        weights = (
            of_experts(weight, inputs.experts) if isinstance(weight, QuantizedWeight) else weight[inputs.experts]
            for weight in packed(inputs, formats)[0]
        )
        text = "fp8_wgrad: expected False with packed weights, got True"
        if formats != ("mxfp4", "mxfp4"):
            text = "precision: expected None with QuantizedWeight, unless w1 and w2 are in 'mxfp4', got 'fp8' and "
        call = lambda w=tuple(weights): expert_parallel_moe(*inputs.local()[:3], *w, experts, fp8_wgrad=True, **IN_FP8)  # noqa: E731
        expect(ValueError, f"expert_parallel_moe: {text}", call)


@case
def factors_beside_e4m3(rank, size, group):
    """Weights that train and weights that do not, on every route; gradients of factors have the bits of one process."""
    factors = [f"lora.{name}" for name in FACTORS]
    with peers_over_gloo():
        for route, of_group in ROUTES:
            experts = ExpertGroup(group, E, route=route, **of_group)
            for kind in ("equal",) if route == "static" else ("uneven", "none_here"):
                inputs, trains = inputs_of(rank, size, kind), (kind == "uneven",) * 2
                lora = factors_of(WIDTHS["h"], d=WIDTHS["d"])
                compare(inputs, (inputs.w1, inputs.w2), experts, lora, trains, factors, **IN_FP8)
    for options in ({"save": "recompute"}, {"save": "fp8"}, {"keep_fp8_weights": False}):
        inputs = inputs_of(rank, size)
        got = results_of(inputs, (inputs.w1, inputs.w2), ExpertGroup(group, E), lora, **options, **IN_FP8)
        save = {"save": options.get("save", "minimal")}
        want = one_process(inputs, (inputs.w1, inputs.w2), lora, (False, False), **save, **IN_FP8)
        compared(got, want, exact(inputs, (inputs.w1, inputs.w2), lora), {})


@case
def packed_weights_in_e4m3(rank, size, group):
    """mxfp4 on every route, with factors and without; rows in e4m3 change no bit."""
    with peers_over_gloo():
        for route, of_group in ROUTES:
            experts = ExpertGroup(group, E, route=route, **of_group)
            for kind in ("equal",) if route == "static" else ("uneven", "none_here"):
                inputs = inputs_of(rank, size, kind)
                weights, _ = packed(inputs, ("mxfp4", "mxfp4"))
                compare(inputs, weights, experts, factors_of(WIDTHS["h"], d=WIDTHS["d"]), **IN_FP8)
                got = compare(inputs, weights, experts, **IN_FP8)
                rows = results_of(inputs, weights, experts, row_precision="fp8", **IN_FP8)
                assert all(torch.equal(got[name], rows[name]) for name in got), (route, kind)
    for save in ("paper", "recompute"):
        compare(inputs, weights, ExpertGroup(group, E), save=save, **IN_FP8)
    given = mb.quantize_weights(inputs.w1[inputs.experts], inputs.w2[inputs.experts])
    here = [of_experts(weight, inputs.experts) for weight in weights]
    call = lambda: expert_parallel_moe(*inputs.local()[:3], *here, experts, fp8_weights=given, **IN_FP8)  # noqa: E731
    expect(ValueError, "expert_parallel_moe: fp8_weights: expected None with QuantizedWeight, got", call)


@gpu_case
def options_in_e4m3_on_gpus(rank, size, group):
    """Every route; on each, a second run has the bits of the first, and rows in e4m3 change none beside packed weights
    and weight gradients in e4m3. The one process is on this rank's GPU.
    """
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    lora = factors_of(WIDTHS["h"], d=WIDTHS["d"])
    lora = lora.with_factors(factor.cuda() for factor in lora.factors)
    of_wgrad = IN_FP8 | {"fp8_wgrad": True}
    forms = (
        (False, None, BOTH, of_wgrad),
        (False, lora, BOTH, IN_FP8),
        (True, None, (), IN_FP8),
        (True, lora, (), IN_FP8),
    )
    for name, of_group in (*GPU_ROUTES.items(), ("pull by kernels", {"route": "pull"}), ("pieces", {"slots": 4})):
        experts = ExpertGroup(group, E, **of_group)
        experts.peers.copies = name != "pull by kernels"
        inputs = on_gpu(inputs_of(rank, size, "equal" if experts.route == "static" else "uneven"), torch.bfloat16)
        of_packed, _ = packed(inputs, ("mxfp4", "mxfp4"))
        for (is_packed, factors, trains, options), save in itertools.product(forms, ("minimal", "recompute")):
            weights, trains = of_packed if is_packed else (inputs.w1, inputs.w2), trains or (False, False)
            given = inputs, weights, experts, factors
            runs = [results_of(*given, trains=trains, save=save, **options) for _ in range(2)]
            if factors is None:
                runs.append(results_of(*given, trains=trains, save=save, row_precision="fp8", **options))
            found.append((name, inputs, weights, factors, trains, options | {"save": save}, runs))
    for name, inputs, weights, factors, trains, options, (got, *others) in found:
        assert all(torch.equal(got[of], other[of]) for other in others for of in got), (name, options)
        want = one_process(inputs, weights, factors, trains, **options)
        on_cpu = copy.copy(inputs)
        for of in ("x", "grad", "weights", "ids", "w1", "w2"):
            setattr(on_cpu, of, getattr(inputs, of).cpu())
        of_cpu = [
            w.cpu() if isinstance(w, torch.Tensor) else w._replace(data=w.data.cpu(), scales=w.scales.cpu())
            for w in weights
        ]
        of_factors = factors and factors.with_factors(factor.cpu() for factor in factors.factors)
        # A slot's numbers are those of one process. Sums of weight gradients over rows may be split elsewhere.
        tolerances = dict.fromkeys(("w1", "w2"), OF_PIECES) if name == "pieces" else {}
        compared(got, want, exact(on_cpu, of_cpu, of_factors), tolerances)
