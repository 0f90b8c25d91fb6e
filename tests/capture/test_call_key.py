"""Sorting the arguments of a call into tensors and constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum, IntEnum, StrEnum
from typing import Any

import pytest
import torch
from torch import Tensor

from fxprec.capture.call_key import call_key, default_key
from fxprec.capture.capturing import CaptureDeclined

X, Y = torch.ones(2), torch.zeros(3)


class Mode(Enum):
    FAST = 1


class Text(str, Enum):  # noqa: UP042
    A = "a"


class Same(StrEnum):
    A = "a"


class One(IntEnum):
    ONE = 1


class Single(IntEnum):
    ONE = 1


class Sub(str):
    __slots__ = ()


def forward(x: Any, mask: Any = None, *, causal: Any = True, scale: Any = 1.0) -> Any: ...


def key(*args: Any, function: Callable[..., Any] = forward, **kwargs: Any) -> Any:
    (names, constants), tensors = call_key(inspect.signature(function), args, kwargs)
    return names, constants, tensors


def test_tensors_in_order_of_the_signature() -> None:
    names, constants, tensors = key(mask=Y, x=X)
    assert names == ("x", "mask") and tensors[0] is X and tensors[1] is Y
    assert dict(constants) == {"causal": True, "scale": 1.0}


def test_default_passed_and_left_out_are_one_call() -> None:
    assert key(X)[:2] == key(X, None, causal=True)[:2] == default_key(inspect.signature(forward))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"mask": Y}),
        ({"causal": True}, {"causal": False}),
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": 1}),
        ({"scale": (1, 2)}, {"scale": (1, 2.0)}),
        ({"scale": (1, (True,))}, {"scale": (1, (1,))}),
        ({"scale": "a"}, {"scale": "b"}),
        ({"scale": torch.float16}, {"scale": torch.bfloat16}),
        ({"scale": Mode.FAST}, {"scale": None}),
        ({"scale": Text.A}, {"scale": "a"}),
        ({"scale": Text.A}, {"scale": Same.A}),
        ({"scale": (Text.A,)}, {"scale": ("a",)}),
        ({"scale": One.ONE}, {"scale": Single.ONE}),
        ({"scale": One.ONE}, {"scale": 1}),
        ({"scale": torch.Size((2,))}, {"scale": (2,)}),
        ({"scale": complex(1, 0.0)}, {"scale": complex(1, -0.0)}),
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"scale": float("nan")}, {"scale": 1.0}),
    ],
)
def test_different_calls_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b, again = key(X, **one)[:2], key(X, **other)[:2], key(X, **one)[:2]
    assert a != b and b != a
    assert a == again and hash(a) == hash(again)
    assert {a: 1, b: 2}[again] == 1
    assert dict(b[1]).items() >= {k: v for k, v in other.items() if not isinstance(v, Tensor)}.items()


def test_a_nan_is_like_another() -> None:
    one, other = (key(X, scale=(float("nan"), 1.0))[:2] for _ in range(2))
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([X, Y], "argument 'x' is a list that holds tensors"),
        ((X,), "argument 'x' is a tuple that holds tensors"),
        ({"a": X}, "argument 'x' is a dict that holds tensors"),
        (object(), "argument 'x' is an object (object)"),
        (Sub("a"), "argument 'x' is an object (Sub)"),
        ([1, 2], "argument 'x' is an object (list)"),
    ],
)
def test_declined(value: Any, text: str) -> None:
    with pytest.raises(CaptureDeclined) as declined:
        key(value)
    assert declined.value.reason == text


def test_object_as_default_is_the_functions_own_business() -> None:
    def f(x: Any, options: Any = object()) -> Any: ...  # noqa: B008

    assert key(X, function=f)[:2] == (("x",), ()) == default_key(inspect.signature(f))


def test_variadic() -> None:
    def f(x: Any, *rest: Any, **options: Any) -> Any: ...

    assert key(X, function=f)[:2] == (("x",), ())
    for args, kwargs in (((X, Y), {}), ((X,), {"a": 1})):
        with pytest.raises(CaptureDeclined, match="fills"):
            key(*args, function=f, **kwargs)
    with pytest.raises(CaptureDeclined, match=r"takes \*rest"):
        default_key(inspect.signature(f))


def test_positional_only() -> None:
    def f(x: Any, /, y: Any = None) -> Any: ...

    assert key(X, Y, function=f)[0] == ("x", "y")
    with pytest.raises(TypeError):
        key(x=X, function=f)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((X, Y, X), {}), ((X,), {"z": 1}), ((X,), {"x": X})])
def test_a_call_that_does_not_fit_is_a_type_error(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        key(*args, **kwargs)
