"""The module tree: children in containers, replaced, hooked, overridden; kinds of outputs."""

from tests.fuzz.feature import Feature

__all__ = ["STRUCTURE"]

_HOOKS = (
    "hooks.append($m.l$n.register_forward_hook(lambda module, args, out: out * $v))",
    "hooks.append($m.l$n.register_forward_pre_hook(lambda module, args: (args[0] * $v,)))",
    "hooks.append($m.l$n.register_forward_hook(counting_hook()))",
    "if hooks: hooks.pop().remove()",
)

STRUCTURE = (
    Feature("hooked", "h = self.l$n(h)", init="self.l$n = nn.Linear(4, 4)", ops=_HOOKS),
    Feature(
        "replaced",
        "h = self.l$n(h)",
        init="self.l$n = nn.Linear(4, 4)",
        ops=(
            "$m.l$n = nn.Linear(4, 4)",
            "$m.l$n = nn.Tanh()",
            "$m.l$n = nn.Sequential($m.l$n, nn.ReLU())",
            "$m.l$n.weight = nn.Parameter(torch.eye(4) * $v)",
            "$m.l$n.bias = None",
        ),
    ),
    Feature(
        "instance_forward",
        "h = self.l$n(h)",
        init="self.l$n = nn.Linear(4, 4)",
        ops=("$m.l$n.forward = lambda h: h * $v", "vars($m.l$n).pop('forward', None)"),
    ),
    Feature(
        "class_forward",
        "h = self.b$n(h)",
        module="class Inner$n(nn.Module):\n    def forward(self, h):\n        return h * $v\n",
        init="self.b$n = Inner$n()",
        ops=("Inner$n.forward = lambda self, h: h * $v",),
    ),
    Feature(
        "class_of_child",
        "h = self.b$n(h)",
        module=(
            "class Inner$n(nn.Module):\n"
            "    def forward(self, h):\n"
            "        return h * $v\n"
            "class Other$n(Inner$n):\n"
            "    def forward(self, h):\n"
            "        return h * $v + 1\n"
        ),
        init="self.b$n = Inner$n()",
        ops=("$m.b$n.__class__ = Other$n",),
    ),
    Feature(
        "child_or_none",
        "h = self.l$n(h) if self.l$n is not None else h * 2",
        init="self.l$n = nn.Linear(4, 4)",
        ops=("$m.l$n = None", "$m.l$n = nn.Linear(4, 4)"),
    ),
    Feature(
        "module_list",
        "for layer in self.ls$n:\n    h = layer(h)",
        init="self.ls$n = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])",
        ops=(
            "$m.ls$n.append(nn.Linear(4, 4))",
            "$m.ls$n[0] = nn.Tanh()",
            "$m.ls$n = $m.ls$n[:1]",
            "$m.ls$n.insert(0, nn.ReLU())",
        ),
    ),
    Feature(
        "module_dict",
        "h = self.ls$n[self.key$n](h)",
        init="self.ls$n = nn.ModuleDict({'a': nn.Linear(4, 4), 'b': nn.Tanh()})\nself.key$n = 'a'",
        ops=("$m.key$n = 'b'", "$m.ls$n['a'] = nn.ReLU()"),
    ),
    Feature(
        "python_list_of_modules",
        "for layer in self.ls$n:\n    h = layer(h)",
        init="self.a$n = nn.Linear(4, 4)\nself.ls$n = [self.a$n, torch.tanh]",
        ops=("$m.ls$n.pop()", "$m.ls$n.append(torch.sigmoid)", "$m.ls$n[0] = torch.relu"),
    ),
    Feature(
        "empty_list",
        "for layer in self.ls$n:\n    h = layer(h)\nh = h * (1 + len(self.ls$n))",
        init="self.ls$n = nn.ModuleList()",
        ops=("$m.ls$n.append(nn.Linear(4, 4))", "$m.ls$n.append(nn.Tanh())", "$m.ls$n = nn.ModuleList()"),
    ),
    Feature(
        "walked_tensors",
        "for value in (*self.in$n.parameters(), *self.in$n.buffers()):\n    h = h * value + 1",
        init="self.in$n = nn.Module()",
        ops=(
            "$m.in$n.register_parameter('a', nn.Parameter(torch.full((4,), 1.0 * $v)))",
            "$m.in$n.register_parameter('b', nn.Parameter(torch.full((4,), 1.0 * $v)))",
            "$m.in$n.register_buffer('c', torch.full((4,), $v))",
            "del $m.in$n.a",
        ),
    ),
    Feature(
        "order_of_children",
        "for layer in self.ls$n.values():\n    h = layer(h)",
        init="self.ls$n = nn.ModuleDict({'a': nn.Linear(4, 4), 'b': nn.Tanh()})",
        ops=("$m.ls$n['a'] = $m.ls$n.pop('a')", "$m.ls$n['b'] = $m.ls$n.pop('b')"),
    ),
    Feature(
        "hidden_by_an_attribute",
        "h = self.l$n(h) * self.k$n",
        init="self.l$n = nn.Linear(4, 4)\nself.k$n = nn.Parameter(torch.full((4,), 1.0 * $v))",
        ops=(
            "vars($m)['k$n'] = torch.full((4,), $v)",
            "vars($m).pop('k$n', None)",
            "vars($m.l$n)['bias'] = torch.full((4,), $v)",
            "vars($m.l$n).pop('bias', None)",
        ),
    ),
    Feature(
        "attributes_replaced",
        "h = self.l$n(h)",
        init="self.l$n = nn.Linear(4, 4)",
        ops=(
            "vars($m.l$n).update(vars(nn.Linear(4, 4)))",
            "$m.l$n._parameters = dict($m.l$n._parameters)",
            "$m.l$n.weight = nn.Parameter(torch.eye(4) * $v)",
        ),
        weight=0.5,
    ),
    Feature(
        "index_of_layer",
        "h = self.ls$n[self.i$n](h)",
        init="self.ls$n = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])\nself.i$n = 0",
        ops=("$m.i$n = 1", "$m.i$n = 0"),
    ),
    Feature(
        "spectral",
        "h = self.l$n(h)",
        init="self.l$n = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
        ops=("nn.utils.parametrize.remove_parametrizations($m.l$n, 'weight')",),
        weight=0.3,
    ),
    Feature(
        "pruned",
        "h = self.l$n(h)",
        init="self.l$n = nn.Linear(4, 4)",
        ops=("nn.utils.prune.l1_unstructured($m.l$n, 'weight', amount=2)",),
        weight=0.3,
    ),
    Feature(
        "attention",
        "h = h + self.att$n(h[None], h[None], h[None], need_weights=False)[0][0]",
        init="self.att$n = nn.MultiheadAttention(4, 2, batch_first=True)",
        weight=0.5,
    ),
    Feature(
        "recurrent", "h = h + self.rnn$n(h[None])[0][0]", init="self.rnn$n = nn.GRU(4, 4, batch_first=True)", weight=0.3
    ),
    Feature("call_forward", "h = self.l$n.forward(h)", init="self.l$n = nn.Linear(4, 4)"),
    Feature("conv", "h = self.conv$n(h[:, None])[:, 0]", init="self.conv$n = nn.Conv1d(1, 1, 3, padding=1)"),
    Feature(
        "output_dict",
        "outs.append({'h': h, 'rows': h.shape[0], 'k': self.k$n})",
        init="self.k$n = $v",
        ops=("$m.k$n = $v",),
        root=True,
    ),
    Feature(
        "output_dataclass",
        "outs.append(Out$n(h, self.k$n))",
        module=(
            "@dataclasses.dataclass\n"
            "class Out$n:\n"
            "    a: object\n"
            "    k: float\n"
            "    def __post_init__(self):\n"
            "        self.a = self.a / 2\n"
        ),
        init="self.k$n = $v",
        ops=("$m.k$n = $v",),
        root=True,
    ),
    Feature(
        "output_named_tuple",
        "outs.append(Pair$n(h, self.k$n))",
        module="Pair$n = collections.namedtuple('Pair$n', 'a b')",
        init="self.k$n = $v",
        ops=("$m.k$n = $v",),
        root=True,
    ),
    Feature(
        "output_container", "outs.append(self.ks$n)", init="self.ks$n = [$v]", ops=("$m.ks$n.append($v)",), root=True
    ),
    Feature(
        "output_object",
        "outs.append(self.box$n)",
        init="self.box$n = types.SimpleNamespace(k=$v)",
        ops=("$m.box$n.k = $v",),
        root=True,
    ),
    Feature(
        "input_container",
        "if bag is not None:\n    outs.append(list(bag))\n    bag.append(h.shape[0])",
        root=True,
        weight=0.5,
    ),
    Feature(
        "super_call",
        "h = self.pre$n(h)",
        module=(
            "class Base$n(nn.Module):\n"
            "    def forward(self, h):\n"
            "        return h * $v\n"
            "class Derived$n(Base$n):\n"
            "    def forward(self, h):\n"
            "        return super().forward(h) + 1\n"
        ),
        init="self.pre$n = Derived$n()",
        ops=("Base$n.forward = lambda self, h: h * $v",),
    ),
    Feature(
        "register_later",
        "h = h * (2 if self.b$n is None else self.b$n)",
        init="self.register_buffer('b$n', None)",
        ops=("$m.b$n = torch.full((4,), $v)", "$m.b$n = None", "$m.register_buffer('b$n', torch.full((4,), $v))"),
    ),
)
