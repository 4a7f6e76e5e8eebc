"""Experts of transformers' models in four and eight bits, in the place of their weights."""

import functools
import math
from typing import Any

import torch
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from moeblaze_cupy import checks
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import quantised as torch_quantised
from moeblaze_cupy.interop.transformers import private
from moeblaze_cupy.interop.transformers.formula import name_of
from moeblaze_cupy.quantised import api as quantised
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.types import NestedScales, QuantizedWeight

Tensor = torch.Tensor
Pair = tuple[QuantizedWeight, QuantizedWeight]


def projections(module: Any) -> tuple[str, str]:
    """Returns the names of the parameters of w1 and w2."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def pack(module: Any, w1: Tensor, w2: Tensor, format: str) -> None:
    """Packs the weights of a module in the place of its parameters. On the device meta it makes room for the parts.

    w1, w2: views of the parameters in the layer's order.
    """
    if w1.is_meta:
        dtype = str(w2.dtype).removeprefix("torch.")
        made = quantised.forms("pack_experts", format, tuple(w1.shape), tuple(w2.shape), dtype)
        hold(module, made, [torch_quantised.empty_bytes(form, "meta") for form in made])
    else:
        made = quantised.quantize_experts(w1.detach(), w2.detach(), format)
        hold(module, made, list(map(torch_quantised.as_bytes, made)))


def check_dtype(function: str, argument: str, dtype: torch.dtype) -> None:
    """Raises TypeError for a dtype that nothing decodes to. On meta nothing else would before the first forward."""
    got = str(dtype).removeprefix("torch.")
    if got not in quantised_checks.DTYPES:
        expected = f"{' or '.join(quantised_checks.DTYPES)} for packed experts"
        raise checks.bad_type(function, argument, expected, got)


def hold(module: Any, weights: Pair, parts: list[dict[str, Tensor]]) -> None:
    """Puts parts, in bytes, in the place of a module's parameters, of which empty ones are left."""
    module.moeblaze_packed, module.moeblaze_shapes = {}, {}
    for name, weight, of_weight in zip(projections(module), weights, parts, strict=True):
        whole = getattr(module, name)
        device = "cpu" if whole.is_meta else whole.device
        empty = torch.empty(0, dtype=getattr(torch, weight.dtype), device=device)
        place = torch.nn.Parameter(empty, requires_grad=False)
        num_experts, k, n = weight.shape
        module.moeblaze_shapes[name] = tuple(whole.shape) if whole.dim() == 3 else (num_experts, n, k)
        setattr(module, name, place)
        for part, suffix in _suffixes(weight).items():
            tensor = of_weight[part]
            if suffix == "blocks":
                tensor = tensor.view(*tensor.shape[:2], -1, 16)
            module.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(tensor, requires_grad=False))
        nested = weight.nested and NestedScales(None, None, None)
        module.moeblaze_packed[name] = weight._replace(data=None, scales=None, nested=nested)
    module.register_load_state_dict_pre_hook(_expect_no_places)
    module.register_forward_pre_hook(_refuse_own_forward)


def tell_shapes(module: Any) -> None:
    """Gives empty parameters `ds_shape`, where peft looks for the shapes of those that DeepSpeed emptied.

    Copies of parameters have no such attributes, so this is called for each adapter.
    """
    for name, shape in getattr(module, "moeblaze_shapes", {}).items():
        getattr(module, name).ds_shape = shape


def _suffixes(weight: QuantizedWeight) -> dict[str, str]:
    """Returns by part the end of its parameter's name; those of "mxfp4" are of gpt-oss's checkpoints."""
    nested = {} if weight.nested is None else {part: part for part in NestedScales._fields}
    return {"data": "blocks" if weight.format == "mxfp4" else "data", "scales": "scales", **nested}


