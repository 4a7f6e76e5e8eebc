"""Names of torch.distributed that are private or undocumented.

Tested with torch 2.6, 2.11 and 2.13. A later version may lack any of them.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d

# `symmetric_memory` is memory that all ranks of one host reach. The handle of its `rendezvous` has the private class
# _SymmetricMemory: `rank`, `world_size`, `get_buffer`, `buffer_ptrs`, `barrier`, `put_signal` and `wait_signal`.
__all__ = ["all_gather", "gloo_backend", "is_alive", "symmetric_memory"]


def gloo_backend(name: str, timeout: float, group: Any) -> Any:
    """Returns a gloo backend of the ranks of a group, which torch lists nowhere. timeout: in seconds.

    `dist.new_group` finds no name for such a group unless all
    processes have made equally many.
    """
    ranks = dist.get_process_group_ranks(group)
    store = distributed_c10d.PrefixStore(f"{name}/{ranks}", distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), timedelta(seconds=timeout))


def all_gather(backend: Any, by_rank: Any, here: Any) -> Any:
    """Starts an all-gather of `here` (1, n) into `by_rank` (P, n) and returns its work."""
    return backend._allgather_base(by_rank, here)


def is_alive(group: Any) -> bool:
    """Returns whether torch knows a process group, which it does until `destroy_process_group`."""
    return group in distributed_c10d._world.pg_map
