"""Where Megatron's specs name experts: the builder of the layer's, and Megatron's own where the layer cannot serve."""

import functools
import importlib
import logging
import sys
from typing import Any

from moeblaze_cupy import checks
from moeblaze_cupy.types import SAVE_POLICIES

PROVIDERS = {  # by module: they name the experts of models of Megatron's own layers, and of Transformer Engine's
    "megatron.core.models.backends": "LocalSpecProvider",
    "megatron.core.extensions.transformer_engine_spec_provider": "TESpecProvider",
}
logger = logging.getLogger(__name__)


def install(save: str = "minimal") -> None:
    """Has specs that Megatron makes from now on build their experts by `build_experts`.

    A second call changes `save`. Specs that were made before, such as those that `hybrid_layer_specs` makes while it
    is imported, keep theirs: call this first, or start the program by `python -m moeblaze_cupy run --megatron`.
    save: what the experts keep for backward, "minimal", "recompute", "fp8" or "paper", as of `moe`.
    Raises ValueError for another `save`.
    """
    checks.one_of("install", "save", save, SAVE_POLICIES[:-1])
    for module in PROVIDERS:
        importlib.import_module(module)
    install_loaded(save)


def install_loaded(save: str = "minimal") -> None:
    """`install` for the providers that have been imported, without an import of Megatron."""
    for module, name in PROVIDERS.items():
        provider: Any = getattr(sys.modules.get(module), name, None)
        if provider is not None:
            _replace(provider, save)


def _replace(provider: Any, save: str) -> None:
    present = provider.grouped_mlp_modules
    own = getattr(present, "of_megatron", present)

    @functools.wraps(own)
    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool) -> Any:
        return functools.partial(build_experts, fallback=own(self, moe_use_grouped_gemm), save=save)

    provider.grouped_mlp_modules = grouped_mlp_modules
    provider.grouped_mlp_modules.of_megatron = own


def build_experts(
    num_local_experts: int,
    config: Any,
    /,
    *,
    pg_collection: Any,
    name: str | None = None,
    fallback: Any,
    save: str = "minimal",
) -> Any:
    """Returns the experts of a Megatron layer: a `MoeblazeGroupedMLP`, or those of `fallback` with a reason in the log.

    The first four are those of Megatron's `ExpertsBuilder`, which `fallback` is. save: see `install`.
    """
    from moeblaze_cupy.interop.megatron import configuration, experts

    refused = configuration.refusal(config, pg_collection)
    if refused is None:
        _tell("the routed experts are computed by moeblaze_cupy")
        return experts.MoeblazeGroupedMLP(num_local_experts, config, pg_collection=pg_collection, name=name, save=save)
    _tell(f"the routed experts stay Megatron's, as moeblaze_cupy does not serve {refused}")
    return fallback(num_local_experts, config, pg_collection=pg_collection, name=name)


@functools.cache  # once, though a model has many layers
def _tell(text: str) -> None:
    from megatron.core.utils import log_single_rank

    log_single_rank(logger, logging.WARNING, text)