def refuse_saving(module: Any) -> None:
    """Has `save_pretrained` raise for all models of transformers that have the module in them, but for adapters alone.

    Models around the one that was packed, and copies, are not known here. So the class asks.
    """
    module.moeblaze_unsaved = True
    plain = PreTrainedModel.save_pretrained
    if hasattr(plain, "moeblaze"):
        return

    @functools.wraps(plain)
    def save_pretrained(self: Any, *args: Any, **named: Any) -> Any:
        parts = () if private.saves_adapters(self) else self.modules()
        if any(getattr(part, "moeblaze_unsaved", False) for part in parts):
            instead = "torch.save(model.state_dict(), path), for `load_state_dict` of a model that is packed"
            got = f"those of pack_experts: `from_pretrained` would not find their weights: {instead}"
            raise RuntimeError(f"save_pretrained: model: expected experts in floats, got {got}")
        return plain(self, *args, **named)

    save_pretrained.moeblaze = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def packed(module: Any, whole: bool = False) -> Pair | None:
    """Returns the frozen w1 and w2 of a module, of this rank's experts, or None if it has weights in floats.

    whole: raises RuntimeError for DTensors. The forward of `parallelize_experts`, which takes a rank's part of them, is
    lost by pickling, and FSDP2 gathers in what it wraps alone.
    """
    forms = getattr(module, "moeblaze_packed", None)
    if forms:
        w1, w2 = (_packed(module, name, form, whole) for name, form in forms.items())
    elif private.is_fp8(module):
        w1, w2 = (_of_fp8_experts(module, name, whole) for name in projections(module))
    else:
        return None
    return w1, w2


def _packed(module: Any, name: str, form: QuantizedWeight, whole: bool) -> QuantizedWeight:
    place = private.own_parameter(module, name)
    _check_frozen(module, name, place, place is not None and place.requires_grad)
    parts = [_local(module, getattr(module, f"{name}_{suffix}"), whole) for suffix in _suffixes(form).values()]
    form = form._replace(shape=(len(parts[0]), *form.shape[1:]))
    return torch_quantised.from_bytes(form, getattr(torch, form.dtype), *parts)


def _of_fp8_experts(module: Any, name: str, whole: bool) -> QuantizedWeight:
    """Reads a weight of `FP8Experts` as it lies. Its products are in bf16, so scales of activations are not used."""
    codes = private.own_parameter(module, name)
    trains = module.training and torch.is_grad_enabled() and codes is not None and codes.requires_grad
    _check_frozen(module, name, codes, trains)
    data, scales = (_local(module, part, whole).detach() for part in (codes, getattr(module, f"{name}_scale_inv")))
    num_experts, n, k = data.shape
    if data.dtype in (torch.int8, torch.uint8):
        return QuantizedWeight(data, scales, "mxfp4", (num_experts, 2 * k, n))
    grid = tuple(scales.shape[1:])
    block = tuple(module.block_size or ())
    if tuple(math.ceil(size / of) for size, of in zip((n, k), block, strict=False)) != grid:
        block = n // grid[0], k // grid[1]  # one scale for each of w1's halves, or for all rows
    return QuantizedWeight(data, scales, "e4m3", (num_experts, k, n), block)


def _local(module: Any, part: Any, whole: bool) -> Any:
    if not hasattr(part, "to_local"):
        return part
    if whole:
        expected = "whole packed experts; load a state dict into a model that is spread, and call what FSDP2 wraps"
        raise RuntimeError(f"moeblaze: {name_of(type(module))}: expected {expected}, got DTensors")
    return part.to_local()


def _check_frozen(module: Any, name: str, parameter: Any, trains: bool) -> None:
    """Raises ValueError for what would train nothing in silence."""
    if parameter is None or trains:
        expected = "a frozen weight, as it is packed; requires_grad_(False) freezes it"
        got = "W + BA, of a parametrisation" if parameter is None else "one that requires a gradient"
        raise checks.bad_value("moeblaze", f"{name_of(type(module))}.{name}", expected, got)


