"""`compile`: it fills CuPy's kernel cache, so that the first training step of a layer compiles nothing."""

import argparse
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.loader import Variant
from moeblaze_cupy.tools import dry_run
from moeblaze_cupy.tools.command import CommandError, one_line
from moeblaze_cupy.tools.memory import LayerShape
from moeblaze_cupy.tools.sizes import layer_shape, save_policy


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every kernel compiled, 1 if some did not."""
    try:
        limits = _device_limits()
    except Exception as error:  # a broken CuPy can fail in any way; all of them mean that nothing can be compiled
        raise CommandError(one_line(error)) from error
    s = layer_shape(args, limits.tier)
    try:
        needed = modules(s, save_policy(args), limits, args.accumulate)
    except ValueError as error:  # this GPU's dispatch cannot take the layer
        raise CommandError(one_line(error)) from error
    seconds, failures = 0.0, 0
    # NVRTC releases the GIL, so threads compile in parallel.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        pending = {pool.submit(loader.precompile, variant): variant for variant in needed}
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
                print(f"compile {done}/{len(needed)}: {took:.1f} s {name}", file=sys.stderr)
        except BaseException:  # Ctrl-C: leaving the pool would compile all the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(f"{len(needed) - failures} of {len(needed)} kernels ready, {seconds:.1f} s of compiler time")
    return 1 if failures else 0


def modules(s: LayerShape, save: str | None, limits: DeviceLimits, accumulate: bool = False) -> list[Variant]:
    """Returns one variant of each module that dry runs of training and inference launch.

    It is the union over s.L tokens, half of them, and so on to one token, as a last batch has fewer; over router
    weights in float32 and in the layer's dtype; and with `accumulate` over new gradients and sums in float32.
    """
    tokens = [s.L >> halvings for halvings in range(s.L.bit_length())]
    dtypes, policies, sums = dict.fromkeys(("float32", s.dtype)), dict.fromkeys((save, None)), (False, accumulate)
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Variant] = {}
    for L, dtype, policy, adds in itertools.product(tokens, dtypes, policies, dict.fromkeys(sums)):
        for launch in dry_run.layer(replace(s, L=L, weights_dtype=dtype), policy, limits, adds).launches:
            variant = launch.variant
            module = variant if variant.macros else Variant(variant.source, "")
            found.setdefault((variant.source, variant.macros), module)
    return list(found.values())


def _device_limits() -> launch_config.DeviceLimits:
    """Returns the limits of the current device. Raises RuntimeError saying what is missing."""
    cupy = loader.import_cupy()
    return loader.device_limits(cupy.cuda.runtime.getDevice())
