"""Launches that are kept, on a pretended GPU, which checks what each was compiled for; ``test_pretended_gpu`` runs it.

Each launch is made again and again, with others between that differ in what Triton compiles for. What an assertion says
is nobody's on a pretended GPU, so what must hold is said by ``_must``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pretended_sizes
import pytest
import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from fxprec.kernels.launch import triton_support
from fxprec.kernels.launch.triton_support import Bound, constexpr, int64, jit, tl
from fxprec.kernels.nn.max_pool import max_pool2d
from fxprec.kernels.optim import adam, norm, sgd
from fxprec.kernels.optim.changed_copies import ChangedCopies
from fxprec.kernels.optim.tables import MultiTensorPlan
from pretended_device import RECORD, BadLaunchError

LOW: Final = torch.bfloat16


@jit(do_not_specialize=["loose"])
def many_kinds(x, y, count, loose, wide: int64, scale, RELU: constexpr, BLOCK: constexpr):
    """Of each kind an argument. x: any [BLOCK]; y: the same, or None."""
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places * count).to(tl.float32) * scale + loose + wide
    if RELU:
        value = tl.maximum(value, 0.0)
    if y is not None:
        value += tl.load(y + places).to(tl.float32)
    tl.store(x + places, value.to(x.dtype.element_ty))


PLAIN: Final = triton.jit(do_not_specialize=["loose"])(many_kinds.fn)
#: Beside one launch others that differ from it in one argument, by its place.
ARGUMENTS: Final = [
    ("x", [0, "odd", "half"]), ("y", ["x", None, "half", "odd"]), ("count", [5, 1, 16, 17, 2**31, 2**31 + 16, -1]),
    ("loose", [5, 1, 16, 2**40]), ("wide", [5, 1, 16, 2**40]), ("scale", [0.5, 1.0, 1, 2]), ("RELU", [False, True]),
    ("BLOCK", [64, 128]),
]  # fmt: skip
MEMORY: Final = torch.zeros(1 << 12)
TENSORS: Final = {0: MEMORY, "x": MEMORY, "odd": MEMORY[1:], "half": MEMORY.to(LOW), None: None}


def _launches() -> Iterator[tuple[Any, ...]]:
    """The arguments of each launch."""
    first = [given[0] for _, given in ARGUMENTS]
    for place, (_, given) in enumerate(ARGUMENTS):
        for value in given:
            changed = [*first]
            changed[place] = value
            yield tuple(TENSORS[each] if where < 2 else each for where, each in enumerate(changed))


def _must(hold: bool, what: object) -> None:
    if not hold:
        raise BadLaunchError(str(what))


def _compiled_for(compiled: Any) -> tuple[Any, ...]:
    return compiled.src.signature, compiled.src.constants, compiled.src.attrs, compiled.metadata.num_warps


def test_a_kept_launch_is_what_triton_would_launch() -> None:
    grids: list[Sequence[int]] = []
    RECORD.look = lambda launched, grid, arguments: grids.append(grid)
    for arguments, grid, warps in [*itertools.product(_launches(), [(3,), (3, 2)], [2, 4])] * 2:
        grids.clear()
        own = many_kinds[grid](*arguments, num_warps=warps)
        _must(grids == [(*grid, 1, 1)[:3]], f"{grids}, not {grid}")
        plain = PLAIN[grid](*arguments, num_warps=warps)
        _must(_compiled_for(own) == _compiled_for(plain), f"{_compiled_for(own)} for {arguments}, {warps} warps")
    RECORD.look = None


@jit(do_not_specialize=["loose"])
def given_first(x, y, scale, count, loose, BLOCK: constexpr):
    """What changes from launch to launch, then what does not. x, y: any [BLOCK]; y may be None."""
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places * count).to(tl.float32) * scale + loose
    if y is not None:
        value += tl.load(y + places).to(tl.float32)
    tl.store(x + places, value.to(x.dtype.element_ty))


def test_a_bound_launch_is_what_triton_would_launch() -> None:
    plain = triton.jit(do_not_specialize=["loose"])(given_first.fn)
    seen: list[tuple[Any, ...]] = []
    RECORD.look = lambda launched, grid, arguments: seen.append((launched.source, tuple(grid), tuple(arguments)))
    for count, grid, warps in itertools.product((1, 5, 16), [(3,), (3, 2)], (2, 4)):
        bound = Bound(given_first, grid, count, 7, 64, num_warps=warps)
        tensors = itertools.product((0, "odd", "half"), ("x", None, "half", "odd"), (0.5, 1.0))
        for x, y, scale in [*tensors] * 2:
            given = TENSORS[x], TENSORS[y] if y != "x" else MEMORY, scale
            bound(*given)
            plain[grid](*given, count, 7, 64, num_warps=warps)
            own, theirs = seen[-2:]
            _must(own[1:] == theirs[1:] and own[2][:2] == given[:2], f"{own} for {given}")
            _must(
                (own[0].signature, own[0].constants, own[0].attrs)
                == (theirs[0].signature, theirs[0].constants, theirs[0].attrs),
                f"another kernel for {given}, {count}",
            )
    RECORD.look = None


def test_what_a_bound_launch_has_triton_look_up(through_triton: list[str]) -> None:
    bound = Bound(given_first, (7,), 3, 4, 32)

    def looked_up(*given: Any) -> bool:
        through_triton.clear()
        bound(*given)
        return bool(through_triton)

    half = TENSORS["half"]
    _must(looked_up(MEMORY, MEMORY, 0.5) and not looked_up(MEMORY, MEMORY, 0.5), "once")
    _must(not looked_up(MEMORY, MEMORY, 0.25), "not for another float")
    _must(looked_up(MEMORY, None, 0.5) and not looked_up(MEMORY, None, 0.5), "once without a tensor")
    _must(looked_up(half, MEMORY, 0.5) and not looked_up(half, MEMORY, 0.5), "once for another dtype")
    _must(looked_up(MEMORY[1:], MEMORY, 0.5) and not looked_up(MEMORY, MEMORY, 0.5), "an odd address")


@pytest.mark.parametrize("made", ["kept", "bound"])
def test_hooks_of_triton_see_each_launch(made: str) -> None:
    """As its profiler has them, also where they come after the first launch."""
    bound = Bound(given_first, (7,), 3, 4, 32)

    def launch() -> None:
        if made == "bound":
            bound(MEMORY, MEMORY, 0.5)
        else:
            many_kinds[(7,)](MEMORY, MEMORY, 3, 4, 5, 0.5, True, 32)

    hooks = triton.knobs.runtime
    given: list[Any] = []
    launched: Any = CompiledKernel.run.fget

    def run_of(compiled: Any) -> Any:
        own = launched(compiled)
        return lambda *args: (given.append(args[6:9]), own(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernel, "run", property(run_of))
        kept_before, many_kinds._kept = many_kinds._kept, {}
        for _ in range(3):
            launch()
        _must(given[-1] == (None, None, None), f"nothing to be told: {given[-1]}")

        def hook(metadata: Any) -> None: ...

        hooks.launch_enter_hook.add(hook)
        launch()
        hooks.launch_enter_hook.remove(hook)
        _must(given[-1][0] is not None and given[-1][1] is hooks.launch_enter_hook, f"{given[-1]}")
        hooks.launch_exit_hook.add(hook)
        launch()
        hooks.launch_exit_hook.remove(hook)
        _must(given[-1][2] is hooks.launch_exit_hook, f"{given[-1]}")
        launch()
        _must(given[-1] == (None, None, None), f"nothing any more: {given[-1]}")
        many_kinds._kept = kept_before


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton looked up."""
    names: list[str] = []
    run = triton.JITFunction.run

    def looked_up(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", looked_up)
    return names


def test_what_triton_looks_up(through_triton: list[str]) -> None:
    x, odd = MEMORY, MEMORY[1:]

    def looked_up(*arguments: Any, **options: Any) -> bool:
        through_triton.clear()
        many_kinds[(7,)](*arguments, **options)
        return bool(through_triton)

    first = (x, x, 3, 4, 5, 0.5, True, 32)
    _must(looked_up(*first) and not looked_up(*first), "once")
    _must(not looked_up(x, x, 3, 4, 5, 0.25, True, 32), "not for another float")
    _must(not looked_up(x, y=x, count=3, loose=4, wide=5, scale=0.125, BLOCK=32, RELU=True), "in whatever order")
    _must(looked_up(odd, *first[1:]) and not looked_up(odd, *first[1:]), "once at an odd address")
    _must(looked_up(x, odd, *first[2:]), "another tensor at an odd address")
    _must(looked_up(*first, num_warps=8), "other options")


def test_kept_launches_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "_MOST", 3)
    many_kinds._kept.clear()
    for count in range(2, 10):
        many_kinds[(1,)](MEMORY, None, count, 1, 1, 1.0, False, 16)
        _must(1 <= len(many_kinds._kept) <= 3, len(many_kinds._kept))