def packed_by_others(name: str, module: Any) -> Pair | None:
    """Returns what other libraries have packed, in its memory, or None if there is none.

    name: of the module, for errors. Raises NotImplementedError for layouts that the layer does not read.
    """
    names = projections(module)
    found: Any = [_of_bitsandbytes(module, of) or _of_torchao(getattr(module, of, None)) for of in names]
    if found == [None, None]:
        return None
    reason = next((one for one in found if isinstance(one, str)), "")
    reason = reason or ("one of its weights is in floats" if None in found else "")
    reason = reason or ("they are in the order (E, K, N)" if getattr(module, "is_transposed", False) else "")
    if reason:
        instead = "load the model in bf16 and give a format"
        raise NotImplementedError(f"pack_experts: {name}: its packed weights cannot be read, as {reason}: {instead}")
    for of, weight in zip(names, found, strict=True):
        quantised_checks.expected_parts("pack_experts", f"{name}.{of}", weight)
    return found[0], found[1]


def take_over(module: Any, weights: Pair) -> None:
    """Makes packed experts of what `packed_by_others` returned."""
    for name in projections(module):
        if parametrize.is_parametrized(module, name):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    hold(module, weights, list(map(torch_quantised.as_bytes, weights)))


def _of_bitsandbytes(module: Any, name: str) -> QuantizedWeight | str | None:
    """Reads `parametrizations.NAME` as `replace_parameter_4bit` makes it: one run of nibbles over all experts."""
    if not parametrize.is_parametrized(module, name):
        return None
    state = getattr(module.parametrizations[name][0], "quant_state", None)
    if state is None or state.quant_type != "nf4" or state.blocksize != 64:
        return "they are not in nf4 and blocks of 64"
    num_experts, n, k = state.shape
    nested, blocks = None, state.absmax.view(num_experts, -1)
    if state.nested:
        if state.state2.blocksize != 256:
            return "their scales are not in blocks of 256"
        nested = NestedScales(state.state2.code, state.state2.absmax.view(num_experts, -1), state.offset)
    data = module.parametrizations[name].original.detach().view(num_experts, -1)
    dtype = str(state.dtype).removeprefix("torch.")
    return QuantizedWeight(data, blocks, "nf4", (num_experts, k, n), None, nested, dtype)


def _of_torchao(weight: Any) -> QuantizedWeight | str | None:
    """Reads `Int8Tensor` and `Float8Tensor` by their documented attributes."""
    kind = type(weight).__name__
    if not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "to_local"):
        return None
    if kind not in ("Int8Tensor", "Float8Tensor"):
        return f"{kind} is neither Int8Tensor nor Float8Tensor"
    num_experts, n, k = weight.qdata.shape
    _, rows, columns = weight.block_size or (1, n, k)
    zero_point = getattr(weight, "zero_point", None)
    if getattr(weight, "act_pre_scale", None) is not None or (zero_point is not None and zero_point.any()):
        return "they have zero points, or scales of activations"
    dtype = str(weight.dtype).removeprefix("torch.")
    scales = weight.scale.float().expand(num_experts, -1, -1)
    if kind == "Int8Tensor":
        if columns != k:
            return "a row has several scales"
        scales = scales.repeat_interleave(rows, 1).contiguous()
        return QuantizedWeight(weight.qdata, scales, "int8", (num_experts, k, n), dtype=dtype)
    if weight.qdata.dtype is not torch.float8_e4m3fn:
        return f"their codes are in {weight.qdata.dtype}"
    return QuantizedWeight(weight.qdata, scales.contiguous(), "e4m3", (num_experts, k, n), (rows, columns), dtype=dtype)


def in_one_dtype(x: Tensor, w1: QuantizedWeight, w2: QuantizedWeight) -> tuple[Tensor, Any, Any]:
    """Returns x in the dtype to which the weights are decoded; or all of it in autocast's, to which `moe` casts x."""
    if not torch_arguments.in_autocast(x):
        return x.to(getattr(torch, w2.dtype)), w1, w2
    dtype = str(torch.get_autocast_dtype(x.device.type)).removeprefix("torch.")
    if dtype == "float16":
        raise checks.bad_type("moeblaze", "torch.autocast", "bfloat16 for packed experts", dtype)
    return x, w1._replace(dtype=dtype), w2._replace(dtype=dtype)


