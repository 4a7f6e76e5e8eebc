"""What an experts module of transformers computes, read off its numbers.

The module is asked for the values of a grid, and the activation of the layer that gives the same values is taken, with
the module's own constants. The same test tells whether gate and up columns lie in halves or alternate.
"""

import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

import moeblaze_cupy as mb
from moeblaze_cupy.structures import ACTIVATIONS, is_gated

Constants = tuple[tuple[tuple[str, ...], Any], ...]

# Gate and up values. The largest are beyond every limit that a class clamps to.
GRID = np.array([-3e4, -40.0, -11.0, -7.5, -4.0, -1.3, -0.4, 0.0, 0.3, 1.1, 3.2, 8.0, 26.0, 3e4])
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # some classes compute in float32 even if their input is float64


class Formula(NamedTuple):
    """What an experts module computes, in the layer's words.

    activation: a name, or an Activation with constants. None if the layer has no such activation; `reason` says why.
    gate_up: the order of gate and up columns, "halves" or "interleaved".
    constants: paths and values of the attributes, of the module and its activation, on which the formula depends.
    """

    activation: str | mb.Activation | None
    gate_up: str
    reason: str
    constants: Constants


# Formulas by kind of module. Only eager calls write it: when torch restarts a trace, it must find the same entries.
_FOUND: dict[tuple[Any, ...], tuple[Formula, ...]] = {}
_WARNED: set[tuple[str, str]] = set()


def formula_of(module: Any) -> Formula:
    """The module's formula. All modules of one kind with the same constants share one probe.

    A compiled graph is guarded by the kind and the constants. If no eager call has met the kind, tracing probes the
    module, and the graph is guarded by the module itself.
    """
    kind = _kind(module)
    formula: Formula
    for formula in _found(*kind):
        if _has(module, formula.constants):
            return formula
    if torch.compiler.is_compiling():
        formula = _probe_at(id(module))
        return formula
    formula = _probe(module)
    _FOUND[kind] = (*_FOUND.get(kind, ()), formula)
    return formula


def _kind(module: Any) -> tuple[Any, ...]:
    """What a formula depends on, apart from constants. The key has the method, not the class: peft and FSDP make
    classes of their own, which keep the method."""
    activation = getattr(module, "act_fn", None)
    kind = type(activation) if isinstance(activation, torch.nn.Module) else activation
    flags = [getattr(module, name, default) for name, default in _FLAGS]
    return getattr(type(module), "_apply_gate", None), kind, *flags


_FLAGS = (("has_gate", True), ("has_bias", False), ("has_post_expert_norm", False))


def _has(module: Any, constants: Constants) -> bool:
    for path, value in constants:
        part = module
        for name in path:
            part = getattr(part, name)
        if part != value:
            return False
    return True


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _found(*kind: Any) -> tuple[Formula, ...]:
    return _FOUND.get(kind, ())


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _probe_at(address: int) -> Formula:
    """`_probe` of the module with this `id`, which guards the graph. Dynamo of torch 2.11 and older hands over no
    module itself."""
    return _probe(ctypes.cast(address, ctypes.py_object).value)


def _probe(module: Any) -> Formula:
    """A decorated module's formula by its values on a grid."""
    gated = getattr(module, "has_gate", True)
    constants = constants_of(module)
    function = getattr(module, "act_fn", None)
    if isinstance(function, torch.nn.Module) and [*function.parameters(), *function.buffers()]:
        return Formula(None, "halves", "its activation has parameters or buffers", constants)
    try:
        activation, gate_up, reason = recognise(module._apply_gate if gated else module.act_fn, gated, constants)
    except Exception as error:  # another library's class may raise anything for values on the CPU
        activation, gate_up = None, "halves"
        reason = f"its activation cannot be evaluated: {type(error).__name__}: {error}"
    return Formula(activation, gate_up, reason, constants)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def refuse(kind: type, reason: str, instead: str, falls_back: bool) -> None:
    """Warns, once for each class and reason, or raises NotImplementedError."""
    name = name_of(kind)
    if not falls_back:
        raise NotImplementedError(f"moeblaze: {name}: {reason}")
    if (name, reason) not in _WARNED:
        _WARNED.add((name, reason))
        warnings.warn(f"moeblaze: {name} runs as {instead}: {reason}", stacklevel=2)


