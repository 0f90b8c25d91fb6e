"""Numbers and flags that are equal and not the same, and kinds of constants."""

from __future__ import annotations

import decimal
import fractions
import math

import numpy
import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import again, net

CASES = case = Cases("numbers")


@case
def int_to_float(t: Run):
    """The type of a number decides about the dtype of a product with integers."""
    m, x, ids = t.convert(net(lambda s, x, ids: (s.l(x), ids * s.k), k=2)), t.randn(4, 8), torch.arange(4)
    for m.k in (2, 2.0, 2):
        t(m, x, ids)


@case
def bool_to_int(t: Run):
    m, x, on = t.convert(net(lambda s, x, on: (s.l(x), on * s.k), k=True)), t.randn(4, 8), torch.ones(4).bool()
    for m.k in (True, 1, 1.0, False, 0):
        t(m, x, on)


@case(no_twin="torch.tensor of a float is FP32")
def kind_in_a_new_tensor(t: Run):
    t.changes(
        net(lambda s, x: (s.l(x), torch.tensor([s.k])), k=True),
        lambda m: setattr(m, "k", 1),
        lambda m: setattr(m, "k", 1.0),
    )


@case
def int_to_float_outside(t: Run):
    box = {"k": 2}
    m, x, ids = t.convert(net(lambda s, x, ids: (s.l(x), ids * box["k"]))), t.randn(4, 8), torch.arange(4)
    for box["k"] in (2, 2.0, 2):
        t(m, x, ids)


@case
def negative_zero(t: Run):
    t.changes(
        net(lambda s, x: (s.l(x), torch.full((2,), 1.0) / torch.full((2,), s.k)), k=0.0),
        lambda m: setattr(m, "k", -0.0),
        lambda m: setattr(m, "k", 0.0),
    )


@case
def negative_zero_outside(t: Run):
    box = [0.0]
    t.changes(net(lambda s, x: (s.l(x), torch.ones(2) / torch.full((2,), box[0]))), lambda m: box.__setitem__(0, -0.0))


@case
def not_a_number(t: Run):
    t.changes(
        net(lambda s, x: (s.l(x), torch.full((2,), s.k)), k=math.nan),
        again,
        lambda m: setattr(m, "k", math.inf),
        lambda m: setattr(m, "k", float("nan")),
    )


@case
def signed_zero_as_an_argument(t: Run):
    m, x = t.convert(net(lambda s, x, k: (s.l(x), torch.ones(2) / torch.full((2,), k)))), t.randn(4, 8)
    for k in (0.0, -0.0, 0.0):
        t(m, x, k)


@case(no_twin="torch.tensor of a float is FP32")
def kind_of_an_argument(t: Run):
    m, x = t.convert(net(lambda s, x, k: (s.l(x), torch.tensor([k]), torch.arange(2) * k))), t.randn(4, 8)
    for k in (1, True, 1.0, 0, False, 2):
        t(m, x, k)


@case
def type_is_asked(t: Run):
    def forward(s, x):
        return s.l(x) * (3 if isinstance(s.k, bool) else 5 if isinstance(s.k, int) else 7)

    t.changes(net(forward, k=1), lambda m: setattr(m, "k", True), lambda m: setattr(m, "k", 1.0))


@case
def identity_is_asked(t: Run):
    none, other = [], []
    t.changes(net(lambda s, x: s.l(x) * (3 if s.k is none else 5), k=none), lambda m: setattr(m, "k", other))


@case
def string(t: Run):
    def forward(s, x):
        return {"relu": torch.relu, "tanh": torch.tanh}[s.kind](s.l(x))

    t.changes(net(forward, kind="relu"), lambda m: setattr(m, "kind", "tanh"))


@case
def subclass_of_a_string(t: Run):
    class Name(str):
        scale = 2.0

    def rescale(m):
        Name.scale = 0.1

    t.changes(net(lambda s, x: s.l(x) / s.name.scale, name=Name("a")), rescale)


@case
def subclass_of_a_float(t: Run):
    class Scale(float):
        def __mul__(self, other):
            return other * 3

        __rmul__ = __mul__

    t.changes(net(lambda s, x: s.l(x) + 1 * s.k * 1.0, k=2.0), lambda m: setattr(m, "k", Scale(2.0)))


@case
def set_of_layers(t: Run):
    t.changes(net(lambda s, x: s.l(x) * (3 if 1 in s.on else 1), on={1, 2}), lambda m: m.on.discard(1))


