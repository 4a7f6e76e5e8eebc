"""The e4m3 weights that a module's forwards use, in place of quantising, after a call of `quantize_weights`."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

import moeblaze_cupy as mb
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.torch import private
from moeblaze_cupy.types import Fp8Weights

Tensor = torch.Tensor
Weight = Tensor | tuple[Tensor, Tensor]  # w1 may be a pair (gate, up)

_ADAPTED = "moeblaze_adapted"  # attribute of modules that have adapters
_holding: "weakref.WeakSet[HeldFp8Weights]" = weakref.WeakSet()


class HeldFp8Weights:
    """`Fp8Weights` from a call of `hold` to the next one, or to `release`, for forwards with the same parameters.

    A forward that is given other tensors quantises them. Writes to the parameters meanwhile are not seen.
    Weights that a CUDA graph holds serve the forwards that graphs capture, as they are not written before a replay.
    A copy of a module, by deepcopy or pickle, begins without any.
    """

    def __init__(self) -> None:
        self.weights: Fp8Weights | None = None
        self._parameters: tuple[weakref.ref[Tensor], ...] = ()
        self._in_capture = False
        self._memory: Fp8Weights | None = None  # the next call writes this memory, which graphs and compiled code know
        self._form: tuple[Any, ...] = ()  # form of w1, or its parts, and w2, which this memory fits
        self._is_captured = False  # a CUDA graph may read this memory
        self.gathered: Any = None  #: the `fsdp_e4m3.Experts` that make w1 and w2 travel in e4m3, if any do

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return HeldFp8Weights, ()

    def release(self) -> None:
        """Forwards quantise from now on."""
        self.weights = None
        if not self._is_captured:
            self._memory = None

    def of(self, *parameters: Tensor) -> Fp8Weights | None:
        """Returns the weights that were made of these very objects, or None, upon which `moe` quantises."""
        if self.weights is None:
            return None
        if not all(made_of() is given for made_of, given in zip(self._parameters, parameters, strict=True)):
            return None
        if self.weights.w2.device != parameters[-1].device:  # `Module.to` leaves the same objects
            return None
        if self._in_capture and (torch.compiler.is_compiling() or not _capturing(parameters[-1])):
            return None
        if not torch.compiler.is_compiling():
            self._is_captured |= not self._in_capture and _capturing(parameters[-1])
        return self.weights

    def is_of(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether the weights were made of any of these parameters."""
        own = {id(made_of()) for made_of in self._parameters}
        return not own.isdisjoint(map(id, parameters))

    @graph_break
    def hold(
        self,
        module: torch.nn.Module,
        parameters: Sequence[Tensor],
        w1: Weight,
        w2: Tensor,
        gate_up: str,
        beside_factors: bool = False,
    ) -> Fp8Weights | None:
        """Writes the weights from w1 and w2, views of the module's parameters, to the memory of the last ones.

        Returns None and holds nothing if the module has adapters or parametrisations. Its forwards use other weights
        then, and the adapters' end may write to the parameters. beside_factors: its adapters are factors that forwards
        take beside the weights, and their end calls `release`.
        """
        self.weights = None
        are_plain = all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters)
        adapted = [part for part in module.modules() if _ADAPTED in vars(part)]
        if not are_plain or adapted != [module] * beside_factors:
            return None
        capturing, parts = _capturing(w2), (*(w1 if isinstance(w1, tuple) else (w1,)), w2)
        form = tuple((part.shape, part.device) for part in parts)
        memory = None if capturing or form != self._form else self._memory
        # Backward keeps no tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            made: Fp8Weights = mb.quantize_weights(w1, w2, memory, gate_up=gate_up)
        for field in fp8_checks.FIELDS:  # graphs of compiled code need no copies of them
            private.mark_static_address(getattr(made, field), guard=False)
        if not capturing:  # replays write again what was made in a capture
            self._memory, self._form = made, form
        self.weights, self._in_capture = made, capturing
        self._parameters = tuple(map(weakref.ref, parameters))
        _holding.add(self)
        return made


def _follow_adapters(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Releases the weights of a module that gets adapters or a parametrisation.

    Their ends write to parameters: peft merges through `.data`. peft's layers have the adapted layer as `base_layer`.
    """
    # A trace makes lists of modules that are there already. Dynamo of torch 2.11 cannot follow what comes next.
    if module is None or torch.compiler.is_compiling():
        return
    if name == "base_layer":
        vars(module)[_ADAPTED] = True
    else:
        vars(module).pop(_ADAPTED, None)
    if name == "base_layer" or isinstance(module, ParametrizationList):
        for held in [held for held in _holding if held.is_of(module.parameters())]:
            held.release()


register_module_module_registration_hook(_follow_adapters)


def is_adapted(module: torch.nn.Module, *names: str) -> bool:
    """Returns whether peft has wrapped a module, also if its adapters are merged, or these parameters are computed."""
    return _ADAPTED in vars(module) or any(is_parametrized(module, name) for name in names)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_parts(function: str, are_parts: bool) -> None:
    """Raises RuntimeError for DTensors, as FSDP2 leaves parameters between forwards."""
    if are_parts:
        expected = "whole parameters; of FSDP2's each forward quantises what it gathered"
        raise RuntimeError(f"{function}: expected {expected}, got DTensors")