def name_of(kind: type) -> str:
    """The name of transformers' own class: wrappers derive classes from it."""
    names = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    return names[0] if names else kind.__name__


def constants_of(module: torch.nn.Module, path: tuple[str, ...] = ()) -> Constants:
    """Paths and values of the attributes, of the module and its activation, in which activations of a class differ."""
    found: Constants = ()
    for name, value in vars(module).items():
        is_number = type(value) is float or (type(value) is int and any(word in name for word in _CONSTANT_WORDS))
        is_own = name[0] != "_" and name != "training"  # not of torch.nn.Module
        if is_number or (path and is_own and isinstance(value, (str, int, float, np.generic))):
            found += (((*path, name), value),)
    for name, child in module.named_children():
        if path or name == "act_fn":
            found += constants_of(child, (*path, name))
    return found


_CONSTANT_WORDS = ("limit", "alpha", "cap")  # other integers are sizes


def recognise(
    gate: Callable[[torch.Tensor], torch.Tensor], gated: bool, constants: Constants
) -> tuple[str | mb.Activation | None, str, str]:
    """Finds the layer's activation that equals a function.

    gate: maps (n, 2 m) gate and up columns, or (n, m) without a gate, to (n, m). It gets float64 values on the CPU.
    constants: candidates for the constants of an activation, by path, such as ("limit",) or ("act_fn", "gate_softcap").
    Returns (activation, order of gate and up columns, ""), or (None, "halves", reason).
    """
    a, b = (values.ravel() for values in np.meshgrid(GRID, GRID, indexing="ij"))
    got = _values(gate, np.stack([a, b], 1) if gated else a[:, None])[:, 0]
    for activation in _candidates(gated, constants):
        wanted = layer_values(activation, gated, a, b)
        if not _alike(got, wanted):
            continue
        if not gated:
            return activation, "halves", ""
        table, places = wanted.reshape(len(GRID), -1), np.random.default_rng(0).integers(len(GRID), size=(64, 4))
        wide = _values(gate, GRID[places])
        for order, columns in (("halves", ((0, 2), (1, 3))), ("interleaved", ((0, 1), (2, 3)))):
            expected = np.stack([table[places[:, g], places[:, u]] for g, u in columns], 1)
            if _alike(wide, expected):
                return activation, order, ""
        return None, "halves", "its gate and up columns neither lie in halves nor alternate"
    return None, "halves", f"its activation is none of {', '.join(n for n in ACTIVATIONS if is_gated(n) == gated)}"


def _values(function: Callable[[torch.Tensor], torch.Tensor], columns: Any) -> Any:
    with _disable_current_modes(), torch.no_grad():
        return function(torch.from_numpy(columns)).double().numpy()


def _alike(got: Any, wanted: Any) -> bool:
    return got.shape == wanted.shape and bool((abs(got - wanted) <= RELATIVE * abs(wanted) + ABSOLUTE).all())


def _candidates(gated: bool, constants: Constants) -> Iterable[str | mb.Activation]:
    """Activations with every choice of constants: numbers whose paths have all words of the constant's name."""
    numbers = [(".".join(path), value) for path, value in constants if type(value) in (float, int)]
    for name in ACTIVATIONS:
        if is_gated(name) != gated:
            continue
        names = tuple(mb.Activation(name).constants)
        values = [{n for path, n in numbers if all(word in path for word in wanted.split("_"))} for wanted in names]
        for chosen in itertools.product(*values):
            if all(np.isfinite(number) and number > 0 for number in chosen):
                yield mb.Activation(name, **dict(zip(names, chosen, strict=True))) if names else name


def layer_values(activation: str | mb.Activation, gated: bool, a: Any, b: Any) -> Any:
    """(n,) float64: the layer's own values for gate values a (n,) and up values b (n,)."""
    columns = 2 if gated else 1
    x, w1, w2 = np.stack([a, b], 1)[:, :columns], np.eye(columns)[None], np.eye(columns)[None, :1]
    ids, weights = np.zeros((len(a), 1), np.int32), np.ones((len(a), 1))
    return mb.moe_forward(np.ascontiguousarray(x), ids, weights, w1, w2, activation=activation, save=None)[0][:, 0]


def is_dispatched(module: Any) -> bool:
    """Whether transformers lets an implementation compute this module: its decorator sets both attributes."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
