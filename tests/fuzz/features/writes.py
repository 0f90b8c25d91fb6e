"""Writes of the forward: counters, lists, caches, buffers, attributes, things outside of the model."""

from tests.fuzz.feature import Feature

__all__ = ["WRITES"]

WRITES = (
    Feature("counter", "self.n$n += 1\nh = h * (1 + self.n$n % 3)", init="self.n$n = 0", ops=("$m.n$n = 0",)),
    Feature("counter_only", "self.n$n += 1", init="self.n$n = 0"),
    Feature("nested_counter", 'self.st$n["n"]["c"] += 1', init='self.st$n = {"n": {"c": 0}}'),
    Feature(
        "nested_list",
        'self.st$n["n"].append(h.shape[0])',
        init='self.st$n = {"n": []}',
        ops=('$m.st$n["n"].clear()',),
    ),
    Feature("list", "self.seen$n.append(h.shape[0])", init="self.seen$n = []", ops=("$m.seen$n.clear()",)),
    Feature("tensor_list", "self.seen$n.append(h.detach())", init="self.seen$n = []", ops=("$m.seen$n.clear()",)),
    Feature("last", "self.last$n = h.detach()", init="self.last$n = None", ops=("$m.last$n = None",)),
    Feature(
        "use_last",
        "h = h if self.last$n is None else h + self.last$n.sum()\nself.last$n = h.detach()",
        init="self.last$n = None",
        ops=("$m.last$n = None",),
    ),
    Feature(
        "shape_cache",
        (
            "if h.shape[0] not in self.cache$n:\n"
            "    self.cache$n[h.shape[0]] = torch.arange(h.shape[0]) + 1\n"
            "h = h * self.cache$n[h.shape[0]][:, None]"
        ),
        init="self.cache$n = {}",
        ops=("$m.cache$n.clear()", "$m.cache$n[2] = torch.tensor([3, 1])"),
    ),
    Feature(
        "global_cache",
        (
            "if h.shape[0] not in CACHE$n:\n"
            "    CACHE$n[h.shape[0]] = torch.arange(h.shape[0]) + 1\n"
            "h = h * CACHE$n[h.shape[0]][:, None]"
        ),
        module="CACHE$n = {}",
        ops=("CACHE$n.clear()",),
    ),
    Feature(
        "lru_cache",
        "h = h * table$n(h.shape[1])",
        module="S$n = $v\n@functools.lru_cache\ndef table$n(width):\n    return torch.arange(width) * S$n\n",
        ops=("S$n = $v; table$n.cache_clear()", "S$n = $v"),
    ),
    Feature(
        "lazy_attribute",
        "if self.mask$n is None:\n    self.mask$n = torch.arange(4) * 0.5\nh = h * self.mask$n",
        init="self.mask$n = None",
        ops=("$m.mask$n = None", "$m.mask$n = torch.ones(4)"),
    ),
    Feature("global_list_write", "LOG$n.append(h.shape[0])", module="LOG$n = []", ops=("LOG$n.clear()",)),
    Feature("global_counter", "COUNT$n['n'] += 1\nh = h * (1 + COUNT$n['n'] % 3)", module="COUNT$n = {'n': 0}"),
    Feature(
        "global_statement",
        "h = counted$n(h)",
        module="N$n = 0\ndef counted$n(h):\n    global N$n\n    N$n += 1\n    return h * (1 + N$n % 3)\n",
        ops=("N$n = 0",),
    ),
    Feature(
        "nonlocal_statement",
        "h = counted$n(h)",
        module=(
            "def make$n():\n"
            "    n = 0\n"
            "    def counted(h):\n"
            "        nonlocal n\n"
            "        n += 1\n"
            "        return h * (1 + n % 3)\n"
            "    return counted\n"
            "counted$n = make$n()\n"
        ),
    ),
    Feature("class_counter", "$c.N$n += 1\nh = h * (1 + $c.N$n % 3)", body="N$n = 0", ops=("$c.N$n = 0",)),
    Feature(
        "function_counter",
        "h = counted$n(h)",
        module="def counted$n(h):\n    counted$n.n += 1\n    return h * (1 + counted$n.n % 3)\ncounted$n.n = 0\n",
    ),
    Feature("itertools", "h = h * next(self.it$n)", init="self.it$n = itertools.cycle([0.5, 1.0, 2.0])"),
    Feature("global_count", "h = h * (1 + next(IT$n) % 3)", module="IT$n = itertools.count()"),
    Feature(
        "object_counter",
        "h = self.box$n.apply(h)",
        module=(
            "class Box$n:\n"
            "    def __init__(self):\n"
            "        self.n = 0\n"
            "    def apply(self, h):\n"
            "        self.n += 1\n"
            "        return h * (1 + self.n % 3)\n"
        ),
        init="self.box$n = Box$n()",
        ops=("$m.box$n.n = 0",),
    ),
    Feature(
        "defaultdict",
        "h = h * (2 + self.dd$n['k'])",
        init="self.dd$n = collections.defaultdict(int)",
        ops=("$m.dd$n['k'] = $v",),
    ),
    Feature("set_write", "self.seen$n.add(h.shape[0])", init="self.seen$n = set()"),
    Feature("deque_write", "self.q$n.append(h.shape[0])", init="self.q$n = collections.deque(maxlen=2)"),
    Feature("setattr", "setattr(self, 'rows$n', h.shape[0])", ops=("vars($m).pop('rows$n', None)",)),
    Feature("vars_write", "vars(self)['rows$n'] = h.shape[0]"),
    Feature(
        "delete",
        "if hasattr(self, 'once$n'):\n    del self.once$n\n    h = h * 2",
        init="self.once$n = True",
        ops=("$m.once$n = True",),
    ),
    Feature("child_write", "self.c$n.k = h.shape[0]", init="self.c$n = nn.Identity()"),
    Feature(
        "dataclass_write",
        "self.st$n.n += 1",
        module="@dataclasses.dataclass\nclass State$n:\n    n: int = 0\n",
        init="self.st$n = State$n()",
    ),
    Feature(
        "buffer_count",
        "self.n$n.add_(1)",
        init="self.register_buffer('n$n', torch.zeros((), dtype=torch.int64))",
        weight=2,
    ),
    Feature(
        "buffer_iadd", "self.n$n += 1\nh = h * (1 + self.n$n % 3)", init="self.register_buffer('n$n', torch.zeros(1))"
    ),
    Feature("buffer_rebind", "self.n$n = self.n$n + 1", init="self.register_buffer('n$n', torch.zeros(1))"),
    Feature(
        "buffer_mean",
        "with torch.no_grad():\n    self.mean$n.lerp_(h.detach().mean(0), 0.5)\nh = h - self.mean$n",
        init="self.register_buffer('mean$n', torch.zeros(4))",
    ),
    Feature(
        "buffer_copy",
        "self.last$n.copy_(h.detach().sum(0))\nh = h + self.last$n",
        init="self.register_buffer('last$n', torch.zeros(4))",
        ops=("$m.last$n.zero_()",),
    ),
    Feature(
        "buffer_row",
        "self.table$n[0] = h.detach().sum(0)\nh = h @ self.table$n",
        init="self.register_buffer('table$n', torch.eye(4))",
    ),
    Feature(
        "buffer_training",
        "if self.training:\n    self.n$n.add_(1)\nh = h * (1 + self.n$n)",
        init="self.register_buffer('n$n', torch.zeros(1))",
    ),
    Feature("tensor_attribute_write", "self.t$n.add_(1)\nh = h * (1 + self.t$n % 3)", init="self.t$n = torch.zeros(1)"),
    Feature("global_tensor_write", "G$n.add_(1)\nh = h * (1 + G$n % 3)", module="G$n = torch.zeros(1)"),
    Feature(
        "parameter_write",
        "with torch.no_grad():\n    self.w$n.mul_(0.5)\nh = h @ self.w$n",
        init="self.w$n = nn.Parameter(torch.eye(4) * 4)",
    ),
    Feature(
        "parameter_detached_write",
        "self.w$n.detach().mul_(0.5)\nh = h @ self.w$n",
        init="self.w$n = nn.Parameter(torch.eye(4) * 4)",
    ),
    Feature(
        "parameter_written_after",
        "h = h @ self.w$n\nself.w$n.detach().mul_(0.5)",
        init="self.w$n = nn.Parameter(torch.eye(4) * 4)",
    ),
    Feature(
        "python_float",
        "self.norm$n = float(x.abs().sum())\nh = h * (1 + self.norm$n)",
        init="self.norm$n = 0.0",
        root=True,
    ),
    Feature("ema_of_numbers", "self.ema$n = self.ema$n * 0.5 + h.shape[0]", init="self.ema$n = 0.0"),
    Feature(
        "try_finally",
        "self.busy$n = True\ntry:\n    h = h * 2\nfinally:\n    self.busy$n = False",
        init="self.busy$n = False",
    ),
    Feature("try_write", "self.depth$n += 1\nh = h * self.depth$n\nself.depth$n -= 1", init="self.depth$n = 0"),
    Feature(
        "env_write",
        "os.environ[ENV$n] = str(int(os.environ.get(ENV$n, 0)) + 1)",
        module="ENV$n = __name__ + '_$n'\n",
        fault="N13",
    ),
)
