"""What models return, with low tensors made FP32: the container stays what it was."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.capture.pytrees import has_low_input, leaves_of, restore_dtypes

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


class Slotted:
    __slots__ = ("__hidden", "a", "never", "rest")

    def __init__(self, a, **rest):
        self.a = self.__hidden = a
        self.rest = rest


class Further(Slotted):
    """With a ``__dict__`` beside the slots of its base."""


class Listed(list):
    __slots__ = ("extra",)


class Holder:
    def __init__(self, a, b=None):
        self.a, self.b = a, b


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Tensor
    b: Any = None


OBJECTS = [Slotted, Further, Holder, FrozenSlots]


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_every_object(kind):
    inner = [kind(_low(), b=other(_low())) if kind is not Slotted else kind(_low(), b=_low()) for other in OBJECTS]
    for value in (kind(_low()), kind(_low(), b={"c": inner}), [kind(_low())], kind(_low(), b=Slotted(_low()))):
        count = len([*leaves_of(value)])
        restored = restore_dtypes(value, LOW)
        assert type(restored) is type(value)
        tensors = [leaf for leaf in leaves_of(restored) if isinstance(leaf, Tensor)]
        assert {tensor.dtype for tensor in tensors} == {torch.float32} and len([*leaves_of(restored)]) == count


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": False}, {"slots": False, "frozen": True}])
def test_classes_of_attrs(options):
    attrs = pytest.importorskip("attrs", reason="attrs comes with other packages only")
    kind = attrs.define(**options)(type("Kind", (), {"__annotations__": {"a": Any, "b": Any}}))
    restored = restore_dtypes([kind(_low(), {"c": kind(_low(), None)})], LOW)[0]
    assert type(restored) is kind and restored.a.dtype == restored.b["c"].a.dtype == torch.float32


def test_slots_of_a_list_are_kept():
    value = Listed([_low()])
    value.extra = _low()
    restored = restore_dtypes(value, LOW)
    assert restored[0].dtype == restored.extra.dtype == torch.float32 and value.extra.dtype == LOW


def test_objects_may_hold_each_other():
    one, other = Holder(_low()), Slotted(_low())
    one.b, other.rest = other, one
    assert restore_dtypes(one, LOW) is one and one.a.dtype == other.a.dtype == torch.float32
    assert has_low_input(Holder(1, b=Slotted(_low())), LOW) and not has_low_input(one, LOW)


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


@pytest.mark.parametrize(
    "make", [Output, lambda y: Record(a=y), lambda y: Frozen(y, {"a": y}), *OBJECTS], ids=lambda make: make.__name__
)
def test_of_a_model_in_the_net(make):
    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, _ = fxprec.convert(Returning(make), capture="dynamo")
    x = torch.randn(2, 4)
    with Plain():
        output = model(x)
        assert {tensor.dtype for tensor in _tensors(output)} == {torch.float32}
        assert {tensor.dtype for tensor in _tensors(model(x.to(LOW)))} == {LOW}  # the caller's own dtype
    reference = fxprec.revert(model)(x)
    torch.testing.assert_close(next(iter(_tensors(output))), next(iter(_tensors(reference))), atol=0.05, rtol=0.05)


def _tensors(value):
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
