"""What the processes of `test_exchange.py` run: python -m tests.parallel.ranks RANK SIZE FOLDER BACKEND.

Each case has its own group.
The cases are in the files `ranks_*.py`. Those of faults are last, as groups are of no use after them. "transformers" in
place of a backend runs those of its models over gloo.
"""

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel import (
    ranks_adapters,  # noqa: F401
    ranks_changed_ids,  # noqa: F401
    ranks_composition,  # noqa: F401
    ranks_copied_gradients,  # noqa: F401
    ranks_copies,  # noqa: F401
    ranks_e4m3,  # noqa: F401
    ranks_exchange,  # noqa: F401
    ranks_faults,  # noqa: F401
    ranks_fsdp,  # noqa: F401
    ranks_gpus,  # noqa: F401
    ranks_hosts,  # noqa: F401
)
from tests.parallel.ranks_common import CASES, GPU_CASES, GPU_TIMEOUT, TIMEOUT, Leave


def main():
    rank, size, folder, backend = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)  # what cases write
    cases, timeout = (GPU_CASES, GPU_TIMEOUT) if backend == "nccl" else (CASES, TIMEOUT)
    if backend == "transformers":
        from tests.parallel import ranks_transformers  # takes seconds

        cases, backend = ranks_transformers.MODEL_CASES, "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    results = {}
    written = folder / f"{rank}.json"
    written.write_text("{}")
    for name, function in cases.items():
        if getattr(function, "missing", None):
            continue
        group = dist.new_group(timeout=timeout)
        start = time.monotonic()
        try:
            function(rank, size, group)
            results[name] = None
        except Leave:
            written.write_text(json.dumps(results | {name: None}))
            os._exit(0)
        except Exception:
            results[name] = traceback.format_exc()
        gc.collect()
        torch.cuda.empty_cache()
        print(rank, name, f"{time.monotonic() - start:.1f} s", flush=True)
        written.write_text(json.dumps(results))
    os._exit(0)  # groups whose collectives failed do not end well


if __name__ == "__main__":
    main()
