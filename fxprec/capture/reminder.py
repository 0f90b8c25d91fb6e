"""What a module is called through that reminds of its conversion where it is called outside of the graphs.

torch has that way for ``module.compile()``: it is no hook, which would decline static capture, and no part of copies
and pickles. Graphs never call it, and a trace passes it by.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from fxprec.torch_internals import called_module, run_call


class Reminder:
    """What a module is called through. Keeps no module alive, and is none in a copy.

    Args:
        module: which is called.
        remind: says that it runs in FP32, where it does; of the conversion, with which it goes.
        last: says so when the conversion is gone.
    """

    def __init__(
        self, module: nn.Module, remind: Callable[[nn.Module], None], last: Callable[[nn.Module], None]
    ) -> None:
        self._module = weakref.ref(module)
        self._remind = weakref.WeakMethod(remind)
        self._last = last

    @property
    def outlived(self) -> bool:
        """Whether the conversion is gone."""
        return self._remind() is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return run_call(self._module(), args, kwargs)
        # A replica, or a copy by a method of its class, has the attributes of the module that it was made from.
        module: Any = called_module(sys._getframe(1)) or self._module()
        (self._remind() or self._last)(module)
        return run_call(module, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """What a reminder is in a copy."""
