"""What `examples/torchtitan_experts.py` takes of torchtitan, with its names and signatures, for the CPU.

`installed` puts it in the place of the package. RoutedExperts here computes every expert of a token by torch.
"""

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, fields
from unittest import mock

import torch
from torch.distributed.tensor import Shard, distribute_tensor


class Configurable:
    """A class whose nested Config builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self):
            return type(self).owner(self)

    def __init_subclass__(cls):
        super().__init_subclass__()
        if "Config" in vars(cls):
            cls.Config.owner = cls


class Module(torch.nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def parallelize(self, parallel_dims):
        for child in self.children():
            child.parallelize(parallel_dims)


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int
        score_before_experts: bool = False

    def __init__(self, config):
        self.ep_mesh = None

    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh


class GroupedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config):
        super().__init__()
        E, F, D = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD = torch.nn.Parameter(torch.empty(E, F, D, dtype=torch.float64))
        self.w2_EDF = torch.nn.Parameter(torch.empty(E, D, F, dtype=torch.float64))
        self.w3_EFD = torch.nn.Parameter(torch.empty(E, F, D, dtype=torch.float64))

    def parallelize(self, parallel_dims):
        mesh = parallel_dims.get_optional_mesh("ep")
        for name, whole in list(self.named_parameters()) if mesh else ():
            here = distribute_tensor(whole.detach(), mesh, [Shard(0)])
            setattr(self, name, torch.nn.Parameter(here))


class RoutedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_experts: GroupedExperts.Config
        token_dispatcher: LocalTokenDispatcher.Config

    def __init__(self, config):
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def parallelize(self, parallel_dims):
        super().parallelize(parallel_dims)
        self.token_dispatcher.wire_meshes(ep_mesh=parallel_dims.get_optional_mesh("ep"))

    def forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        out, experts = torch.zeros_like(x_TD), self.inner_experts
        for expert, (w1, w2, w3) in enumerate(zip(experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, strict=True)):
            scores = torch.where(topk_expert_ids_TK == expert, topk_scores_TK, 0).sum(1, keepdim=True)
            out = out + scores * ((torch.nn.functional.silu(x_TD @ w1.T) * (x_TD @ w3.T)) @ w2.T)
        return out


def derive(config, kind, **deltas):
    shared = {f.name: getattr(config, f.name) for f in fields(config) if f.name in {g.name for g in fields(kind)}}
    return kind(**(shared | deltas))


OVERRIDES = {}  # factories by the Config that they replace


def override(*, target, description):
    def register(factory):
        OVERRIDES[target] = factory
        return factory

    return register


@contextmanager
def installed():
    """Within it `import torchtitan` finds this."""
    names = "torchtitan", "torchtitan.config", "torchtitan.models", "torchtitan.models.common"
    modules = {name: types.ModuleType(name) for name in (*names, "torchtitan.models.common.moe")}
    vars(modules["torchtitan.config"]).update(derive=derive, override=override)
    vars(modules["torchtitan.models.common.moe"]).update(GroupedExperts=GroupedExperts, RoutedExperts=RoutedExperts)
    with mock.patch.dict(sys.modules, modules):
        yield
