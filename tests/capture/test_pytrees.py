"""What models return, with low tensors made FP32: the container stays what it was."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.capture.pytrees import has_low_input, restore_dtypes

LOW = torch.bfloat16
Pair = collections.namedtuple("Pair", "first second")


class Record(dict):
    """A dict that pytree does not know."""


class Row(list):
    pass


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        self.made = getattr(self, "made", 0) + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    more: dict


def _low():
    return torch.ones(2, dtype=LOW)


def _dtypes(value):
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if parts is None and dataclasses.is_dataclass(value):
        parts = vars(value).values()
    return [dtype for part in parts or () for dtype in _dtypes(part)]


@pytest.mark.parametrize(
    "value",
    [
        _low(),
        [_low(), (_low(), 1, None)],
        {"a": _low(), "b": {"c": _low()}},
        collections.OrderedDict(a=_low()),
        Pair(_low(), "x"),
        Record(a=_low(), b=[_low()]),
        Row([_low(), Record(a=_low())]),
        Output(_low()),
        Frozen(_low(), {"a": [_low()]}),
        Pair(Output(_low()), Frozen(_low(), {})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_container(value):
    assert set(_dtypes(value)) == {LOW}
    restored = restore_dtypes(value, LOW)
    assert type(restored) is type(value)
    assert set(_dtypes(restored)) == {torch.float32}
    assert len(_dtypes(restored)) == len(_dtypes(value))
    assert set(_dtypes(value)) == {LOW}  # the original is as it was


def test_what_holds_nothing_low_comes_back_itself():
    for value in (
        [torch.ones(1)],
        {"a": torch.ones(1).half()},
        Output(torch.ones(1)),
        Record(a=1),
        None,
        3,
        object(),
        Output,
    ):
        assert restore_dtypes(value, LOW) is value


def test_objects_are_copied_without_their_constructor():
    output = Output(_low())
    output.extra = {"hidden": _low()}
    output.later = _low()
    restored = restore_dtypes(output, LOW)
    assert restored.made == 1
    assert set(_dtypes(restored)) == {torch.float32} and len(_dtypes(restored)) == 3


def test_one_tensor_in_two_places_stays_one():
    shared = _low()
    first, second = restore_dtypes((shared, [shared]), LOW)
    assert first is second[0]


def test_low_inputs_are_found_anywhere():
    assert has_low_input(((torch.ones(1),), {"x": Record(a=[Output(_low())])}), LOW)
    assert not has_low_input(((torch.ones(1), _low().half()), {"x": Record(a=[None])}), LOW)


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.fc(x))


@pytest.mark.parametrize("make", [Output, lambda y: Record(a=y), lambda y: Frozen(y, {"a": y})], ids=["a", "b", "c"])
def test_of_a_model_in_the_net(make):
    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, _ = fxprec.convert(Returning(make), capture="dynamo")
    x = torch.randn(2, 4)
    with Plain():
        output = model(x)
        assert set(_dtypes(output)) == {torch.float32}
        assert set(_dtypes(model(x.to(LOW)))) == {LOW}  # the caller's own dtype
    reference = fxprec.revert(model)(x)
    torch.testing.assert_close(next(iter(_tensors(output))), next(iter(_tensors(reference))), atol=0.05, rtol=0.05)


def _tensors(value):
    return value.values() if isinstance(value, dict) else [value.logits]
