"""Updates parameters by kernels of ours: Triton's, a launch for a whole group, and on a CPU compiled C++ loops.

Torch's kernels on a CPU read gradients in the parameters' dtype and write no shadow, so low ones take a cast before and
a copy after (``torch_update.slices``). A compiled loop (``kernels/cpu/update.cpp``) reads and writes every tensor once,
28 bytes a parameter with low gradients::

    before   cast gradients -> buffer;  update;  copy parameters -> shadows        slice by slice, in a cache
    after    gradient, parameter, moments -> parameter, moments, shadow            in registers

The loop reads hyper-parameters as numbers, so a process needs one library for each set of dtypes and kind of update. It
is compiled in a third of a second when a step first needs it, and stays on disk.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu import cpp
from fxprec.kernels.optim.tables import MultiTensorPlan
from fxprec.optim.parts import Formula, StepInputs, UpdatePart
from fxprec.optim.torch_update import Counters, in_one_order
from fxprec.torch_internals import foreach_add_

#: Elements that a thread takes at a time.
_CHUNK: Final = 1 << 14
_TYPES: Final = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "_Float16"}
_FLAGS: Final = ("ADAM", "L2", "AMSGRAD", "MOMENTUM", "NESTEROV")
#: Names of the tensors, in the order of the source's struct.
_NAMES: Final = ("params", "grads", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "shadow", "scalars")

#: The tensors of all parameters, by the names of ``_NAMES``: those of one parameter have one size and memory order.
#: "scalars" are FP32: ``Formula.scalars``. A shadow may be None.
Lists = Mapping[str, Sequence[Any]]


class Plans:
    """Launches of one optimizer, with a cache of their tables, which are valid while its tensors are the same."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, MultiTensorPlan] = {}

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        """Return an empty cache for copies and pickles: tables hold addresses."""
        return Plans, ()

    def kept(self) -> tuple[MultiTensorPlan, ...]:
        """Return the current plans. A CUDA graph holds those that it was captured with, since it reads their tables."""
        return tuple(self._plans.values())

    def plan(
        self, key: Hashable, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]] = (),
        steps: Sequence[Tensor] | None = None, shadows: Sequence[Tensor | None] | None = None,
        indices: Sequence[int] | None = None,
    ) -> MultiTensorPlan:  # fmt: skip
        """Return the plan of these tensors, a new one if ``key`` had others."""
        plan = self._plans.get(key)
        # Compared by identity: a plan's tables hold the addresses of these very tensors.
        if plan is None or not (
            _same(plan.params, params)
            and len(plan.states) == len(states)
            and all(_same(old, new) for old, new in zip(plan.states, states, strict=True))
            and _same(plan.steps or (), steps or ())
            and _same(plan.shadows or (), shadows or ())
            and plan.indices == tuple(indices or range(len(params)))
        ):
            plan = MultiTensorPlan(params, states=states, steps=steps, shadows=shadows, indices=indices)
            self._plans[key] = plan
        return plan

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place by a launch of the formula's kernel."""
        shadows, rounding = step.copies.for_kernel(part.owners), formula.of_states
        # Random bits depend on a parameter's number in the optimizer, not on its place in this launch.
        places = None if rounding is None else rounding.places_of(part.owners)
        plan = self.plan(
            (formula.kind, formula.first, id(formula.group), *part.key),
            part.lists["params"],
            [*part.states.values()],
            part.lists.get("step"),
            # Without shadows the kernel is compiled without that store.
            None if all(shadow is None for shadow in shadows) else shadows,
            places,
        )
        gradients = plan.bind(part.lists["grads"])
        formula.by_triton(gradients, lr=formula.group["lr"], grad_scale=step.divisor, found_inf=step.found_inf)


