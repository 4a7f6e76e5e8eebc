"""Skips `gpu` tests where there is no GPU, and fills what the kernels are to write with NaN first."""

import numpy as np
import pytest

from moeblaze_cupy import arrays, loader


def missing_gpu() -> str | None:
    """Why the gpu tests cannot run here, or None."""
    try:
        loader.import_cupy()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


MISSING_GPU = missing_gpu()


def pytest_collection_modifyitems(items):
    if MISSING_GPU is None:
        return
    skip = pytest.mark.skip(reason=f"no GPU: {MISSING_GPU}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_allocations(request, monkeypatch):
    """Device memory the library allocates starts as NaN (floats) or an impossible index (integers)."""
    if "gpu" not in request.keywords:
        return
    for framework in (arrays.CuPy, arrays.Torch):

        def empty(shape, dtype, device, plain=framework.empty):
            buffer = plain(shape, dtype, device)
            if 0 not in shape:
                buffer.array[...] = -(2**30) if dtype.startswith("int") else np.nan
            return buffer

        monkeypatch.setattr(framework, "empty", staticmethod(empty))