def _optimizers() -> None:
    def tensors(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(size, dtype=dtype) for size in (7, 9000)]

    states, steps = (tensors(torch.float32), tensors(torch.float32)), [torch.zeros(()) for _ in range(2)]
    plan = MultiTensorPlan(tensors(torch.float32), states=states, steps=steps, shadows=tensors(LOW))
    momentum = MultiTensorPlan(tensors(torch.float32), states=states[:1])
    for rate in (0.1, 0.2):
        adam.launch(plan.bind(tensors(LOW)), adam.AdamSettings(weight_decay=0.1), lr=rate)
        norm.launch(plan.bind(tensors(LOW)))
        sgd.launch(momentum.bind(tensors(LOW)), sgd.SgdSettings(0.9), lr=rate)


def _changed_copies() -> None:
    weights = [torch.zeros(size) for size in (7, 9000)]
    copies = ChangedCopies(weights, [weight.to(LOW) for weight in weights], [[w.data_ptr()] for w in weights], [1, 0])
    values = torch.zeros(16, dtype=torch.int32)
    copies.note(values)
    copies.launch(values)


def _pool() -> None:
    x = torch.zeros(2, 64, 8, 8, dtype=LOW).contiguous(memory_format=torch.channels_last).requires_grad_()
    max_pool2d(x, (3, 3), (2, 2), (1, 1)).sum().backward()


def _named(name: str) -> None:
    pretended_sizes.check(pretended_sizes.BY_HAND[name], 32, 64, "dense")


PRODUCT: Final = {
    "optimizers": _optimizers,
    "changed_copies": _changed_copies,
    "max_pool2d": _pool,
    **{name: lambda name=name: _named(name) for name in pretended_sizes.BY_HAND},
}


@pytest.mark.parametrize("name", PRODUCT)
def test_no_kernel_is_looked_up_twice(name: str, through_triton: list[str]) -> None:
    PRODUCT[name]()
    _must(bool(through_triton), "nothing was launched")
    through_triton.clear()
    before = RECORD.launches.total()
    PRODUCT[name]()
    _must(not through_triton and RECORD.launches.total() > before, through_triton)