@case
def frozenset_replaced(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) * len(s.on), on=frozenset({1, 2})), lambda m: setattr(m, "on", frozenset({1, 2, 3}))
    )


@case
def tuple_of_kinds(t: Run):
    t.changes(net(lambda s, x: s.l(x) * s.k[0] * s.k[1][0], k=(2, (1.0,))), lambda m: setattr(m, "k", (2.0, (3,))))


@case
def deep_list(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) * s.k[0][0][0]["a"][0], k=[[[{"a": (2.0,)}]]]),
        lambda m: m.k[0][0][0].update(a=(5.0,)),
        lambda m: m.k[0][0].__setitem__(0, {"a": [1]}),
    )


@case
def order_of_a_dict(t: Run):
    def forward(s, x):
        for name in s.order:
            x = x + 1 if name == "add" else torch.relu(x)
        return s.l(x)

    t.changes(net(forward, order={"add": 1, "relu": 1}), lambda m: setattr(m, "order", {"relu": 1, "add": 1}))


@case
def range_replaced(t: Run):
    t.changes(net(lambda s, x: s.l(x) * sum(s.r), r=range(3)), lambda m: setattr(m, "r", range(1, 5, 2)))


@case
def slice_as_attribute(t: Run):
    t.changes(net(lambda s, x: s.l(x)[:, s.cut], cut=slice(0, 4)), lambda m: setattr(m, "cut", slice(2, 8, 2)))


@case(no_autocast="no product of bfloat16 and a complex number" if torch.__version__ >= "2.14" else "")
def complex_number(t: Run):
    t.changes(net(lambda s, x: (s.l(x) * s.k).real, k=2 + 1j), lambda m: setattr(m, "k", 2 - 3j))


@case
def numpy_scalar(t: Run):
    t.changes(net(lambda s, x: s.l(x) * s.k, k=numpy.float32(2)), lambda m: setattr(m, "k", numpy.float64(5)))


@case
def numpy_array_written(t: Run):
    def forward(s, x):
        return s.l(x) * float(s.k[0])

    t.changes(net(forward, k=numpy.array([2.0, 3.0])), lambda m: m.k.__setitem__(0, 5.0))


@case
def numpy_array_as_a_tensor(t: Run):
    def forward(s, x):
        return s.l(x) * torch.from_numpy(s.k).to(x.dtype)

    t.changes(net(forward, k=numpy.full(8, 2.0)), lambda m: m.k.fill(5.0))


@case
def fraction(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) * float(s.k), k=fractions.Fraction(1, 3)),
        lambda m: setattr(m, "k", fractions.Fraction(7, 3)),
    )


@case
def decimal_context(t: Run):
    def forward(s, x):
        return s.l(x) * float(decimal.Decimal(1) / decimal.Decimal(3))

    before = decimal.getcontext().prec
    t.defer(lambda: setattr(decimal.getcontext(), "prec", before))
    t.changes(net(forward), lambda m: setattr(decimal.getcontext(), "prec", 1))


@case
def huge_integer(t: Run):
    t.changes(net(lambda s, x: s.l(x) * (s.k % 7), k=10**30), lambda m: setattr(m, "k", 10**30 + 1))


@case
def dtype_as_attribute(t: Run):
    t.changes(
        net(lambda s, x: (s.l(x), torch.ones(2, dtype=s.dt)), dt=torch.int64), lambda m: setattr(m, "dt", torch.uint8)
    )


@case
def flag_of_training(t: Run):
    t.changes(net(lambda s, x: s.l(x) * (3 if s.training else 1)), lambda m: m.eval(), lambda m: m.train())


@case
def flag_of_one_child(t: Run):
    t.changes(net(lambda s, x: s.l(x) * (3 if s.l.training else 1)), lambda m: m.l.eval(), lambda m: m.train())


@case
def gradients_on_or_off(t: Run):
    m, x = t.convert(net(lambda s, x: s.l(x) * (3 if torch.is_grad_enabled() else 1))), t.randn(4, 8)
    t(m, x)
    with torch.no_grad():
        t(m, x)
    t(m, x)


@case
def requires_grad_of_the_input(t: Run):
    m, x = t.convert(net(lambda s, x: s.l(x) * (3 if x.requires_grad else 1))), t.randn(4, 8)
    t(m, x)
    t(m, x.clone().requires_grad_())
