"""Memory under two names: views, inputs, buffers, tied weights, in-place ops."""

from tests.fuzz.feature import Feature

__all__ = ["ALIASES"]

_LAYER = "self.l$n = nn.Linear(4, 4)"

ALIASES = (
    Feature("input_inplace", "x.mul_(2)\nh = h + self.l$n(x)", init=_LAYER, root=True),
    Feature("input_twice", "a = self.l$n(x)\nx.add_(1)\nh = h + self.l$n(x) - a", init=_LAYER, root=True),
    Feature(
        "other_inplace",
        "a = self.l$n(other)\nx.mul_(2)\nh = h + self.l$n(other) - a",
        init=_LAYER,
        root=True,
        weight=2,
    ),
    Feature(
        "other_written",
        "a = self.l$n(x)\nother.add_(1)\nh = h + self.l$n(x) - a + other",
        init=_LAYER,
        root=True,
    ),
    Feature("view_inplace", "h = h.clone()\nh[:, :2].mul_(2)\nh = self.l$n(h)", init=_LAYER),
    Feature("view_after", "h = h.clone()\nv = h[:, 1:3]\na = self.l$n(h)\nv.add_(1)\nh = self.l$n(h) + a", init=_LAYER),
    Feature(
        "transposed_inplace",
        "h = h.clone()\nt = h.t()\na = h @ self.w$n\nt.mul_(2)\nh = h @ self.w$n - a",
        init="self.w$n = nn.Parameter(torch.randn(4, 4) / 2)",
    ),
    Feature("setitem", "h = h.clone()\na = self.l$n(h)\nh[:, 0] = 1.0\nh = self.l$n(h) + a", init=_LAYER),
    Feature("iadd", "h = self.l$n(h)\na = h\nh += 1\nh = h * a", init=_LAYER),
    Feature("relu_inplace", "h = F.relu(self.l$n(h), inplace=True)", init=_LAYER),
    Feature(
        "buffer_view",
        # Detached: of a copy, autograd does not see that the write changes what the backward wants.
        "a = h.detach() @ self.b$n\nself.v$n.add_(1)\nh = h @ self.b$n - a",
        init="self.register_buffer('b$n', torch.eye(4))\nself.register_buffer('v$n', self.b$n[:2])",
    ),
    Feature(
        "buffer_twice",
        "a = h @ self.b$n\nself.c$n.mul_(2)\nh = h @ self.b$n - a",
        init="self.register_buffer('b$n', torch.eye(4))\nself.register_buffer('c$n', self.b$n)",
        ops=("$m.c$n = torch.eye(4)",),
    ),
    Feature(
        "buffer_and_attribute",
        "a = h.detach() @ self.b$n\nself.t$n.mul_(0.5)\nh = h @ self.b$n + a",
        init="self.register_buffer('b$n', torch.eye(4) * 4)\nself.t$n = self.b$n.view(16)",
    ),
    Feature(
        "buffer_as_input",
        "a = self.l$n(x)\nself.b$n.add_(1)\nh = h + self.l$n(x) - a",
        init=_LAYER + "\nself.register_buffer('b$n', torch.ones(2, 4))",
        ops=("run(m, $m.b$n, ids=i(2, $i))",),
        root=True,
    ),
    Feature(
        "tied",
        "h = self.a$n(self.b$n(h))",
        init="self.a$n = nn.Linear(4, 4)\nself.b$n = nn.Linear(4, 4)\nself.b$n.weight = self.a$n.weight",
        ops=("$m.b$n.weight = nn.Parameter($m.a$n.weight.detach().clone() * 2)", "$m.b$n.weight = $m.a$n.weight"),
    ),
    Feature(
        "shared_child",
        "h = self.b$n(self.a$n(h))",
        init="self.a$n = nn.Linear(4, 4)\nself.b$n = self.a$n",
        ops=("$m.b$n = nn.Linear(4, 4)",),
    ),
    Feature("transposed_weight", "h = h @ self.l$n.weight.t() @ self.l$n.weight", init=_LAYER),
    Feature("return_input", "outs.append(x)", root=True),
    Feature("return_view", "outs.append(x[:, :2])", root=True),
    Feature(
        "return_buffer",
        "outs.append(self.b$n)",
        init="self.register_buffer('b$n', torch.ones(4))",
        root=True,
        ops=("$m.b$n.add_(1)",),
    ),
    Feature("return_middle", "outs.append(h)", root=True),
    Feature("return_middle_written", "outs.append(h)\nh = self.l$n(h)\nouts[-1].mul_(2)", init=_LAYER, root=True),
    Feature(
        "return_parameter",
        "outs.append(self.p$n)\nh = h * self.p$n",
        init="self.p$n = nn.Parameter(torch.ones(4) * 2)",
        root=True,
    ),
    Feature("out_argument", "buf = torch.empty(h.shape)\ntorch.add(x, 1, out=buf)\nh = h + buf", root=True),
    Feature("detached", "d = h.detach()\nh = self.l$n(h) + d", init=_LAYER),
    Feature("expand", "h = h + h[:1].expand(h.shape[0], 4)"),
    Feature(
        "chunks", "a, b = h.clone().chunk(2, 1)\na.mul_(2)\nb += a\nh = self.l$n(torch.cat([a, b], 1))", init=_LAYER
    ),
)
