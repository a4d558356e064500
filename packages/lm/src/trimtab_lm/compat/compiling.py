"""What the compiler is told about the tensors that it compiles for, on torch 2.11 to 2.14."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def compiled_for_any_length(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function once for all lengths of its tensors' first dimension, which otherwise takes a second time.

    The other dimensions stay constants of the compiled code: a kernel over rows of unknown width would be slower.
    """
    compiled = torch.compile(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Tensor):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled(*args)

    return call
