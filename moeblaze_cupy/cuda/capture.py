"""Captures of CUDA graphs, through ctypes (CuPy has no binding): threads whose calls do not end those of others."""

import ctypes

_RELAXED = 2  # a CUstreamCaptureMode


def allow_unsafe_calls() -> None:
    """Lets this thread load kernels while another captures a graph, which would otherwise make the capture invalid."""
    mode = ctypes.c_int(_RELAXED)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # nothing is captured without a driver, and the thread finds that out
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