def _expect_no_places(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in module.moeblaze_packed:
        state.setdefault(prefix + name, private.own_parameter(module, name))


def _refuse_own_forward(module: Any, _: Any) -> None:
    forward, own = vars(module).get("forward"), type(module).forward
    if forward is not None and getattr(forward, "__func__", None) is not own:  # unpickling leaves the class's own
        return
    if not private.is_dispatched(module):
        raise RuntimeError(f"moeblaze: {name_of(type(module))}: call `patch` for packed experts, as before packing")
    name = private.experts_implementation(module)
    if not private.is_of_layer(name):
        expected = "a name of `register` for packed experts; model.set_experts_implementation('moeblaze') sets it"
        raise RuntimeError(f"moeblaze: experts_implementation: expected {expected}, got {name!r}")


class Mxfp4Quantizer(private.Mxfp4HfQuantizer):  # type: ignore[misc]  # transformers gives its modules no types
    """gpt-oss's checkpoints as published, read into packed experts if the experts implementation is the layer's.

    Otherwise it is transformers' own, whose experts do not train. Its checks of the environment would choose to
    dequantise, so they wait until the model's implementation is known.
    """

    packs = False

    def validate_environment(self, *arguments: Any, **named: Any) -> None:
        self._environment = arguments, named
        if not self.pre_quantized or self.quantization_config.dequantize:
            super().validate_environment(*arguments, **named)

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> Any:
        kept = self.quantization_config.modules_to_not_convert
        named_modules = model.named_modules()
        own = {n: m for n, m in named_modules if name_of(type(m)) == "GptOssExperts" and private.converts(n, kept)}
        self.packs = self.pre_quantized and not (self.quantization_config.dequantize or named.get("use_kernels"))
        is_ours = [private.is_of_layer(private.experts_implementation(module)) for module in own.values()]
        self.packs = self.packs and all(is_ours)
        if not self.packs:
            if self.pre_quantized:
                super().validate_environment(*self._environment[0], **self._environment[1])
            return super()._process_model_before_weight_loading(model, **named)
        for module in own.values():
            check_dtype("from_pretrained", "dtype", module.gate_up_proj.dtype)
            pack(module, module.gate_up_proj, module.down_proj, "mxfp4")
            private.keep_as_loaded(module)
        places = (f"{prefix}.{name}" for prefix, module in own.items() for name in module.moeblaze_packed)
        private.expect_missing(model, places)
        return model

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if not self.packs:
            return super()._process_model_after_weight_loading(model, **named)
        missing = []
        for prefix, module in model.named_modules():
            places = getattr(module, "moeblaze_packed", {})
            for name in places:
                place = getattr(module, name).requires_grad_(False)  # from_pretrained makes missing ones anew
                place.data = place.data.to(getattr(module, f"{name}_scales").device)
            parts = module.named_parameters(recurse=False) if places else ()
            absent = (n for n, p in parts if not (n in places or p.is_meta or private.is_loaded(p)))
            missing += [f"{prefix}.{name}" for name in absent]
        if missing:  # `keep_as_loaded` has nothing initialise them
            expected = "one with all tensors of packed experts"
            raise checks.bad_value("from_pretrained", "checkpoint", expected, f"none for {', '.join(missing)}")
        return model

    def get_state_dict_and_metadata(self, model: Any, *arguments: Any, **named: Any) -> tuple[dict[str, Any], Any]:
        """Leaves out the empty parameters, which checkpoints do not have."""
        state, metadata = super().get_state_dict_and_metadata(model, *arguments, **named)
        for prefix, module in model.named_modules():
            for name in getattr(module, "moeblaze_packed", {}):
                state.pop(f"{prefix}.{name}", None)
        return state, metadata

    def get_weight_conversions(self) -> list[Any]:
        return [] if self.packs else super().get_weight_conversions()

    @property
    def is_trainable(self) -> bool:
        """Adapters and other parameters may train beside packed experts."""
        return self.packs or super().is_trainable
