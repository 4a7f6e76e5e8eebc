"""What the process of a rank runs: python -m tests.parallel.ranks BACKEND RANK SIZE FOLDER CONNECTION.

Each case has its own group. The cases are in the files `ranks_*.py`. BACKEND "transformers" runs those of its models
over gloo.
"""

import gc
import sys
import tempfile
from datetime import timedelta

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
    ranks_lora,  # noqa: F401
    ranks_precision,  # noqa: F401
    ranks_quantised,  # noqa: F401
    ranks_torchtitan,  # noqa: F401
)
from tests.parallel.rank_processes import answer
from tests.parallel.ranks_common import CASES, GPU_CASES, GPU_TIMEOUT, TIMEOUT


def main():
    backend, folder = sys.argv[1], sys.argv[4]
    rank, size, connection = (int(sys.argv[place]) for place in (2, 3, 5))
    torch.set_num_threads(1)
    tempfile.tempdir = folder  # what cases write
    cases, timeout = (GPU_CASES, GPU_TIMEOUT) if backend == "nccl" else (CASES, TIMEOUT)
    if backend == "transformers":
        from tests.parallel import ranks_transformers  # takes seconds

        cases, backend = ranks_transformers.MODEL_CASES, "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))

    def run_case(name):
        cases[name](rank, size, dist.new_group(timeout=timeout))
        gc.collect()
        torch.cuda.empty_cache()

    answer(run_case, connection)


if __name__ == "__main__":
    main()
