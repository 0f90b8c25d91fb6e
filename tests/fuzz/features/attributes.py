"""Reads of state that hangs on the module: numbers, strings, containers, objects, classes."""

from tests.fuzz.feature import Feature

__all__ = ["ATTRIBUTES"]

_TYPED = ("2", "2.0", "True", "1", "1.0", "0", "False", "0.0")
_ACTS = ('"tanh"', '"relu"', '"sigmoid"')

ATTRIBUTES = (
    Feature("number", "h = h * self.k$n", init="self.k$n = $v", ops=("$m.k$n = $v",), weight=2),
    Feature(
        "number_type",
        "outs.append(ids * self.k$n)",
        init="self.k$n = $v",
        ops=("$m.k$n = $v",),
        values=_TYPED,
        root=True,
        weight=2,
    ),
    Feature(
        "bool_type",
        "outs.append((ids > 1) + self.k$n)",
        init="self.k$n = $v",
        ops=("$m.k$n = $v",),
        values=_TYPED,
        root=True,
    ),
    Feature(
        "type_in_list",
        "outs.append(ids * self.ks$n[0])",
        init="self.ks$n = [$v]",
        ops=("$m.ks$n[0] = $v", "$m.ks$n = [$v]", "$m.ks$n = ($v,)"),
        values=_TYPED,
        root=True,
    ),
    Feature(
        "zero_sign",
        "h = torch.copysign(h, self.z$n)",
        init="self.z$n = $v",
        ops=("$m.z$n = $v",),
        values=("0.0", "-0.0"),
    ),
    Feature(
        "flag",
        "h = h * 2 if self.flag$n else self.l$n(h)",
        init="self.flag$n = $v; self.l$n = nn.Linear(4, 4)",
        ops=("$m.flag$n = $v",),
        values=("True", "False"),
    ),
    Feature(
        "identity_test",
        "h = h * 2 if self.flag$n is True else h * 0.5",
        init="self.flag$n = $v",
        ops=("$m.flag$n = $v",),
        values=("True", "1", "1.0"),
    ),
    Feature(
        "act_name", "h = getattr(torch, self.act$n)(h)", init="self.act$n = $v", ops=("$m.act$n = $v",), values=_ACTS
    ),
    Feature(
        "act_table",
        'h = {"tanh": torch.tanh, "relu": F.relu, "sigmoid": torch.sigmoid}[self.act$n](h)',
        init="self.act$n = $v",
        ops=("$m.act$n = $v",),
        values=_ACTS,
    ),
    Feature(
        "act_function",
        "h = self.act$n(h)",
        init="self.act$n = $v",
        ops=("$m.act$n = $v",),
        values=("torch.tanh", "F.relu", "torch.sigmoid", "F.gelu"),
    ),
    Feature(
        "lambda",
        "h = self.f$n(h)",
        init="self.f$n = lambda h: h * $v",
        ops=("$m.f$n = lambda h: h * $v",),
    ),
    Feature(
        "nested_dict",
        'h = h * self.cfg$n["a"]["k"][0]',
        init='self.cfg$n = {"a": {"k": [$v, 3]}, "b": ()}',
        ops=(
            '$m.cfg$n["a"]["k"][0] = $v',
            '$m.cfg$n["a"] = {"k": [$v]}',
            '$m.cfg$n = {"a": {"k": ($v, 1)}}',
            '$m.cfg$n["c"] = 1',
        ),
    ),
    Feature(
        "list_loop",
        "for k in self.ks$n:\n    h = h * k",
        init="self.ks$n = [$v, $v]",
        ops=("$m.ks$n.append($v)", "$m.ks$n.clear()", "$m.ks$n[:] = [$v]", "$m.ks$n.reverse()", "$m.ks$n = ($v,)"),
    ),
    Feature(
        "list_length", "h = h * len(self.ks$n)", init="self.ks$n = [1, 2]", ops=("$m.ks$n.append(0)", "$m.ks$n.pop()")
    ),
    Feature(
        "set",
        'h = h * 2 if "a" in self.names$n else h - 1',
        init='self.names$n = {"a", "b"}',
        ops=('$m.names$n.discard("a")', '$m.names$n.add("a")', '$m.names$n = frozenset("a")'),
    ),
    Feature(
        "deque",
        "h = h * self.queue$n[-1]",
        init="self.queue$n = collections.deque([$v, $v], maxlen=2)",
        ops=("$m.queue$n.append($v)", "$m.queue$n.rotate()"),
    ),
    Feature(
        "named_tuple",
        "h = h * self.pair$n.a",
        module="Pair$n = collections.namedtuple('Pair$n', 'a b')",
        init="self.pair$n = Pair$n($v, [$v])",
        ops=("$m.pair$n = Pair$n($v, [$v])",),
    ),
    Feature(
        "named_tuple_inside",
        "h = h * self.pair$n.b[0]",
        module="Pair$n = collections.namedtuple('Pair$n', 'a b')",
        init="self.pair$n = Pair$n($v, [$v])",
        ops=("$m.pair$n.b[0] = $v", "$m.pair$n = Pair$n($v, [$v])"),
    ),
    Feature(
        "class_attribute",
        "h = h * self.K$n",
        body="K$n = $v",
        ops=("$c.K$n = $v", "$m.K$n = $v"),
    ),
    Feature("class_of_self", "h = h * type(self).K$n", body="K$n = $v", ops=("$c.K$n = $v",)),
    Feature("class_by_name", "h = h * $c.K$n", body="K$n = $v", ops=("$c.K$n = $v",)),
    Feature(
        "class_list",
        "h = h * self.KS$n[0]",
        body="KS$n = [$v]",
        ops=("$c.KS$n[0] = $v", "$c.KS$n = [$v]", "$m.KS$n = [$v]"),
    ),
    Feature(
        "property",
        "h = h * self.prop$n",
        body="@property\ndef prop$n(self):\n    return self._k$n * 2",
        init="self._k$n = $v",
        ops=("$m._k$n = $v", "$c.prop$n = property(lambda self: $v)"),
    ),
    Feature(
        "descriptor",
        "h = h * self.d$n",
        module="class Descriptor$n:\n    k = $v\n    def __get__(self, owner, cls):\n        return self.k\n",
        body="d$n = Descriptor$n()",
        ops=("Descriptor$n.k = $v", 'vars($c)["d$n"].k = $v'),
    ),
    Feature(
        "method",
        "h = self.scaled$n(h)",
        body="def scaled$n(self, h):\n    return h * self.k$n",
        init="self.k$n = $v",
        ops=(
            "$m.k$n = $v",
            "$c.scaled$n = lambda self, h: h * $v",
            "$m.scaled$n = lambda h: h * $v",
        ),
    ),
    Feature(
        "static_method",
        "h = self.doubled$n(h)",
        body="@staticmethod\ndef doubled$n(h):\n    return h * $v",
        ops=("$c.doubled$n = staticmethod(lambda h: h * $v)",),
    ),
    Feature(
        "class_method",
        "h = self.scaled$n(h)",
        body="K$n = $v\n@classmethod\ndef scaled$n(cls, h):\n    return h * cls.K$n",
        ops=("$c.K$n = $v",),
    ),
    Feature(
        "dataclass",
        "h = h * self.cfg$n.k * self.cfg$n.ks[0]",
        module="@dataclasses.dataclass\nclass Config$n:\n    k: float\n    ks: list\n",
        init="self.cfg$n = Config$n($v, [$v])",
        ops=("$m.cfg$n.k = $v", "$m.cfg$n.ks[0] = $v", "$m.cfg$n = Config$n($v, [$v])"),
    ),
    Feature(
        "frozen_dataclass",
        'h = h * self.cfg$n.k * self.cfg$n.table["k"]',
        module="@dataclasses.dataclass(frozen=True)\nclass Config$n:\n    k: float\n    table: dict\n",
        init='self.cfg$n = Config$n($v, {"k": $v})',
        ops=(
            '$m.cfg$n.table["k"] = $v',
            "$m.cfg$n = dataclasses.replace($m.cfg$n, k=$v)",
            'object.__setattr__($m.cfg$n, "k", $v)',
        ),
    ),
    Feature(
        "enum",
        "h = h * 2 if self.mode$n is Mode$n.A else h * self.mode$n.value",
        module="class Mode$n(enum.Enum):\n    A = 1\n    B = 0.5\n    C = 3\n",
        init="self.mode$n = Mode$n.A",
        ops=("$m.mode$n = Mode$n.$v",),
        values=("A", "B", "C"),
    ),
    Feature(
        "namespace",
        "h = h * self.box$n.k",
        init="self.box$n = types.SimpleNamespace(k=$v)",
        ops=("$m.box$n.k = $v", "$m.box$n = types.SimpleNamespace(k=$v)"),
    ),
    Feature(
        "object",
        "h = self.box$n.apply(h)",
        module=(
            "class Box$n:\n"
            "    def __init__(self, k):\n"
            "        self.k = k\n"
            "    def apply(self, h):\n"
            "        return h * self.k\n"
        ),
        init="self.box$n = Box$n($v)",
        ops=("$m.box$n.k = $v", "$m.box$n = Box$n($v)", "Box$n.apply = lambda self, h: h * $v"),
    ),
    Feature(
        "slots",
        "h = h * self.box$n.k",
        module="class Box$n:\n    __slots__ = ('k',)\n",
        init="self.box$n = Box$n()\nself.box$n.k = $v",
        ops=("$m.box$n.k = $v",),
    ),
    Feature(
        "callable_object",
        "h = self.box$n(h)",
        module="class Box$n:\n    k = $v\n    def __call__(self, h):\n        return h * self.k\n",
        init="self.box$n = Box$n()",
        ops=("$m.box$n.k = $v", "Box$n.k = $v"),
    ),
    Feature(
        "bound_method",
        "h = self.pre$n(h)",
        module="class Box$n:\n    k = $v\n    def apply(self, h):\n        return h * self.k\nbox$n = Box$n()\n",
        init="self.pre$n = box$n.apply",
        ops=("box$n.k = $v", "Box$n.k = $v", "$m.pre$n = Box$n().apply"),
    ),
    Feature(
        "own_bound_method",
        "h = self.pre$n(h)",
        body="def scaled$n(self, h):\n    return h * self.k$n",
        init="self.k$n = $v\nself.pre$n = self.scaled$n",
        ops=("$m.k$n = $v",),
    ),
    Feature(
        "partial",
        "h = self.f$n(h)",
        module="def scale$n(table, h, *, k=1.0):\n    return h * table['k'] * k\n",
        init="self.table$n = {'k': $v}\nself.f$n = functools.partial(scale$n, self.table$n)",
        ops=(
            "$m.f$n.args[0]['k'] = $v",
            "$m.f$n = functools.partial(scale$n, {'k': $v}, k=$v)",
        ),
    ),
    Feature(
        "module_attribute",
        "h = h * self.lib$n.k",
        module="lib$n = types.ModuleType('lib$n')\nlib$n.k = $v\n",
        init="self.lib$n = lib$n",
        ops=("lib$n.k = $v",),
    ),
    Feature(
        "class_as_attribute",
        "h = h * self.kind$n.k",
        module="class Kind$n:\n    k = $v\nclass Other$n(Kind$n):\n    k = $v\n",
        init="self.kind$n = Kind$n",
        ops=("Kind$n.k = $v", "$m.kind$n = Other$n"),
    ),
    Feature("vars", "h = h * vars(self)['k$n']", init="self.k$n = $v", ops=("$m.k$n = $v",)),
    Feature("dict_of_self", "h = h * self.__dict__['k$n']", init="self.k$n = $v", ops=("$m.k$n = $v",)),
    Feature(
        "dict_get",
        "h = h * self.__dict__.get('k$n', 2)",
        init="",
        ops=("$m.k$n = $v", "vars($m).pop('k$n', None)"),
    ),
    Feature(
        "maybe_attribute",
        "h = h * (self.k$n if hasattr(self, 'k$n') else 2)",
        ops=("$m.k$n = $v", "vars($m).pop('k$n', None)"),
    ),
    Feature("getattr_default", "h = h * getattr(self, 'k$n', 2)", ops=("$m.k$n = $v", "vars($m).pop('k$n', None)")),
    Feature(
        "tensor_attribute",
        "h = h * self.t$n",
        init="self.t$n = torch.tensor([0.5, 1.0, 2.0, 4.0])",
        ops=("$m.t$n = torch.full((4,), $v)", "$m.t$n.mul_($v)", "$m.t$n = $m.t$n.double()"),
    ),
    Feature(
        "tensor_in_list",
        "h = h @ self.ts$n[0]",
        init="self.ts$n = [torch.eye(4) * 2]",
        ops=("$m.ts$n[0] = torch.eye(4) * $v", "$m.ts$n[0].mul_($v)"),
    ),
    Feature(
        "none",
        "h = h if self.scale$n is None else h * self.scale$n",
        init="self.scale$n = None",
        ops=("$m.scale$n = $v", "$m.scale$n = None"),
    ),
    Feature(
        "dtype",
        "h = h.to(self.dtype$n).float()",
        init="self.dtype$n = torch.float32",
        ops=("$m.dtype$n = torch.$v",),
        values=("float32", "float64"),
    ),
    Feature(
        "numpy_array",
        "h = h * float(self.a$n[0])",
        init="self.a$n = np.array([$v])",
        ops=("$m.a$n[0] = $v", "$m.a$n = np.array([$v])"),
        fault="N6",
    ),
    Feature(
        "child_attribute",
        "h = h * self.l$n.k",
        init="self.l$n = nn.Identity()\nself.l$n.k = $v",
        ops=("$m.l$n.k = $v",),
    ),
    Feature(
        "slice_attribute",
        "h = h + h[self.s$n].sum()",
        init="self.s$n = slice(0, 1)",
        ops=("$m.s$n = slice($v)",),
        values=("1", "2", "0, 2"),
    ),
    Feature(
        "eval_order",
        "h = h * next(iter(self.table$n.values()))",
        init="self.table$n = {'a': $v, 'b': $v}",
        ops=("$m.table$n['a'] = $m.table$n.pop('a')", "$m.table$n['b'] = $v"),
    ),
)
