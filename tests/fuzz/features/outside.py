"""Reads of state that stands outside of the module: globals, closures, defaults, environment, generators."""

from tests.fuzz.feature import Feature

__all__ = ["OUTSIDE"]

_CLOSURE = """\
def make$n():
    k = $v
    box = [$v]
    def get(h):
        return h * k * box[0]
    def put(value):
        nonlocal k
        k = value
    return get, put, box
get$n, put$n, box$n = make$n()
"""

OUTSIDE = (
    Feature("global_number", "h = h * S$n", module="S$n = $v", ops=("S$n = $v",), weight=2),
    Feature(
        "global_type",
        "outs.append(ids * S$n)",
        module="S$n = $v",
        ops=("S$n = $v",),
        values=("2", "2.0", "True", "1"),
        root=True,
    ),
    Feature(
        "global_dict",
        'h = h * D$n["k"]',
        module='D$n = {"k": $v}',
        ops=('D$n["k"] = $v', 'D$n = {"k": $v}'),
    ),
    Feature(
        "global_list",
        "h = h * sum(L$n)",
        module="L$n = [$v, $v]",
        ops=("L$n.append($v)", "L$n[0] = $v", "L$n = [$v]"),
    ),
    Feature("global_tuple", "h = h * T$n[0]", module="T$n = ($v, 1)", ops=("T$n = ($v, 2)",)),
    Feature(
        "global_namespace",
        "h = h * N$n.inner.k",
        module="N$n = types.SimpleNamespace(inner=types.SimpleNamespace(k=$v))",
        ops=("N$n.inner.k = $v", "N$n.inner = types.SimpleNamespace(k=$v)"),
    ),
    Feature("global_class", "h = h * Cfg$n.t", module="class Cfg$n:\n    t = $v\n", ops=("Cfg$n.t = $v",)),
    Feature(
        "global_class_nested",
        "h = h * Cfg$n.Inner.t",
        module="class Cfg$n:\n    class Inner:\n        t = $v\n",
        ops=("Cfg$n.Inner.t = $v",),
    ),
    Feature(
        "global_function",
        "h = fun$n(h)",
        module="def fun$n(h):\n    return h * $v\n",
        ops=("fun$n = lambda h: h * $v", "fun$n.__code__ = (lambda h: h * $v).__code__"),
    ),
    Feature(
        "global_in_function",
        "h = fun$n(h)",
        module=(
            "S$n = $v\n"
            "D$n = {'k': $v}\n"
            "def inner$n(h):\n"
            "    return h * S$n * D$n['k']\n"
            "def fun$n(h):\n"
            "    return inner$n(h)\n"
        ),
        ops=("S$n = $v", "D$n['k'] = $v", "inner$n = lambda h: h * $v"),
    ),
    Feature(
        "global_in_method",
        "h = self.meth$n(h)",
        module="S$n = $v\n",
        body="def meth$n(self, h):\n    return h * S$n",
        ops=("S$n = $v",),
    ),
    Feature(
        "function_attribute",
        "h = fun$n(h)",
        module="def fun$n(h):\n    return h * fun$n.k\nfun$n.k = $v\n",
        ops=("fun$n.k = $v",),
    ),
    Feature(
        "default_list",
        "h = fun$n(h)",
        module="def fun$n(h, k=[$v]):\n    return h * k[0]\n",
        ops=("fun$n.__defaults__[0][0] = $v", "fun$n.__defaults__ = ([$v],)"),
    ),
    Feature(
        "default_number",
        "h = fun$n(h)",
        module="def fun$n(h, k=$v, *, j=$v):\n    return h * k * j\n",
        ops=("fun$n.__defaults__ = ($v,)", "fun$n.__kwdefaults__ = {'j': $v}", "fun$n.__kwdefaults__['j'] = $v"),
    ),
    Feature(
        "method_default",
        "h = self.meth$n(h)",
        body="def meth$n(self, h, k=[$v]):\n    return h * k[0]",
        ops=("$c.meth$n.__defaults__[0][0] = $v", "$c.meth$n.__defaults__ = ([$v],)"),
    ),
    Feature(
        "closure",
        "h = get$n(h)",
        module=_CLOSURE,
        ops=("put$n($v)", "box$n[0] = $v"),
    ),
    Feature(
        "closure_attribute",
        "h = self.get$n(h)",
        module=_CLOSURE,
        init="self.get$n = get$n",
        ops=("put$n($v)", "box$n[0] = $v", "$m.get$n = make$n()[0]"),
    ),
    Feature(
        "closure_method",
        "h = self.meth$n(h)",
        module="def with_k$n(k):\n    def meth(self, h):\n        return h * k\n    return meth\n",
        body="meth$n = with_k$n($v)",
        ops=("$c.meth$n.__closure__[0].cell_contents = $v", "$c.meth$n = with_k$n($v)"),
    ),
    Feature(
        "decorated",
        "h = self.meth$n(h)",
        module=(
            "class Switch$n:\n"
            "    on = True\n"
            "def switched$n(f):\n"
            "    @functools.wraps(f)\n"
            "    def inner(self, h):\n"
            "        return f(self, h) if Switch$n.on else h * $v\n"
            "    return inner\n"
        ),
        body="@switched$n\ndef meth$n(self, h):\n    return h * 2",
        ops=("Switch$n.on = not Switch$n.on",),
    ),
    Feature(
        "environment",
        "h = h * float(os.environ[ENV$n])",
        module="ENV$n = __name__ + '_$n'\nos.environ[ENV$n] = '$v'\n",
        ops=("os.environ[ENV$n] = '$v'",),
    ),
    Feature(
        "getenv",
        "h = h * float(os.getenv(ENV$n, '2'))",
        module="ENV$n = __name__ + '_$n'\n",
        ops=("os.environ[ENV$n] = '$v'", "os.environ.pop(ENV$n, None)"),
    ),
    Feature(
        "own_random",
        "h = h * R$n.choice([0.5, 1.0, 2.0])",
        module="R$n = random.Random($i)",
        ops=("R$n.seed($i)",),
    ),
    Feature(
        "own_random_attribute",
        "h = h * 2 if self.r$n.random() < 0.5 else h - 1",
        init="self.r$n = random.Random($i)",
        ops=("$m.r$n.seed($i)",),
    ),
    Feature(
        "numpy_generator",
        "h = h * float(self.r$n.integers(1, 4))",
        init="self.r$n = np.random.default_rng($i)",
        fault="N6",
    ),
    Feature("python_random", "h = h * random.choice([0.5, 1.0, 2.0])"),
    Feature("numpy_random", "h = h * float(np.random.choice([0.5, 1.0, 2.0]))", fault="N6"),
    Feature("torch_random", "h = h + torch.rand(4)"),
    Feature("torch_random_like", "h = h + torch.rand_like(h)"),
    Feature(
        "default_dtype",
        "h = h + torch.full((4,), 0.5)",
        ops=("with default_dtype(torch.float64): run(m, x(2, $i), ids=i(2, $i))",),
    ),
    Feature(
        "patched_module",
        "h = lib$n.fun(h)",
        module="lib$n = types.ModuleType('lib$n')\nlib$n.fun = lambda h: h * $v\n",
        ops=("lib$n.fun = lambda h: h * $v",),
    ),
    Feature(
        "global_tensor",
        "h = h * G$n",
        module="G$n = torch.tensor([0.5, 1.0, 2.0, 4.0])",
        ops=("G$n.mul_($v)", "G$n = torch.full((4,), $v)", "G$n = G$n.clone()"),
    ),
    Feature(
        "global_tensor_list",
        "h = h @ G$n[0]",
        module="G$n = [torch.eye(4) * 2]",
        ops=("G$n[0].mul_($v)", "G$n[0] = torch.eye(4) * $v"),
    ),
    Feature(
        "global_object",
        "h = box$n.apply(h)",
        module=(
            "class Box$n:\n"
            "    def __init__(self):\n"
            "        self.k = $v\n"
            "    def apply(self, h):\n"
            "        return h * self.k\n"
            "box$n = Box$n()\n"
        ),
        ops=("box$n.k = $v", "box$n = Box$n()"),
    ),
    Feature(
        "global_module",
        "h = shared$n(h)",
        module="shared$n = nn.Linear(4, 4)\n",
        ops=("with torch.no_grad(): shared$n.weight.mul_($v)",),
    ),
    Feature(
        "context_variable",
        "h = h * var$n.get()",
        module="var$n = contextvars.ContextVar('k', default=$v)",
        ops=("var$n.set($v)",),
    ),
    Feature(
        "comprehension",
        "h = h * sum([k * S$n for k in self.ks$n])",
        module="S$n = $v",
        init="self.ks$n = [1, 2]",
        ops=("S$n = $v", "$m.ks$n.append(3)"),
    ),
    Feature(
        "global_keys",
        "h = h * len(D$n)",
        module='D$n = {"a": 1}',
        ops=("D$n[len(D$n)] = 1",),
    ),
    Feature(
        "global_flag_type",
        "h = h * 2 if isinstance(F$n, bool) else h - 1",
        module="F$n = $v",
        ops=("F$n = $v",),
        values=("True", "1"),
    ),
)
