"""Uses an installed moeblaze_cupy: it is not the checkout's, it has every kernel source, and a layer runs."""

import sys
from importlib import metadata
from pathlib import Path

import numpy as np

import moeblaze_cupy as mb
from moeblaze_cupy import dlpack
from moeblaze_cupy.cuda import loader

checkout = Path(sys.argv[1]).resolve()
package = Path(mb.__file__).resolve().parent
assert checkout not in package.parents, f"{package} is in the checkout"
assert (package / "py.typed").is_file()
files = {path.name for path in metadata.files("moeblaze-cupy") or ()}
assert "sitecustomize.py" in files and not [name for name in files if name.endswith(".pth")]
assert dlpack.is_dlpack(np.zeros(1))

kernels = {path.name: path.read_bytes() for path in (checkout / "kernels_cu").rglob("*.cu*")}
assert kernels == {path.name: path.read_bytes() for path in Path(loader.source_folder()).rglob("*.cu*")}

random = np.random.default_rng(0)
L, k, E, d, h = 32, 2, 4, 16, 8
x, logits, w1, w2 = (random.standard_normal(shape) for shape in ((L, d), (L, E), (E, d, 2 * h), (E, h, d)))
weights, ids = mb.route(logits, k)
out, saved = mb.moe_forward(x, ids, weights, w1, w2)
assert saved is not None
grads = mb.moe_backward(out, saved)
assert out.shape == (L, d) and grads.w1.shape == w1.shape
# sum(out * out) is of degree 2 in w2, which enters linearly: Euler's identity for its gradient
assert np.isclose((grads.w2 * w2).sum(), (out * out).sum())
print(f"moeblaze_cupy {mb.__version__} works from {package}")