class CompiledUpdates:
    """Updates of one optimizer by compiled loops, with the counters cached from step to step."""

    def __init__(self) -> None:
        self._counters = Counters()

    def update(self, part: UpdatePart, formula: Formula, step: StepInputs) -> None:
        """Update a part in place by loops that are compiled when a step first needs them.

        Raises:
            RuntimeError: a loop cannot be compiled, or a state has another device, size or dtype: loops use raw
                addresses. Nothing of this part has changed.
        """
        # Everything is on a CPU, where reading the flag costs nothing.
        if step.found_inf is not None and step.found_inf.item():
            return
        scale = 1.0 if step.divisor is None else step.divisor.reciprocal().item()  # inf for 0, as in torch's kernels
        group = formula.group
        # Counts are mostly equal, so their scalars are computed once for each distinct one.
        scalars = functools.cache(partial(formula.scalars, -scale if group["maximize"] else scale))
        with in_one_order(part.lists) as lists:
            params = lists["params"]
            tensors = {name: of_name for name, of_name in lists.items() if name != "step"}
            _check(tensors)
            shadows = step.copies.for_kernel(part.owners)
            # A shadow of another order of memory is copied afterwards: the loop walks all tensors alike.
            written = [
                shadow if shadow is not None and shadow.is_cpu and shadow.stride() == param.stride() else None
                for shadow, param in zip(shadows, params, strict=True)
            ]
            # One loop for each pair of dtypes of gradient and shadow.
            alike: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
            for i, (gradient, shadow) in enumerate(zip(lists["grads"], written, strict=True)):
                alike.setdefault((gradient.dtype, None if shadow is None else shadow.dtype), []).append(i)
            # All are compiled before the first runs, so that an error leaves every parameter unchanged.
            loops = [(compiled(macros(formula.flags, *dtypes)), places) for dtypes, places in alike.items()]
            counts = [0.0] * len(params)
            if "step" in lists:
                foreach_add_(self._counters.of((id(group), *part.key), lists["step"]), 1)
                counts = [count.item() for count in lists["step"]]
            whole = {**tensors, "shadow": written, "scalars": [*map(scalars, counts)]}
            for run, places in loops:
                run(whole if len(loops) == 1 else {name: [each[i] for i in places] for name, each in whole.items()})
            for shadow, param, own in zip(shadows, params, written, strict=True):
                if shadow is not None and own is None:
                    shadow.copy_(param)


def check_compiler() -> None:
    """Raise before any step if loops cannot be compiled.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    if why := cpp.why_no_compiler():
        raise RuntimeError(
            f"compiled=True wants a C++ compiler for parameters on a CPU ({why}): install g++ or clang++, name one "
            "by the environment variable CXX, or leave compiled out: torch's fused kernels update then"
        )


def macros(flags: Mapping[str, bool], gradient: torch.dtype, shadow: torch.dtype | None) -> tuple[str, ...]:
    """Return the macro definitions of the C++ source for a kind of update (``Formula.flags``) and its dtypes."""
    types = f"GRADIENT={_TYPES[gradient]}", f"SHADOW={_TYPES[shadow or torch.float32]}"
    return *(f"{name}={flags.get(name, False):d}" for name in _FLAGS), *types, f"CHUNK={_CHUNK}"


@functools.cache
def compiled(macros: tuple[str, ...]) -> Callable[[Lists], None]:
    """Return the compiled loop as a function of the lists of any parameters, run with torch's number of threads.

    Raises:
        RuntimeError: it could not be compiled.
    """
    try:
        function = cpp.compiled("cpu/update.cpp", *macros).fxprec_update
    except (cpp.CompilerError, OSError) as error:
        raise RuntimeError(
            f"compiled=True: the update of {' '.join(macros)} could not be compiled; leave it out, and torch's fused "
            f"kernels update: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ) from error
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
    return functools.partial(_run, function)


def _run(function: Callable[..., None], lists: Lists) -> None:
    sizes = [*map(Tensor.numel, lists["params"])]
    before = accumulate((-(-size // _CHUNK) for size in sizes), initial=0)
    # All parameters of a loop have a shadow, or none has: its dtype is part of the source.
    there = [(lists.get(name) or [None])[0] is not None for name in _NAMES]
    known = zip(_NAMES, there, strict=True)
    addresses = [map(Tensor.data_ptr, lists[name]) if has else repeat(0) for name, has in known]
    # ``before`` has one number more: ``sizes`` ends the zip.
    numbers = [*chain.from_iterable(zip(*addresses, sizes, before, strict=False))]
    function((ctypes.c_int64 * len(numbers))(*numbers), len(sizes), torch.get_num_threads())


def _check(tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise RuntimeError unless all tensors are on the CPU, of their parameter's size and, but gradients, in FP32."""
    sizes = [*map(Tensor.numel, tensors["params"])]
    # Checked by a few C loops; which tensor is at fault is found only for the message.
    if all(map(_is_on_host, chain.from_iterable(tensors.values()))) and all(
        [*map(Tensor.numel, of_name)] == sizes and (name == "grads" or {*map(_dtype, of_name)} == {torch.float32})
        for name, of_name in tensors.items()
    ):
        return
    for own in ({name: of_name[i] for name, of_name in tensors.items()} for i in range(len(sizes))):
        found = [f"{name} on {x.device}" for name, x in own.items() if not x.is_cpu]
        found += [f"{name} of {x.numel()} elements" for name, x in own.items() if x.numel() != own["params"].numel()]
        found += [f"{name} in {x.dtype}" for name, x in own.items() if name != "grads" and x.dtype is not torch.float32]
        if found:
            raise RuntimeError(
                f"parameter of shape {tuple(own['params'].shape)} on cpu, {', '.join(found)}: move the optimizer's "
                "state with the model (load_state_dict of its own state_dict does)"
            )


_is_on_host, _dtype = operator.attrgetter("is_cpu"), operator.attrgetter("dtype")


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and all(map(operator.is_, old, new))
