"""Modes: training, gradients, inference, dtypes and shapes of inputs, exceptions."""

from tests.fuzz.feature import Feature

__all__ = ["MODES"]

MODES = (
    Feature(
        "training_branch",
        "h = h * 2 if self.training else h - 1",
        ops=("$m.train()", "$m.eval()", "$m.training = $v"),
        values=("True", "False"),
    ),
    Feature(
        "training_layer",
        "h = self.l$n(h) if self.training else h * 2",
        init="self.l$n = nn.Linear(4, 4)",
        ops=("$m.train()", "$m.eval()"),
    ),
    Feature("grad_enabled", "h = h * 2 if torch.is_grad_enabled() else h - 1"),
    Feature(
        "no_grad_region",
        "with torch.no_grad():\n    a = self.l$n(h)\nh = self.l$n(h) + a",
        init="self.l$n = nn.Linear(4, 4)",
    ),
    Feature(
        "set_grad_region",
        "with torch.set_grad_enabled(self.on$n):\n    a = self.l$n(h)\nh = h + a",
        init="self.l$n = nn.Linear(4, 4)\nself.on$n = $v",
        values=("True", "False"),
        ops=("$m.on$n = $v",),
    ),
    Feature(
        "no_grad_method", "h = h + self.meth$n(h)", body="@torch.no_grad()\ndef meth$n(self, h):\n    return h * 2"
    ),
    Feature(
        "inference_method",
        "outs.append(self.meth$n(x))",
        body="@torch.inference_mode()\ndef meth$n(self, h):\n    return h * 2",
        root=True,
    ),
    Feature(
        "requires_grad_of_weight",
        "h = h * 2 if self.w$n.requires_grad else h - 1\nh = h @ self.w$n",
        init="self.w$n = nn.Parameter(torch.eye(4))",
        ops=("$m.w$n.requires_grad_($v)",),
        values=("True", "False"),
    ),
    Feature("requires_grad_of_input", "h = h * 2 if x.requires_grad else h - 1", root=True),
    Feature(
        "frozen_layer",
        "h = self.l$n(h)",
        init="self.l$n = nn.Linear(4, 4).requires_grad_($v)",
        ops=("$m.l$n.requires_grad_($v)",),
        values=("True", "False"),
    ),
    Feature("detach", "h = h + h.detach()"),
    Feature("input_dtype", "h = h * 2 if x.dtype == torch.float32 else h - 1", root=True),
    Feature("ids_dtype", "outs.append(ids + 1)", root=True),
    Feature("optional_input", "h = h if other is None else h + other.sum(0)", root=True),
    Feature("optional_ids", "h = h if ids is None else h + ids[:, None]", root=True, weight=0.5),
    Feature("number_argument", "h = h * factor", root=True),
    Feature("option_argument", "h = h * 2 if option == 'double' else h", root=True),
    Feature(
        "exception",
        "if self.fail$n:\n    raise Stop('no')",
        init="self.fail$n = False",
        ops=("$m.fail$n = True", "$m.fail$n = False"),
    ),
    Feature(
        "exception_after_write",
        "self.n$n.add_(1)\nif self.fail$n:\n    raise Stop('no')",
        init="self.fail$n = False\nself.register_buffer('n$n', torch.zeros(1))",
        ops=("$m.fail$n = True", "$m.fail$n = False"),
    ),
    Feature("exception_by_shape", "if h.shape[0] == 3:\n    raise Stop(f'{h.shape[0]} rows')", weight=0.3),
    Feature(
        "caught",
        "try:\n    h = h * self.table$n['k']\nexcept KeyError:\n    h = h - 1",
        init="self.table$n = {}",
        ops=("$m.table$n['k'] = $v", "$m.table$n.clear()"),
    ),
    Feature(
        "weight_dtype",
        "h = h.to(self.w$n.dtype) @ self.w$n",
        init="self.w$n = nn.Parameter(torch.eye(4))",
        ops=("$m.w$n.data = $m.w$n.data.double()",),
        weight=0.3,
    ),
    Feature(
        "checkpoint",
        "h = torch.utils.checkpoint.checkpoint(self.l$n, h, use_reentrant=False)",
        init="self.l$n = nn.Linear(4, 4)",
        weight=0.3,
    ),
    Feature("parameters", "h = h * sum(1 for p in self.parameters() if p.requires_grad)", weight=0.5),
    Feature(
        "grad_is_none",
        "h = h * 2 if self.w$n.grad is None else h @ self.w$n",
        init="self.w$n = nn.Parameter(torch.eye(4))",
    ),
)
