"""Stand-ins for what Megatron-Core asks of CUDA, so that its layers run on CPUs over gloo."""

import contextlib

import torch


class Nothing:
    """A stream or an event whose methods do nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


STREAM = Nothing()


def to_host(tensor, as_numpy=False, record_stream=False):
    """Megatron's `maybe_move_tensor_to_cpu`, with the NumPy arrays that it makes of tensors on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def replace_cuda(replace):
    """replace: called with an object, the name of an attribute, and what it becomes, as monkeypatch.setattr is."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import token_dispatcher

    from moeblaze_cupy.interop.megatron import experts

    for name in ("Stream", "Event"):
        replace(torch.cuda, name, Nothing)
    for name in ("current_stream", "default_stream"):
        replace(torch.cuda, name, lambda *_: STREAM)
    replace(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    replace(torch.cuda, "current_device", lambda: "cpu")
    for name in ("synchronize", "empty_cache"):
        replace(torch.cuda, name, lambda *_, **__: None)
    replace(torch.Tensor, "cuda", lambda self, *_, **__: self)
    replace(torch.Tensor, "record_stream", lambda *_: None)
    replace(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        replace(random, name, lambda *_, **__: None)
    for module in (tensor_parallel, random, layers, experts):
        replace(module, "get_cuda_rng_tracker", Nothing)
