"""The worlds that run a case side by side: the converted model, and its twins in eager FP32 and under autocast.

Each has a module namespace of its own, made by executing the source, so that no state is shared but the process's.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import linecache
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import rich.console  # noqa: F401  draws random numbers, once, when it is imported: reports do
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxprec
from fxprec.model.conversion import is_converted
from tests.fuzz.snapshot import Leaves, leaves_of
from tests.fuzz.source import Case

__all__ = ["OF_ORIGINAL", "Stop", "World"]

#: Behind the kind of a log entry: the converted model was asked to run its untouched forward.
OF_ORIGINAL = " of the original"
_NUMBER = itertools.count()


class Stop(Exception):
    """What generated models raise."""


@dataclass
class World:
    """One copy of everything that a case touches.

    Attributes:
        log: what statements gave: a kind and its leaves.
        nudge: seeds by what weights are off from conversion on: half of what bfloat16 tells apart.
        stopped: the statement failed with an error of torch: no further one is comparable.

    The world under autocast is in FP32 until a model is converted: weights that were trained before are the same ones.
    """

    kind: Literal["eager", "autocast", "ours"]
    case: Case
    nudge: int | None = None
    log: list[tuple[str, Leaves]] = field(default_factory=list)
    stopped: str | None = None
    _bypassed: bool = False
    _converted: bool = False

    def __post_init__(self) -> None:
        self.name = f"fuzzed_{next(_NUMBER)}"
        self.filename = f"<{self.name} of seed {self.case.seed}, {self.kind}>"
        self.module = types.ModuleType(self.name)
        sys.modules[self.name] = self.module
        source = self.case.source
        linecache.cache[self.filename] = (len(source), None, source.splitlines(True), self.filename)
        self.scope = vars(self.module)
        self.scope.update(self._tools())
        self._own = {*self.scope}
        self._seed(-1)
        exec(compile(source, self.filename, "exec"), self.scope)
        self.scope["m"] = self.scope["old"] = self.scope["Root"]()

    def close(self) -> None:
        sys.modules.pop(self.name, None)
        linecache.cache.pop(self.filename, None)
        for name in [name for name in os.environ if name.startswith(self.name + "_")]:
            del os.environ[name]
        for name in [name for name in self.scope if name[:2] != "__"]:  # dynamo keeps things of its own there
            del self.scope[name]

    def execute(self, index: int, text: str) -> None:
        """Run a statement; what it raises is part of the log."""
        self._seed(index)
        try:
            exec(compile(text, f"<statement {index}>", "exec"), self.scope)
        except (Stop, AttributeError, KeyError, IndexError, StopIteration) as error:
            self.log.append((f"raised {type(error).__name__}", []))
        except Exception as error:
            self.log.append(("raised", []))
            self.stopped = f"{type(error).__name__}: {error}"
        # torch's first, without its seed and cache of normals: 16 of 624 words tell a state from any other.
        state = (torch.get_rng_state()[24:1024:8].tolist(), random.getstate()[1][-1], np.random.get_state()[2])
        self.log.append(("random state", [("", state)]))

    def snapshot(self) -> Leaves:
        """All state that the case can reach."""
        roots = {name: value for name, value in self.scope.items() if name not in self._own and name[:2] != "__"}
        roots.pop("y", None)
        roots["environment"] = {
            name[len(self.name) :]: value for name, value in os.environ.items() if name.startswith(self.name + "_")
        }
        return leaves_of(roots, self.name)

    # -- what scripts call -----------------------------------------------------------------------------------------

    def _tools(self) -> dict[str, Any]:
        names = ("run", "x", "i", "backward", "step", "convert", "revert", "original", "inspect", "reloaded")
        names += ("functional", "counting_hook")
        tools = {name: getattr(self, f"_{name}") for name in names}
        tools |= {"scaled": _scaled, "scale_weights": _scale_weights, "default_dtype": _default_dtype}
        tools |= {"double": _double, "tripled": _tripled, "every_module_hooked": _every_module_hooked}
        return tools | {"Stop": Stop, "hooks": [], "copy": copy, "saved": None}

    def _seed(self, index: int) -> None:
        torch.default_generator.manual_seed(index + 1)  # the CPU's alone: forty times faster
        random.seed(index)
        np.random.seed(index + 1)

    def _x(self, rows: int, seed: int, grad: bool = False) -> Tensor:
        """Eighths: no dtype rounds them, and no comparison depends on rounding."""
        generator = torch.Generator().manual_seed(seed)
        leaf = torch.randint(-8, 9, (rows, 4), generator=generator) / 8
        if not grad:
            return leaf
        self._leaves.append(leaf.requires_grad_())
        return leaf * 1  # so that it may be written to

    @property
    def _leaves(self) -> list[Tensor]:
        return self.__dict__.setdefault("leaves", [])

    def _i(self, rows: int, seed: int) -> Tensor:
        return torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(seed))

    def _run(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cast = self.kind == "autocast" and self._converted
        context = torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext()
        try:
            with context:
                output = model(*args, **kwargs)
        finally:
            self.log.append(("inputs after the call", leaves_of({"args": args, "kwargs": kwargs}, self.name)))
        lowered = is_converted(self.scope["m"]) and not self._bypassed
        self.log.append(("output" if lowered else "output" + OF_ORIGINAL, leaves_of(output, self.name)))
        return output

    def _backward(self, output: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        tensors = [t for t in tensors if t.is_floating_point()]
        if tensors:
            sum((t.double() * (torch.arange(t.numel()).view(t.shape) / 4 + 0.5)).sum() for t in tensors).backward()
        model = self.scope["m"]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        self.log.append(("gradients", leaves_of([gradients, [leaf.grad for leaf in self._leaves]], self.name)))

    def _step(self, model: nn.Module) -> None:
        torch.optim.SGD(model.parameters(), lr=0.125).step()

    def _convert(self, model: nn.Module) -> nn.Module:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if self.nudge is not None and not self._converted:
            _nudged(model, torch.Generator().manual_seed(self.nudge))
        self._converted = self._converted or dtypes != {torch.float64}  # which is refused
        if self.kind != "ours" or is_converted(model) or dtypes == {torch.float64}:
            return model
        capture = {"static": "auto"}.get(self.case.capture, self.case.capture)
        fxprec.convert(model, dtype=torch.bfloat16, level=self.case.level, capture=capture)
        return model

    def _revert(self, model: nn.Module) -> None:
        if is_converted(model):
            fxprec.revert(model)

    @contextlib.contextmanager
    def _original(self, model: nn.Module) -> Iterator[None]:
        self._bypassed = True
        try:
            with fxprec.original(model) if is_converted(model) else contextlib.nullcontext():
                yield
        finally:
            self._bypassed = False

    def _inspect(self, model: nn.Module) -> None:
        """Looking changes nothing."""
        if is_converted(model):
            with contextlib.suppress(fxprec.CaptureError):
                str(fxprec.report(model))

    def _reloaded(self, model: nn.Module) -> nn.Module:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    def _functional(self, model: nn.Module, factor: float) -> Callable[..., Any]:
        weights = {name: p * factor for name, p in model.named_parameters()}
        return lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)

    def _counting_hook(self) -> Callable[..., Any]:
        def hook(*_: Any) -> None:
            hook.count += 1

        hook.count = 0
        self.scope.setdefault("counting", []).append(hook)
        return hook


def _scaled(state: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: value * factor if value.is_floating_point() else value for name, value in state.items()}


def _nudged(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + signs * 2.0**-9)


def _scale_weights(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.mul_(0.5)


def _double(output: Any) -> None:
    """What a caller may do with what it got."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.mul_(2)


def _tripled(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor * 3, output)


@contextlib.contextmanager
def _every_module_hooked() -> Iterator[None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(output, Tensor) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


warnings.filterwarnings("ignore", category=fxprec.FxprecWarning)
