"""Experimental: collectives of FSDP2 by the GPUs' copy engines, for GPUs of one host that access each other's memory.

This package's products take all multiprocessors, and a collective of NCCL is a kernel that competes for them. Copy
engines take none.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy import checks
from moeblaze_cupy.interop.fsdp.e4m3 import attach_parts, parts_of
from moeblaze_cupy.interop.fsdp.gather import AllGather, shards_of, straight_of
from moeblaze_cupy.interop.fsdp.memory import Memory
from moeblaze_cupy.interop.fsdp.private import Group, Parameter, groups_of
from moeblaze_cupy.interop.fsdp.sums import GradientSums, ShardReducer, can_be_summed
from moeblaze_cupy.interop.parallel import collectives
from moeblaze_cupy.interop.parallel.driver import Moment, current_stream
from moeblaze_cupy.interop.parallel.group import reach_each_other, this_gpu
from moeblaze_cupy.interop.parallel.peers import Peers, others

Tensor = torch.Tensor


class CopyEngines:
    """All-gathers and reduce-scatters of a group, for modules of `torch.distributed.fsdp.fully_shard`.

    Experimental: it needs private names of FSDP2, those in `interop/fsdp/private.py`, which another torch may lack.
    group: the process group or one-dimensional mesh that shards the modules' parameters, with a GPU for each rank. All
    ranks make it at the same point.
    It keeps one buffer for the largest module's gradients that FSDP2 reduces, and two for what other ranks store of the
    largest module's other gradients. For as many modules as have been gathered at once, at least two, it keeps the
    shards of large parameters that other ranks have. Parameters of the same sizes in all modules have this memory in
    turn.
    Gradients are summed in float32, always in the same order, and rounded once. So where parameters are bfloat16,
    `reduce_dtype=torch.bfloat16` loses nothing to float32, and half the bytes travel.
    A CUDA graph can capture steps of attached modules, if shards of large parameters are multiples of 2 MiB and two
    such steps have run. Afterwards gathers in another order, or another reshard_after_forward, raise RuntimeError.
    Raises ValueError on all ranks where the GPUs are not of one host or do not access each other's memory.
    """

    def __init__(self, group: Any) -> None:
        group = group.get_group() if hasattr(group, "get_group") else group
        group = dist.group.WORLD if group is None else group
        with collectives.named("GPUs of CopyEngines", group):
            gpus = collectives.gather_objects(this_gpu() if "nccl" in dist.get_backend(group) else None, group)
        if not reach_each_other(gpus):
            expected = "GPUs of one host that access each other's memory, a rank each"
            got = [" ".join(gpu[:2]) if gpu else dist.get_backend(group) for gpu in gpus]
            raise ValueError(f"CopyEngines: group: expected {expected}, got {got}")
        place = dist.get_rank(group), len(gpus)
        self._gathers: weakref.WeakValueDictionary[int, AllGather] = weakref.WeakValueDictionary()  # module's id as key
        self._group, self._memory = group, Memory(Peers(group), *place, group)
        self.reduce_scatter, self._sums = ReduceScatter(Peers(group), *place), GradientSums(Peers(group), *place)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the buffers on this rank, which torch.cuda does not count."""
        return self._memory.nbytes + self.reduce_scatter.peers.nbytes + self._sums.peers.nbytes

    def attach(self, *modules: Any, in_e4m3: bool = True, stores_gradients: bool = True) -> None:
        """Makes the parameters of these modules travel by copy engines, but not those of sharded modules within them.

        All ranks call it at the same point, between steps, when the parameters have their memory, and again after
        `load_state_dict(assign=True)` or a conversion of the module. Large parameters whose first dimension the ranks
        share evenly are gathered straight to their place. If they have the dtype of `MixedPrecisionPolicy.param_dtype`,
        a rank's part moves to memory that the other ranks read; optimizers and state dicts see the same parameters. No
        parameter may change between `unshard` and `reshard`, as a gathered weight has that memory too.
        in_e4m3: the weights of `MoE(precision="fp8")` that are gathered straight in bfloat16 travel in e4m3, with the
        same results. Each rank quantises its own experts. Any other reader of the gathered parameters than the
        module's forward raises RuntimeError. Modules with accumulate_into_main_grad are left out.
        stores_gradients: on at most 8 ranks, `moe` and `MoE` store the gradients of other ranks' experts in the memory
        of those ranks, and add what others have stored to those of this rank. A rank rounds its part to the products'
        dtype; the sum is in float32 and rounded once to the parameter's dtype. FSDP2 reduces gradients as before if
        they add up on each rank first (`set_requires_gradient_sync(False)`), or a hook is to see them. All ranks have
        to call the layer equally often in a module's forward, with the same hooks and dispatch modes, all or none in
        compiled code. They would wait for each other otherwise.
        Raises TypeError for a module that `fully_shard` has not been called on, or whose torch has another FSDP2, and
        ValueError for one that is not sharded over this group alone, or over fewer ranks after forward. No module is
        changed then.
        """
        groups = [self._group_of(module) for module in modules]
        found: list[tuple[dict[Parameter, torch.dtype], dict[Parameter, Any], AllGather]] = []
        for module, group in zip(modules, groups, strict=True):  # first all memory, of which there may be too little
            straight: dict[Parameter, torch.dtype] = {}
            parts: dict[Parameter, Any] = {}
            if group is not None:
                module.reshard()
                straight = straight_of(group, self._memory.size)
                parts = parts_of(straight if in_e4m3 else {}, group, self._memory)
            shards = shards_of(straight, self._memory, parts)
            found.append((straight, parts, AllGather(self._memory, shards, group)))
        for module, group, (straight, parts, gather) in zip(modules, groups, found, strict=True):
            if (before := self._gathers.get(id(module))) is not None:
                before.give_up()
            self._gathers[id(module)] = gather
            if group is not None:
                attach_parts(group, parts)
            for parameter, shard in zip(straight, gather.shards, strict=True):
                shard.hook(parameter)
                if (
                    stores_gradients
                    and group is not None
                    and can_be_summed(parameter, shard.whole, group, self._memory.size)
                ):
                    shard.owner = ShardReducer(self._sums, shard, parameter, group)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(self.reduce_scatter)

    def _group_of(self, module: Any) -> Group | None:
        """Returns the group of a module's parameters; None if all are of modules in it."""
        if not hasattr(module, "set_custom_all_gather"):
            expected = "modules after fully_shard, of a torch with set_custom_all_gather"
            raise checks.bad_type("CopyEngines.attach", "modules", expected, type(module))
        groups, here = groups_of(module, "CopyEngines.attach"), dist.get_process_group_ranks(self._group)
        found = []
        for group in groups:
            over = group.process_group
            got = "replicated" if over is None else f"over {dist.get_process_group_ranks(over)}"
            found.append(got + ", but fewer after forward" * group.has_fewer_after_forward)
        if found not in ([], [f"over {here}"]):
            got = " and ".join(found)
            raise ValueError(f"CopyEngines.attach: modules: expected one sharded over ranks {here}, got {got}")
        return groups[0] if groups else None


