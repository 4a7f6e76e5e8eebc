"""`compile`: fills CuPy's kernel cache, so that the first training step compiles nothing.

Of sizes that are multiples of 8, that is; others have kernels of their own, which their first step compiles.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.cli.command import CommandError, one_line


def run(args: argparse.Namespace) -> int:
    """0 if every kernel compiled, 1 if some did not."""
    try:
        limits = _device_limits()
    except Exception as error:  # a broken CuPy can fail in any way; all of them mean that nothing can be compiled
        raise CommandError(one_line(error)) from error
    variants = loader.variants(
        dtypes=tuple(args.dtype),
        orders=tuple(args.order),
        activations=tuple(args.activation),
        limits=limits,
        accumulates=args.accumulate,
        weights_on=tuple(args.weights_on),
        fp8_saved=args.save_fp8,
        fp8=args.precision_fp8,
        gate_ups=tuple(args.gate_up),
        biases=tuple(None if bias == "none" else bias for bias in args.bias),
    )
    seconds, failures = 0.0, 0
    # NVRTC releases the GIL, so threads compile in parallel.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        pending = {pool.submit(loader.precompile, variant): variant for variant in variants}
        try:
            for done, future in enumerate(as_completed(pending), start=1):
                name = pending[future].name or pending[future].source  # modules with many entries have no name
                try:
                    took = future.result()
                except Exception as error:
                    failures += 1
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                seconds += took
                print(f"compile {done}/{len(variants)}: {took:.1f} s {name}", file=sys.stderr)
        except BaseException:  # Ctrl-C: leaving the pool would compile all the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(f"{len(variants) - failures} of {len(variants)} kernels ready, {seconds:.1f} s of compiler time")
    return 1 if failures else 0


def _device_limits() -> launch_config.DeviceLimits:
    """The limits of the current device. Raises RuntimeError saying what is missing."""
    cupy = loader.import_cupy()
    return loader.device_limits(cupy.cuda.runtime.getDevice())
