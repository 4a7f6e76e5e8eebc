"""Mixture-of-Experts training kernels without routed buffers, after the MoEBlaze paper (arXiv 2601.05296)."""

from pathlib import Path as _Path

# In a checkout the packages kernels_cu and interop lie beside this one; installed, inside it.
_here = _Path(__file__).resolve().parent
if not (_here / "kernels_cu").is_dir() and (_here.parent / "kernels_cu" / "__init__.py").is_file():
    __path__.append(str(_here.parent))

from moeblaze_cupy.layer import build_dispatch, moe_backward, moe_forward, route, route_backward  # noqa: E402
from moeblaze_cupy.structures import DispatchIndices, Gradients, SavedForBackward  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "DispatchIndices",
    "Gradients",
    "SavedForBackward",
    "build_dispatch",
    "moe_backward",
    "moe_forward",
    "route",
    "route_backward",
]