class ReduceScatter:
    """FSDP2's protocol of a reduce-scatter. FSDP2 calls it on one stream and writes its input on another."""

    def __init__(self, peers: Peers, rank: int, size: int) -> None:
        self.peers, self._rank, self._size = peers, rank, size
        self._is_next = True  # the next allocated memory is for gradients to be reduced
        self._done: Moment | None = None  # the moment since which no rank reads what was reduced last

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory that other ranks read for the input, and then memory of torch for the result."""
        if not self._is_next:
            return torch.empty(size, dtype=dtype, device=device)
        self._is_next = False
        if self._done is not None:
            self._done.wait(current_stream(device))
        room: Tensor = self.peers.room("gradients", ((tuple(size), dtype),), device)[0]
        return room

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            expected = "a sum or mean: call set_force_sum_reduction_for_comms(True) for another divisor"
            raise ValueError(f"CopyEngines: reduction: expected {expected}, got {op}")
        self._is_next = True
        offered = self.peers.offer("gradients", [input_tensor], len(input_tensor))[0]
        places = input_tensor.view(self._size, -1)
        total, own, is_mean = output_tensor.view(-1), places[self._rank], op == dist.ReduceOp.AVG
        parts: Any = places.new_empty(places.shape) if self._size > 2 else {1 - self._rank: total}  # parts by rank
        for rank in others(self._rank, self._size):
            parts[rank].copy_(offered.at[rank].view_as(places)[self._rank])
        self.peers.close()
        if self._size == 2 and is_mean and total.dtype.itemsize == 2:
            torch.lerp(total, own, 0.5, out=total)  # one pass, with the bits of half a sum
        elif self._size == 2:
            total += own
            if is_mean:
                total *= 0.5
        else:
            parts[self._rank].copy_(own)
            (torch.mean if is_mean else torch.sum)(parts, 0, out=total)
        if input_tensor.is_cuda:
            self._done = Moment(current_stream(input_tensor.device))
