"""Inputs and outputs in containers, by keyword, by default, in classes of one's own."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, net

CASES = case = Cases("containers")


class Pair(NamedTuple):
    hidden: Any
    logits: Any


@dataclasses.dataclass
class Halved:
    """Its ``__post_init__`` must run once."""

    a: Any
    made: int = 0

    def __post_init__(self):
        self.a = self.a / 2
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    names: tuple = ("a",)


class ModelOutput(OrderedDict):
    """As transformers has it: a dict with attributes, fields that are None are left out."""

    def __init__(self, **fields):
        super().__init__((name, value) for name, value in fields.items() if value is not None)
        self.__dict__.update(fields)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Nested:
    """As torchvision has it: tensors, and a mask beside them."""

    def __init__(self, tensors, mask):
        self.tensors, self.mask = tensors, mask


@case
def list_in_list_out(t: Run):
    t.backward(t(t.convert(net(lambda s, xs: [s.l(x) for x in xs])), [t.randn(4, 8), t.randn(2, 8)]))


@case
def length_of_a_list(t: Run):
    m = t.convert(net(lambda s, xs: sum(s.l(x).sum() for x in xs)))
    for n in (1, 3, 2, 1):
        t.backward(t(m, [t.randn(4, 8) for _ in range(n)]))


@case
def dict_in_dict_out(t: Run):
    m = t.convert(net(lambda s, batch: {name: s.l(x) for name, x in batch.items()}))
    t.backward(t(m, {"a": t.randn(4, 8), "b": t.randn(2, 8)}))
    t(m, {"b": t.randn(4, 8)})


@case
def keys_that_decide(t: Run):
    m = t.convert(net(lambda s, batch: s.l(batch["x"]) * (3 if "mask" in batch else 1)))
    x = t.randn(4, 8)
    t(m, {"x": x})
    t(m, {"x": x, "mask": None})
    t(m, {"x": x})


@case
def order_of_keys(t: Run):
    m = t.convert(net(lambda s, batch: s.l(next(iter(batch.values())))))
    x, y = t.randn(4, 8), t.randn(4, 8)
    t(m, {"x": x, "y": y})
    t(m, {"y": y, "x": x})


@case
def keys_of_other_kinds(t: Run):
    m = t.convert(net(lambda s, batch: {0: s.l(batch[0]), (1, "a"): batch[(1, "a")], None: 3}))
    t(m, {0: t.randn(4, 8), (1, "a"): 2.5})


@case
def nested_containers(t: Run):
    def forward(s, batch):
        return {"a": [s.l(batch["x"][0]["y"]), (batch["x"][1], {"n": 1})], "b": None}

    t.backward(t(t.convert(net(forward)), {"x": [{"y": t.randn(4, 8)}, t.randn(2)]}))


@case
def named_tuple(t: Run):
    m = t.convert(net(lambda s, pair: Pair(pair.hidden, s.l(pair.logits))))
    t.backward(t(m, Pair(t.randn(2, 8), t.randn(4, 8))))


@case
def collections_named_tuple(t: Run):
    Point = collections.namedtuple("Point", "a b")
    t(t.convert(net(lambda s, x: Point(s.l(x), b=x))), t.randn(4, 8))


@case
def dataclass_out(t: Run):
    out = t(t.convert(net(lambda s, x: Halved(s.l(x)))), t.randn(4, 8))
    t.see("made", (out.made, out.a))


@case
def dataclass_in(t: Run):
    m, x = t.convert(net(lambda s, c: s.l(c.a))), t.randn(4, 8)
    t.backward(t(m, Frozen(x)))
    t(m, Frozen(x[:2], ("b",)))


@case
def frozen_dataclass_out(t: Run):
    t.backward(t(t.convert(net(lambda s, x: Frozen(s.l(x), ("b", "c")))), t.randn(4, 8)).a)


@case
def dataclass_with_a_default_factory(t: Run):
    @dataclasses.dataclass
    class Out:
        a: Any
        seen: list = dataclasses.field(default_factory=list)

        def __post_init__(self):
            self.seen.append(self.a.shape)

    m = t.convert(net(lambda s, x: Out(s.l(x))))
    t.see("a", vars(t.quiet(m, t.randn(4, 8))))
    t.see("b", vars(t.quiet(m, t.randn(3, 8))))


@case
def model_output(t: Run):
    m = t.convert(net(lambda s, x: ModelOutput(logits=s.l(x), loss=None)))
    out = t(m, t.randn(4, 8))
    t.see("parts", (out[0], out.logits, out.loss, list(out), isinstance(out, ModelOutput)))
    t.backward(out.logits)


@case
def ordered_and_default_dicts(t: Run):
    def forward(s, x):
        d = defaultdict(list)
        d["a"].append(s.l(x))
        return OrderedDict(b=x, a=d["a"][0]), d

    t(t.convert(net(forward)), t.randn(4, 8))


@case
def deque_and_set(t: Run):
    m = t.convert(net(lambda s, x: (deque([s.l(x), x], maxlen=2), {1, 2})))
    t(m, t.randn(4, 8))


@case
def user_dict(t: Run):
    m = t.convert(net(lambda s, batch: s.l(batch["x"])))
    t.backward(t(m, UserDict(x=t.randn(4, 8))))
    t(m, UserDict(x=t.randn(3, 8)))


@case
def object_with_tensors(t: Run):
    m = t.convert(net(lambda s, n: s.l(n.tensors) * n.mask[:, None]))
    t.backward(t(m, Nested(t.randn(4, 8), torch.ones(4).bool())))
    t(m, Nested(t.randn(3, 8), torch.zeros(3).bool()))


@case
def object_out(t: Run):
    out = t(t.convert(net(lambda s, x: Nested(s.l(x), None))), t.randn(4, 8))
    t.backward(out.tensors)


@case
def object_that_is_written(t: Run):
    def forward(s, n):
        n.tensors = s.l(n.tensors)
        n.calls = getattr(n, "calls", 0) + 1
        return n

    m, n = t.convert(net(forward)), Nested(t.randn(4, 8), 2)
    t.see("same", t.quiet(m, n) is n)
    t(m, n)


@case
def list_that_is_written(t: Run):
    def forward(s, xs):
        xs.append(s.l(xs[-1]))
        return len(xs)

    m, xs = t.convert(net(forward)), [t.randn(4, 8)]
    t(m, xs)
    t(m, xs)


@case
def dict_that_is_written(t: Run):
    def forward(s, batch):
        batch["out"] = s.l(batch.pop("x"))
        return batch

    m, batch = t.convert(net(forward)), {"x": t.randn(4, 8)}
    t.see("same", t.quiet(m, batch) is batch)
    t.see("batch", batch)


@case
def empty_containers(t: Run):
    m = t.convert(net(lambda s, x, xs, d: (s.l(x), xs, d, [], {}, ())))
    t(m, t.randn(4, 8), [], {})
    t(m, t.randn(4, 8), [1], {"a": 1})


@case
def one_tensor_in_many_places(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    h = t(lambda d: {"a": m(d["a"]), "b": [m(d["b"])]}, {"a": x, "b": x})
    t.backward(h)


@case
def subclass_of_tensor(t: Run):
    class Image(Tensor):
        pass

    m = t.convert(net(lambda s, x: s.l(x)))
    t(m, t.randn(4, 8).as_subclass(Image))
    t(m, t.randn(4, 8))
