"""The layer's calls of one rank among several: rows in e4m3 or on their way, results in given memory."""

from moeblaze_cupy.layer.api import LayerExtras, forward, values_and_scales
from moeblaze_cupy.layer.backward_api import BackwardExtras, run_backward
from moeblaze_cupy.types import LayerArrays, LayerOptions, QuantizedWeight, gate_and_up


def forward_into(into, x, ids, weights, w1, w2, activation="swiglu", fp8_weights=None, wait=None, lora=None, **options):
    """out, or what stands in `into`, and what is saved. options: of `LayerOptions`."""
    x, scales = values_and_scales(x)
    extras = LayerExtras(into, wait, fp8_weights, scales, lora=lora)
    halves = (w1, None) if isinstance(w1, QuantizedWeight) else gate_and_up(w1)
    arrays = LayerArrays(x, ids, weights, *halves, w2)
    return forward(arrays, LayerOptions(activation, **options), extras)


def backward_into(grad_x, function, grad_out, saved, needs, keep_saved, accumulate, defers_weights=False, wait=None):
    """Gradients, and what is left for those of weights."""
    extras = BackwardExtras(grad_x, wait, defers_weights)
    return run_backward(function, grad_out, saved, needs, keep_saved, accumulate, extras)
