"""What Python asks past ``__bool__``: of a proxy it is answered as in the original, or the trace declines."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec

CPU = torch.device("cpu")
DTYPES = {torch.float32, torch.float64}


class Special(Tensor):
    pass


class Asking(nn.Module):
    def __init__(self, asks: Callable[[Any, Tensor, Tensor], Any]):
        super().__init__()
        self.a, self.asks = nn.Linear(16, 16), asks
        self.tab, self.kinds, self.mode, self.given = {8: 2, 16: 5}, (list, Tensor), max, None
        self.layers = nn.ModuleList([nn.ReLU()])
        self.register_buffer("buf", torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.a(x) * (2 if self.asks(self, x, y) else 3)


HASH = {
    "dtype": lambda s, x, y: x.dtype in DTYPES,
    "device of a result": lambda s, x, y: s.a(x).device in {CPU},
    "dtype of a weight": lambda s, x, y: s.a.weight.dtype in {torch.float32},
    "device": lambda s, x, y: x.device in {CPU},
    "type of a device": lambda s, x, y: x.device.type in {"cpu"},
    "shape": lambda s, x, y: x.shape in {(8, 16)},
    "size()": lambda s, x, y: x.size() in {(8, 16)},
    "ndim": lambda s, x, y: x.ndim in {2},
    "dim()": lambda s, x, y: x.dim() not in {3},
    "a size": lambda s, x, y: x.shape[0] in {8},
    "a dict": lambda s, x, y: x.shape[0] in s.tab,
    "not in a dict": lambda s, x, y: x.shape[0] not in s.tab,
    "a result's size in a dict": lambda s, x, y: s.a(x).shape[0] in s.tab,
    "get": lambda s, x, y: {8: 2}.get(x.shape[0], 3) == 2,
    "subscript": lambda s, x, y: s.tab[x.shape[0]] == 2,
    "len": lambda s, x, y: len({x.device, s.buf.device}) == 1,
    "a tensor": lambda s, x, y: x in {y},
}
TEXT = {
    "str": lambda s, x, y: str(x.device) == "cpu",
    "repr": lambda s, x, y: repr(x.dtype) == "torch.float32",
    "f-string": lambda s, x, y: {"8-16": 2}.get(f"{x.shape[0]}-{x.shape[1]}", 3) == 2,
    "format": lambda s, x, y: format(x.shape[0]) == "8",
    "format method": lambda s, x, y: "{}".format(x.dtype) == "torch.float32",  # noqa: UP032
    "percent": lambda s, x, y: "%s" % x.dtype == "torch.float32",  # noqa: UP031
    "in a list": lambda s, x, y: str([x.dtype]) == "[torch.float32]",
    "of a result": lambda s, x, y: f"{s.a(x).device}" == "cpu",
}


def check(asks: Callable[..., Any], y: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[str, ...]:
    """Both answer alike; why the model was not captured statically."""
    original, x = Asking(asks), torch.randn(8, 16)
    model, _ = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16)
    other = y(x)
    torch.testing.assert_close(model(x, other), original(x, other), rtol=5e-2, atol=5e-2, check_dtype=False)
    return fxprec.report(model).headline.not_static


@pytest.mark.parametrize("asks", HASH.values(), ids=HASH)
def test_a_hash(asks: Callable[..., Any]) -> None:
    assert "hashes a traced value" in check(asks)[0]


@pytest.mark.parametrize("asks", TEXT.values(), ids=TEXT)
def test_text(asks: Callable[..., Any]) -> None:
    assert "text of a traced value" in check(asks)[0]


def test_text_that_is_returned() -> None:
    class Tells(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2, str(x.dtype)

    model = fxprec.convert(Tells(), dtype=torch.bfloat16).module
    assert model(torch.randn(2, 2))[1] == "torch.float32"


IDENTITY = {
    "two arguments": lambda s, x, y: x is y,
    "not": lambda s, x, y: x is not y,
    "contiguous": lambda s, x, y: x.contiguous() is x,
    "the other way round": lambda s, x, y: x is x.contiguous(),
    "to": lambda s, x, y: x.to("cpu") is x,
    "a bool": lambda s, x, y: x.is_cuda is False,
    "in a lambda": lambda s, x, y: (lambda: x is y)(),
}
TYPE = {
    "is": lambda s, x, y: type(x) is Tensor,
    "of a weight": lambda s, x, y: type(s.a.weight) is nn.Parameter,
    "__class__": lambda s, x, y: x.__class__ is Tensor,
    "name": lambda s, x, y: type(x).__name__ == "Tensor",
    "issubclass": lambda s, x, y: issubclass(type(x), Tensor),
    "in a tuple": lambda s, x, y: type(x) in (Tensor,),
    "Parameter": lambda s, x, y: isinstance(y, nn.Parameter),
    "subclass": lambda s, x, y: isinstance(y, Special),
    "union": lambda s, x, y: isinstance(y, Special | None),
    "FloatTensor": lambda s, x, y: isinstance(x, torch.FloatTensor),
    "one of several": lambda s, x, y: isinstance(y, (list, Special)),
    "a star": lambda s, x, y: isinstance(*(x, Tensor)),
    "map": lambda s, x, y: any(map(isinstance, [x], [Tensor])),
    "map to another": lambda s, x, y: any(map(isinstance, [y], [Special])),
}
#: Of those for which ``y`` is something else.
OTHER_Y = {"Parameter": nn.Parameter} | dict.fromkeys(
    ("subclass", "union", "one of several", "map to another"), lambda x: x.as_subclass(Special)
)


def case(s: Any, x: Tensor, y: Tensor) -> bool:
    match x:
        case torch.Tensor():
            return True
    return False


def parts(s: Any, x: Tensor, y: Tensor) -> bool:
    match x.shape:
        case (_, _, _):
            return False
        case (_, _):
            return True
    return False


def parts_of_an_attribute(s: Any, x: Tensor, y: Tensor) -> bool:
    match s.kinds:
        case (_, _):
            return True
    return False


@functools.singledispatch
def kind(x: Any) -> bool:
    return False


@kind.register
def _(x: Tensor) -> bool:
    return True


OTHERS = {
    "a pattern": parts,
    "operator.is_": lambda s, x, y: operator.is_(x, y),
    "singledispatch": lambda s, x, y: kind(x),
    "Callable": lambda s, x, y: isinstance(x, Callable),
    "Sequence": lambda s, x, y: isinstance(x.shape, Sequence),
}


STATIC = {
    "a pattern": parts_of_an_attribute,
    "Sequence": lambda s, x, y: isinstance(x, Sequence) or isinstance(x, Iterable),
    "None": lambda s, x, y: x is None or s.given is not None,
    "isinstance": lambda s, x, y: isinstance(x, Tensor),
    "isinstance of several": lambda s, x, y: isinstance(x, (list, Tensor)) and isinstance(x, Tensor | None),
    "isinstance of an attribute": lambda s, x, y: isinstance(x, s.kinds),
    "isinstance of a result": lambda s, x, y: isinstance(F.relu(x), torch.Tensor),
    "case": case,
    "enum": lambda s, x, y: s.mode is max,
    "module": lambda s, x, y: s.given is s.a or type(s.a) is nn.Linear,
    "child": lambda s, x, y: type(s.layers[0]) is nn.ReLU,
    "a weight": lambda s, x, y: isinstance(s.a.weight, nn.Parameter),
    "the method type": lambda s, x, y: x.type(y.dtype) is not None and s.a(x).type(y.dtype) is not None,
    "itself": lambda s, x, y: (lambda z: z is x)(x),
}


@pytest.mark.parametrize("asks", IDENTITY.values(), ids=IDENTITY)
def test_identity(asks: Callable[..., Any]) -> None:
    assert "by 'is'" in check(asks)[0]


def test_identity_with_a_weight() -> None:
    original, x = Asking(lambda s, x, y: y is s.a.weight), torch.randn(8, 16)
    model = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16).module
    for each, one in ((original, original(x, original.a.weight)), (model, model(x, model.a.weight))):
        torch.testing.assert_close(one, each.a(x) * 2, rtol=5e-2, atol=5e-2, check_dtype=False)


def warmed(asks: Callable[..., Any]) -> Callable[..., Any]:
    """Run it until Python has specialized its calls: a frame stands elsewhere then when ``isinstance`` asks."""
    x = torch.randn(8, 16)
    for _ in range(20):
        asks(Asking(asks), x, x)
    return asks


@pytest.mark.parametrize("prepared", [lambda asks: asks, warmed], ids=["cold", "warm"])
@pytest.mark.parametrize("name", TYPE)
def test_type(name: str, prepared: Callable[..., Any]) -> None:
    assert check(prepared(TYPE[name]), OTHER_Y.get(name, lambda x: x))


#: Each names ``isinstance`` in the very frame that calls C code.
IN_C = {
    "as_tensor": lambda h, y: None if isinstance(h, list) else torch.as_tensor(h),
    "as_tensor by name": lambda h, y: None if isinstance(h, list) else torch.as_tensor(data=h, dtype=torch.float32),
    "asarray": lambda h, y: None if isinstance(h, list) else torch.asarray(h),
    "arange": lambda h, y: None if isinstance(h, list) else torch.arange(h.sum().abs() * 0 + 3),
    "Tensor": lambda h, y: None if isinstance(h, list) else torch.Tensor(h),
    "_make_subclass": lambda h, y: (
        None if isinstance(h, list) else torch.Tensor._make_subclass(torch.Tensor, h.detach())
    ),
    "full": lambda h, y: None if isinstance(h, list) else torch.full((2,), y.sum()),
    "indexed": lambda h, y: None if isinstance(h, list) else torch.arange(3)[(y[0, :2] > 9).long()],
}


@pytest.mark.parametrize("call", IN_C.values(), ids=IN_C)
def test_c_code_that_a_forward_calls_is_not_told_of_a_tensor_in_memory(call: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            return h * 2, call(h, x)

    original, x = Model(), torch.randn(8, 16)
    try:
        expected = original(x)
    except TypeError:
        with pytest.raises(TypeError):
            fxprec.convert(original, dtype=torch.bfloat16).module(x)
    else:
        got = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16).module(x)
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2, check_dtype=False)


@pytest.mark.parametrize("asks", OTHERS.values(), ids=OTHERS)
def test_others(asks: Callable[..., Any]) -> None:
    assert check(asks)


@pytest.mark.parametrize("asks", STATIC.values(), ids=STATIC)
def test_what_stays_static(asks: Callable[..., Any]) -> None:
    assert not check(asks)


def with_mark(x: Tensor) -> Tensor:
    marked = x.clone()
    marked.mark = 1  # type: ignore[attr-defined]
    return marked


ATTRIBUTE = {
    "getattr": lambda s, x, y: getattr(y, "mark", 0) == 1,
    "hasattr": lambda s, x, y: hasattr(y, "mark"),
    "hasattr of another": lambda s, x, y: hasattr(x, "mark"),
    "hasattr of a result": lambda s, x, y: hasattr(F.relu(y), "mark"),
    "index of a device": lambda s, x, y: x.device.index is None,
    "callable": lambda s, x, y: callable(x),
}


@pytest.mark.parametrize("asks", ATTRIBUTE.values(), ids=ATTRIBUTE)
def test_attribute(asks: Callable[..., Any]) -> None:
    assert check(asks, with_mark)


def test_an_attribute_that_a_base_class_gets_later() -> None:
    class Base(nn.Module):
        pass

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(self, "factor", 1)

    model, x = fxprec.convert(Model(), dtype=torch.bfloat16).module, torch.randn(2, 2)
    assert torch.equal(model(x), x)
    Base.factor = 2  # type: ignore[attr-defined]
    assert torch.equal(model(x), x * 2)
