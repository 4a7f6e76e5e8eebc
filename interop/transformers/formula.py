"""What an experts module of transformers computes, by the source of its gate.

The source is compared with those of the gates in transformers' models. What it reads of the module, which are an
activation and constants, is read at every call.
"""

import ast
import ctypes
import functools
import inspect
import math
import textwrap
import types
import warnings
from typing import Any, NamedTuple

import torch
from transformers.activations import ACT2FN

import moeblaze_cupy as mb
from moeblaze_cupy.interop.transformers import private
from moeblaze_cupy.reference.activations import activate
from moeblaze_cupy.types import ACTIVATIONS, is_gated

Path = tuple[str, ...]


class Read(NamedTuple):
    """An attribute on which a formula depends. kind: the class of a module. value: another object. One is None."""

    path: Path
    kind: type | None
    value: Any


class Formula(NamedTuple):
    """What an experts module computes, in the layer's words.

    activation: a name, or an Activation with constants. None if the layer has no such activation; `reason` says why.
    gate_up: the order of gate and up columns, "halves" or "interleaved".
    reads: it is the formula of every module that has the same gate and the same of these.
    """

    activation: str | mb.Activation | None
    gate_up: str
    reason: str
    reads: tuple[Read, ...]


class Source(NamedTuple):
    """A gate, or a part of one, as transformers' models write it.

    form: of the formula; `NAMES` has the activations. text: `self.act` is the activation of the gate columns, and the
    other attributes are constants by their names in `Activation`.
    """

    form: str
    text: str
    gate_up: str = "halves"


# `normal` removes differences of names, annotations, comments, and of `self.act` from a function of torch.
SOURCES = (
    Source(
        "glu",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            return self.act(a) * b""",
    ),
    Source(
        "glu",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            return (self.act(a.float()) * b.float()).to(a.dtype)""",
    ),
    Source(
        "clamp",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            a = a.clamp(max=self.limit)
            b = b.clamp(min=-self.limit, max=self.limit)
            return self.act(a) * b""",
    ),
    Source(
        "clamp_after",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            a = self.act(a).clamp(max=self.limit)
            b = b.clamp(min=-self.limit, max=self.limit)
            return a * b""",
    ),
    Source(
        "oai",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            a = a.clamp(max=self.limit)
            b = b.clamp(min=-self.limit, max=self.limit)
            c = a * self.act(a * self.alpha)
            return (b + 1) * c""",
    ),
    Source(
        "oai",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            a = a.clamp(max=self.limit)
            b = b.clamp(min=-self.limit, max=self.limit)
            c = a * self.act(a * self.alpha)
            d = (b + 1) * c
            return d""",
    ),
    Source(
        "oai",
        """def gate(self, columns):
            a, b = columns[..., ::2], columns[..., 1::2]
            a = a.clamp(max=self.limit)
            b = b.clamp(min=-self.limit, max=self.limit)
            c = a * self.act(a * self.alpha)
            d = (b + 1) * c
            return d""",
        "interleaved",
    ),
    Source(  # `act` has the whole formula
        "pair",
        """def gate(self, columns):
            a, b = columns.chunk(2, dim=-1)
            return self.act(a, b)""",
    ),
    Source(
        "softcap",
        """def forward(self, a, b):
            c = a.dtype
            a, b = a.float(), b.float()
            return (self.gate_cap(a) * self.act(a) * self.up_cap(b)).to(c)""",
    ),
    Source(  # of one column
        "cap",
        """def forward(self, a):
            return self.act(a / self.cap) * self.cap""",
    ),
)

