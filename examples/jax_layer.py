"""The layer in JAX, outside jit: moe_forward and moe_backward as a function with a derivative of its own.

python examples/jax_layer.py

Needs jax (pip install jax). Arrays of JAX come in and go out by DLPack, without copies on a GPU. Under jax.jit there
are no arrays to hand over, so the layer is called between jitted parts.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

import moeblaze_cupy as mb


@jax.tree_util.register_pytree_node_class
class Kept:
    """What forward keeps for backward, as a pytree without leaves: JAX carries it as it is."""

    def __init__(self, saved):
        self.saved = saved

    def tree_flatten(self):
        return (), self.saved

    @classmethod
    def tree_unflatten(cls, saved, _):
        return cls(saved)


@jax.custom_vjp
def moe(x, ids, weights, w1, w2):
    """The layer (L, d), with a derivative in reverse mode; arguments as `moeblaze_cupy.moe_forward`."""
    return mb.moe_forward(x, ids, weights, w1, w2, save=None)[0]


def forward(x, ids, weights, w1, w2):
    out, saved = mb.moe_forward(x, ids, weights, w1, w2)
    return out, (Kept(saved), ids)


def backward(residuals, grad_out):
    kept, ids = residuals
    grads = mb.moe_backward(grad_out, kept.saved)
    return grads.x, np.zeros(ids.shape, jax.dtypes.float0), grads.weights, grads.w1, grads.w2


moe.defvjp(forward, backward)


def loss(parameters, x, k):
    """Mean square of a layer with a softmax router."""
    router, w1, w2 = parameters
    weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), k)
    return jnp.mean((moe(x, ids, weights, w1, w2) - x) ** 2)


def main() -> int:
    """1 if the loss did not fall."""
    description, _, details = __doc__.partition("\n\n")
    argparse.ArgumentParser(prog="python examples/jax_layer.py", description=description, epilog=details).parse_args()
    L, k, E, d, h = 64, 2, 4, 16, 32
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((d, E), (E, d, 2 * h), (E, h, d))
    parameters = [jax.random.normal(key, shape) / shape[-2] ** 0.5 for key, shape in zip(keys, shapes, strict=False)]
    x, losses = jax.random.normal(keys[-1], (L, d)), []
    for _ in range(20):
        value, grads = jax.value_and_grad(loss)(parameters, x, k)
        parameters = [p - 0.5 * g for p, g in zip(parameters, grads, strict=True)]
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} on {x.device}")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
