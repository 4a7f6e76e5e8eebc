"""Private names of Megatron-LM. Tested with megatron-core 0.19.2; a later version may lack any of them."""

import sys
from typing import Any


def arguments() -> Any:
    """The arguments of a run of Megatron-LM's own training programs, or None in other programs."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