NAMES = {
    ("glu", "silu"): "swiglu",
    ("glu", "gelu"): "geglu",
    ("glu", "gelu_tanh"): "geglu_tanh",
    ("glu", "relu"): "reglu",
    ("clamp", "silu"): "swiglu_clamp",
    ("clamp_after", "silu"): "swiglu_clamp_after",
    ("oai", "sigmoid"): "swiglu_oai",
    ("softcap", "sigmoid"): "swiglu_softcap",
    **{("plain", name): name for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2")},
}

# Activations by class, and by function.
_CLASSES: dict[type, str] = {
    torch.nn.SiLU: "silu",
    torch.nn.ReLU: "relu",
    **{type(ACT2FN[name]): "silu" for name in ("silu", "swish")},
    **{type(ACT2FN[name]): "gelu" for name in ("gelu", "gelu_python")},
    **{type(ACT2FN[name]): "gelu_tanh" for name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")},
    type(ACT2FN["relu2"]): "relu2",
}
_FUNCTIONS: dict[Any, str] = {
    torch.nn.functional.silu: "silu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
    torch.nn.functional.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
}

# Formulas by gate. Only eager calls write it: when torch restarts a trace, it must find the same entries.
_FOUND: dict[Any, tuple[Formula, ...]] = {}
_WARNED: set[tuple[str, str]] = set()


def formula_of(module: Any, activation: str = "") -> Formula:
    """Returns the module's formula.

    activation: for a module whose gate is no method, the path of the function of its gate columns.
    A compiled graph is guarded by the gate and by what it reads. If no eager call has met these, the graph is guarded
    by the module itself, too.
    """
    gate = _gate_of(module, activation)
    formula: Formula
    for number, reads in enumerate(_reads_of(gate)):
        if _holds(module, reads):
            formula = _found(gate, number)
            return formula
    if torch.compiler.is_compiling():
        _holds(module, _reads_at(id(module), activation))  # for the guards
        formula = _formula_at(id(module), activation)
        return formula
    formula = _formula(module, gate)
    if _holds(module, formula.reads):
        _FOUND[gate] = (*_FOUND.get(gate, ()), formula)
    return formula


def _gate_of(module: Any, activation: str) -> Any:
    """Returns the method, which classes that FSDP or peft derive keep, or (form, path of the activation), or None."""
    if activation:
        return "glu", activation
    if not getattr(module, "has_gate", True):
        return "plain", "act_fn"
    return private.gate_method(module)


def _holds(module: Any, reads: tuple[tuple[Any, ...], ...]) -> bool:
    for path, kind, value in reads:
        part: Any = module
        for name in path:
            part = getattr(part, name, None)
        if kind is not None:
            if type(part) is not kind or _does_more(part):
                return False
        # Dynamo cannot compare a module with a constant that is a function of torch.
        elif isinstance(part, torch.nn.Module) or (part is not value and not (_is_constant(part) and part == value)):
            return False
    return True


def _does_more(part: Any) -> bool:
    """Whether a call of the module runs other code than its class's forward. Hooks of accelerate change no numbers."""
    is_replaced = hasattr(part, "forward") and "forward" in part.__dict__  # the first guards compiled code
    return private.has_hooks(part) or (is_replaced and not _has_own_forward_at(id(part)))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _has_own_forward_at(address: int) -> bool:
    return has_own_forward(ctypes.cast(address, ctypes.py_object).value)


def _is_constant(part: Any) -> bool:
    return isinstance(part, (int, float, str)) and not isinstance(part, bool)


# Dynamo of torch 2.11 iterates a constant result only if it consists of plain tuples.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _reads_of(gate: Any) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return tuple(_plain(formula.reads) for formula in _FOUND.get(gate, ()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _found(gate: Any, number: int) -> Formula:
    return _FOUND[gate][number]


def _plain(reads: tuple[Read, ...]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(read) for read in reads)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _reads_at(address: int, activation: str) -> tuple[tuple[Any, ...], ...]:
    return _plain(_formula_at(address, activation).reads)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _formula_at(address: int, activation: str) -> Formula:
    """Calls `_formula` for the module with this `id`, which guards the graph.

    Dynamo of torch 2.11 and older hands over no module itself.
    """
    module = ctypes.cast(address, ctypes.py_object).value
    return _formula(module, _gate_of(module, activation))


class _UnknownError(Exception):
    """Says why the layer does not compute a module."""


def _formula(module: Any, gate: Any) -> Formula:
    reads: list[Read] = []
    try:
        if isinstance(gate, tuple):
            (form, path), order = gate, "halves"
            values = {"act": _value(module, tuple(path.split(".")), reads)}
        elif private.is_fp8(module) and gate is not None:
            (form, values), order = _of_fp8_experts(module, gate, reads), "halves"
        elif gate is None:
            raise _UnknownError("its _apply_gate has been replaced")
        else:
            source, roles = _known(gate)
            form, order, values = source.form, source.gate_up, _values(module, (), roles, reads)
        if form == "pair" and isinstance(values["act"], tuple):
            form, values = values["act"]
        return Formula(_activation(form, values), order, "", tuple(reads))
    except _UnknownError as unknown:
        return Formula(None, "halves", str(unknown), tuple(reads))


# What the one gate of `FP8Experts` computes if these attributes, by constant, are no None: the first that fits.
_FP8_FORMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("softcap", {"gate_cap": "gate_softcap", "up_cap": "up_softcap"}),
    ("oai", {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}),
    ("clamp", {"limit": "limit"}),
    ("glu", {}),
)


def _of_fp8_experts(module: Any, gate: Any, reads: list[Read]) -> tuple[str, dict[str, Any]]:
    """Returns the form and its values. The gate's own numbers confirm them, as its source differs between versions."""
    constants = {name: getattr(module, name, None) for _, names in _FP8_FORMS for name in names.values()}
    reads += [Read((name,), None, value) for name, value in constants.items()]
    form, names = next(one for one in _FP8_FORMS if all(constants[name] is not None for name in one[1].values()))
    values: dict[str, Any] = {role: constants[name] for role, name in names.items()}
    values["act"] = "sigmoid" if form in ("softcap", "oai") else _value(module, ("act_fn",), reads)
    found = _activation(form, values)
    a = torch.linspace(-9, 9, 73, device="cpu", dtype=torch.float64)
    b = a.flip(0) + 0.3
    (of_a, _), (of_b, _) = activate(a.numpy(), b.numpy(), mb.Activation(found) if isinstance(found, str) else found)
    if not torch.allclose(gate(module, torch.cat((a, b))), torch.from_numpy(of_a * of_b), rtol=1e-4, atol=1e-5):
        raise _UnknownError("its gate is none that the layer knows")
    return form, values


def _activation(form: str, values: dict[str, Any]) -> str | mb.Activation:
    constants = dict(values)
    act = constants.pop("act")
    if form in ("clamp", "clamp_after") and constants["limit"] == math.inf:
        form, constants = "glu", {}
    name = None if isinstance(act, tuple) else NAMES.get((form, act))
    if name is None:
        gated = form != "plain"
        raise _UnknownError(f"its activation is none of {', '.join(n for n in ACTIVATIONS if is_gated(n) == gated)}")
    try:
        return mb.Activation(name, **constants) if constants else name
    except (TypeError, ValueError) as error:
        raise _UnknownError(f"its activation cannot be expressed: {error}") from None


def _values(module: Any, path: Path, roles: dict[str, Any], reads: list[Read]) -> dict[str, Any]:
    """Returns by role what `_value` finds at attributes of the part at `path`, or the name of a function of torch."""
    return {
        role: _value(module, (*path, *found), reads) if type(found) is tuple else found for role, found in roles.items()
    }


def _value(module: Any, path: Path, reads: list[Read]) -> Any:
    """Returns a number, the name of an activation, or the (form, values) of a module whose forward is in SOURCES."""
    part = functools.reduce(lambda part, name: getattr(part, name, None), path, module)
    if isinstance(part, (types.FunctionType, types.BuiltinFunctionType)) or _is_constant(part):
        reads.append(Read(path, None, part))
        return part if _is_constant(part) else _FUNCTIONS.get(part)
    if not isinstance(part, torch.nn.Module):
        reads.append(Read(path, None, math.nan))  # which equals nothing, so that the next call looks again
        raise _UnknownError(f"its {'.'.join(path)} is no number and no known function, but of {type(part)}")
    reads.append(Read(path, type(part), None))
    if _does_more(part):
        raise _UnknownError(f"its {'.'.join(path)} has hooks or another forward")
    if type(part) is torch.nn.GELU:
        return "gelu_tanh" if _value(module, (*path, "approximate"), reads) == "tanh" else "gelu"
    if type(part) in _CLASSES:
        return _CLASSES[type(part)]
    try:
        source, roles = _known(type(part).forward)
    except _UnknownError:
        return None
    values = _values(module, path, roles, reads)
    if source.form == "cap":
        return values["cap"] if values["act"] == "tanh" else None
    return source.form, values


@functools.cache
def _known(function: Any) -> tuple[Source, dict[str, Any]]:
    """Returns the source that equals a function's, and by its attributes paths or names of torch's functions."""
    name = getattr(function, "__qualname__", None)
    if type(function) is types.FunctionType and not function.__closure__:
        try:
            definition, free = normal(textwrap.dedent(inspect.getsource(function.__code__)))
        except (OSError, SyntaxError):
            raise _UnknownError(f"the source of {name} cannot be read") from None
        for source in SOURCES:
            wanted, roles = normal(source.text)
            if definition == wanted:
                paths = zip(roles, (_resolved(function, path) for path in free), strict=True)
                return source, {role[-1]: found for role, found in paths}
    raise _UnknownError(f"the layer does not know the source of {name}")


def _resolved(function: Any, path: Path) -> Any:
    """Returns the attributes after `self`, or the name of a function of torch."""
    if path[0] == "self":
        return path[1:]
    found = functools.reduce(lambda part, name: getattr(part, name, None), path[1:], function.__globals__.get(path[0]))
    name = _FUNCTIONS.get(found) if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) else None
    if name is None:
        raise _UnknownError(f"the layer does not know {'.'.join(path)} in {function.__qualname__}")
    return name


