"""The import makes "moeblaze" the experts implementation of models that name none, in this process.

`python -m moeblaze_cupy run` has every process import it after transformers. A model keeps the implementation that it,
its config or its class names, and one that another library has put in place of transformers' own choice.
"""

import functools
import os
import sys
from typing import Any

from transformers.modeling_utils import PreTrainedModel

import moeblaze_cupy.interop.transformers  # noqa: F401  # registers "moeblaze"
from moeblaze_cupy.interop.transformers import private

OWN_CHOICES = ("grouped_mm", "eager")  # of transformers, where a model names none
_quantised: list[Any] = []  # configs of models whose experts another library's kernels compute
_told: list[str] = []  # the class that the process has told of


def _replace_choice() -> None:
    choose = PreTrainedModel.get_correct_experts_implementation

    @functools.wraps(choose)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
        if requested_experts == "moeblaze":  # the check of transformers 5.0 knows no names but its own
            return requested_experts
        name: str = choose(self, requested_experts)
        _note_if_quantised(self.config)
        if requested_experts is not None or name not in OWN_CHOICES or not private.can_set_experts(self):
            return name
        if any(config is self.config for config in _quantised):
            return name
        _tell_once(type(self).__name__)
        return "moeblaze"

    setattr(PreTrainedModel, choose.__name__, get_correct_experts_implementation)


def _note_if_quantised(config: Any, inside: bool = False) -> None:
    """Keeps the config of a quantised model and those inside it, which do not say themselves that it is quantised."""
    quantisation = getattr(config, "quantization_config", None)
    if not inside and (quantisation is None or getattr(quantisation, "dequantize", False)):
        return
    _quantised.append(config)
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _note_if_quantised(getattr(config, name), inside=True)


def _tell_once(model: str) -> None:
    if not _told and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0" and sys.stderr is not None:
        print(f"moeblaze_cupy: {model} names no experts implementation and uses 'moeblaze'", file=sys.stderr)
    _told.append(model)


_replace_choice()
