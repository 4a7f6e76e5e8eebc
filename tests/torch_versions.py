"""What the installed torch cannot do, which tests then skip or expect otherwise; each entry says what is missing."""

import pytest
import torch
from torch.distributed import fsdp

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# In 2.10 and 2.11 torch.compile loses checkpoint's mark on what an autograd Function calls: backward gets what forward
# saved, and nothing is computed again.
CHECKPOINTS_COMPILED_FUNCTIONS = VERSION not in ((2, 10), (2, 11))

# torch before 2.9 reports an exception of compiled Python code as "Observed exception", without its message.
NAMES_EXCEPTIONS_OF_COMPILED_CODE = VERSION >= (2, 9)

# Where a backward gives a DTensor no gradient, torch before 2.12 makes one of zeros.
LEAVES_DTENSORS_WITHOUT_GRADIENTS = VERSION >= (2, 12)

needs_grouped_mm = pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="the arms of comparison need grouped_mm, of torch 2.8"
)

needs_models_that_compile = pytest.mark.skipif(
    VERSION < (2, 9), reason="what transformers' models do around the experts compiles whole from torch 2.9 on"
)


# Each is None, or why a test cannot run.
NO_COMPILED_TRAINER = None if VERSION >= (2, 7) else "torch 2.6 compiles code of transformers to names it does not know"
NO_SHARDING_ON_THE_CPU = (
    None if hasattr(torch.cpu.Stream, "record_event") else "FSDP2 on the CPU needs a newer torch than 2.6"
)
NO_SUMS_OF_SHARDING = (
    None
    if hasattr(getattr(fsdp, "FSDPModule", None), "set_gradient_divide_factor")
    else "FSDP2 sums gradients without a mean from torch 2.8 on"
)
NO_EXPERT_PARALLELISM_OF_TRANSFORMERS = (
    None if VERSION >= (2, 7) else "expert parallelism of transformers needs torch 2.7"
)


def needs_none(missing):
    """Decorator of a case of `ranks.py` that is skipped for the reason `missing`, if there is one."""

    def decorate(function):
        function.missing = missing
        return function

    return decorate