def normal(text: str) -> tuple[str, tuple[Path, ...]]:
    """Returns a method's source without what does not matter, and what it reads beside its arguments, in order.

    It reads attributes, ("self", name), and dotted names of its module. Raises SyntaxError for anything but one plain
    method.
    """
    body = ast.parse(text).body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].decorator_list:
        raise SyntaxError("expected one method")
    method = body[0]
    names = method.args.args
    others = (method.args.vararg, method.args.kwarg, *method.args.kwonlyargs, *method.args.posonlyargs)
    if not names or any(others) or method.args.defaults:
        raise SyntaxError("expected plain arguments")
    stored = [node.id for node in ast.walk(method) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    normaliser = _Normaliser([name.arg for name in names], set(stored))
    statements = method.body[1:] if ast.get_docstring(method) is not None else method.body
    lines = [ast.dump(normaliser.visit(statement)) for statement in statements]
    return "\n".join([str(len(names)), *lines]), tuple(normaliser.free)


class _Normaliser(ast.NodeTransformer):
    """Numbers variables, and what else is read, in the order of appearance."""

    def __init__(self, arguments: list[str], stored: set[str]) -> None:
        self.self, self.variables = arguments[0], {name: number for number, name in enumerate(arguments)}
        self.stored = stored
        self.free: dict[Path, int] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.variables and node.id not in self.stored:
            return self._free((node.id,))
        number = self.variables.setdefault(node.id, len(self.variables))
        return ast.Name(f"variable {number}", node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        path, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            path, root = [root.attr, *path], root.value
        if isinstance(root, ast.Name) and isinstance(node.ctx, ast.Load):
            if root.id == self.self and len(path) == 1:
                return self._free(("self", *path))
            if root.id not in self.variables and root.id not in self.stored:
                return self._free((root.id, *path))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "clamp":  # which takes None for no bound
            nothing = ast.dump(ast.Constant(None))
            node.keywords = [keyword for keyword in node.keywords if ast.dump(keyword.value) != nothing]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(float(node.value)) if type(node.value) is int else node

    def _free(self, path: Path) -> ast.AST:
        return ast.Name(f"free {self.free.setdefault(path, len(self.free))}", ast.Load())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def refuse(kind: type, reason: str, instead: str, falls_back: bool) -> None:
    """Warns, once for each class and reason, or raises NotImplementedError."""
    name = name_of(kind)
    if not falls_back:
        raise NotImplementedError(f"moeblaze: {name}: {reason}")
    if (name, reason) not in _WARNED:
        _WARNED.add((name, reason))
        warnings.warn(f"moeblaze: {name} runs as {instead}: {reason}", stacklevel=2)


def name_of(kind: type) -> str:
    """Returns the name of transformers' own class: wrappers derive classes from it."""
    return class_of(kind).__name__


def class_of(kind: type) -> type:
    """Returns transformers' own class, or that of a library that derives from none."""
    return next((base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), kind)


def foreign_forward(module: Any) -> str:
    """Returns why `forward` is not the one that transformers wrote for the module's class, or "".

    Hooks of accelerate and torch.compile may have wrapped it, and it may be this layer's.
    """
    own, forward = class_of(type(module)), module.__dict__.get("forward")
    expected: tuple[str, ...]
    if forward is not None:
        origin, expected = _origin(forward), (own.__module__, "transformers.", f"{__package__}.")
    else:
        holder = next(base for base in type(module).__mro__ if "forward" in vars(base))
        origin = _origin(vars(holder)["forward"])
        expected = (holder.__module__,) if issubclass(own, holder) else ()
    return "" if origin.startswith(expected) else f"its forward has been replaced by one of {origin}"


def has_own_forward(module: Any) -> bool:
    """Whether a call runs the forward of transformers' class, maybe within hooks of accelerate, and nothing else."""
    forward = inspect.unwrap(module.forward)
    return getattr(forward, "__func__", forward) is inspect.unwrap(type(module).forward) and not foreign_forward(module)


def _origin(forward: Any) -> str:
    inner = inspect.unwrap(forward)
    return str(getattr(getattr(inner, "__func__", inner), "__module__", None))
