"""Plain layers and ops: what is lowered, and what stands between."""

from tests.fuzz.feature import Feature

__all__ = ["LAYERS"]

LAYERS = (
    Feature("linear", "h = self.l$n(h)", init="self.l$n = nn.Linear(4, 4)", weight=4),
    Feature("linear_gelu", "h = F.gelu(self.l$n(h))", init="self.l$n = nn.Linear(4, 4)"),
    Feature(
        "mlp",
        "h = h + self.mlp$n(h)",
        init="self.mlp$n = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))",
        ops=("$m.mlp$n[1] = nn.Tanh()", "del $m.mlp$n[1]", "$m.mlp$n.append(nn.Tanh())"),
    ),
    Feature("matmul", "h = h @ self.w$n", init="self.w$n = nn.Parameter(torch.randn(4, 4) / 2)"),
    Feature("layer_norm", "h = self.norm$n(h)", init="self.norm$n = nn.LayerNorm(4, eps=0.1)"),
    Feature(
        "batch_norm",
        "h = self.bn$n(h)",
        init="self.bn$n = nn.BatchNorm1d(4, eps=0.1)",
        ops=("$m.bn$n.eval()", "$m.bn$n.momentum = 0.5", "$m.bn$n.reset_running_stats()", "$m.bn$n.eps = 0.5"),
    ),
    Feature(
        "dropout",
        "h = self.drop$n(h)",
        init="self.drop$n = nn.Dropout($v)",
        values=("0.0", "0.5"),
        ops=("$m.drop$n.p = $v", "$m.drop$n.train()", "$m.drop$n.eval()"),
    ),
    Feature(
        "functional_dropout",
        "h = F.dropout(h, self.p$n, self.training)",
        init="self.p$n = $v",
        values=("0.0", "0.5"),
        ops=("$m.p$n = $v",),
    ),
    Feature("tanh", "h = torch.tanh(h)"),
    Feature("residual", "h = h + self.l$n(h)", init="self.l$n = nn.Linear(4, 4)"),
    Feature("softmax", "h = h + h.softmax(-1)"),
    Feature("embedding", "h = h + self.e$n(ids)", init="self.e$n = nn.Embedding(4, 4)", root=True),
    Feature("mask", "h = h.masked_fill(x > 0.1, 0.5)", root=True),
    Feature("gather", "outs.append(h.gather(1, ids[:, None]))", root=True),
    Feature("cat", "h = torch.cat([h[:, 2:], h[:, :2] * 2], 1)"),
    Feature("shape", "h = h * (1.5 if h.shape[0] > 2 else 0.5)"),
    Feature("rows", "h = h + torch.arange(h.shape[0])[:, None]"),
    Feature("ones", "h = h + torch.ones(h.shape[0], 1)"),
    Feature("value_branch", "h = h * 2 if (x > 0).any() else h - 1", root=True),
    Feature("item", "h = h * x[0, 0].item()", root=True),
)
