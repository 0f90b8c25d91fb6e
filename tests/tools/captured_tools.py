"""What the tests of captured steps share: a training in the usual loop, and the same captured, side by side."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec import optim
from fxprec.whole_step import captured_step
from recorded_graph import RecordedGraphs

__all__ = [
    "OPTIMIZERS",
    "OURS",
    "THEIRS",
    "Net",
    "Training",
    "batches",
    "everything",
    "recorder",
    "same",
    "side_by_side",
]


#: name -> optimizer of parameters; those of torch that a graph can hold, and ours.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "our AdamW": lambda p: optim.AdamW(p, lr=0.03),
    "our Adam, clipping": lambda p: optim.Adam(p, lr=0.03, amsgrad=True, weight_decay=0.1, max_norm=0.3),
    "our SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "torch's AdamW": lambda p: torch.optim.AdamW(p, lr=0.03, fused=True),
    "torch's Adam": lambda p: torch.optim.Adam(p, lr=0.03, fused=True, amsgrad=True),
    "torch's SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "torch's plain SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}
OURS, THEIRS = "our AdamW", "torch's AdamW"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs are recorded operators, on a CPU that is taken for a device which one waits for."""
    graphs = RecordedGraphs()
    monkeypatch.setattr(captured_step, "recorder_of", lambda device: graphs)
    return graphs


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.mix, self.down = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix(self.drop(torch.tanh(self.norm(self.up(x))))))


class Training:
    """A model, optimizer, scaler and schedule, and the usual loop over them."""

    def __init__(
        self,
        optimizer: str = OURS,
        dtype: torch.dtype = torch.bfloat16,
        dropout: float = 0.0,
        device: str = "cpu",
        **scaler: Any,
    ) -> None:
        torch.manual_seed(0)
        given = fxprec.LossScaler(device, **scaler) if scaler else None
        with warnings.catch_warnings():  # of float16 on a CPU, which is slow
            warnings.simplefilter("ignore")
            self.model, self.scaler = fxprec.convert(Net(dropout).to(device), dtype=dtype, scaler=given)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def eager(self, x: Tensor, y: Tensor, parts: int = 1, max_norm: float | None = None) -> Tensor:
        """A step of the loop that everybody writes."""
        self.optimizer.zero_grad()
        losses = []
        with fxprec.accumulate(self.model):
            for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.cross_entropy(self.model(part), targets)
                losses.append(loss.detach())
                self.scaler.scale(loss / parts if parts > 1 else loss).backward()
        if max_norm is not None:
            self.scaler.clip_grad_norm_(self.optimizer, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean() if parts > 1 else losses[0]

    def captured(self, batch: tuple[Tensor, ...], **options: Any) -> fxprec.CapturedStep:
        return fxprec.capture_step(self.model, F.cross_entropy, self.optimizer, self.scaler, batch, **options)

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "schedule": self.schedule}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])

    def seen(self, x: Tensor) -> Tensor:
        """What an evaluation reads: the low weights of now."""
        self.model.eval()
        with torch.no_grad():
            output = self.model(x)
        self.model.train()
        return output


def batches(count: int, rows: int = 4, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    made = [
        (torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]
    return [(x.to(device), y.to(device)) for x, y in made]


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, however nested; NaN is NaN."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def side_by_side(
    eager: Training, captured: Training, data: list[tuple[Tensor, Tensor]], **options: Any
) -> fxprec.CapturedStep:
    """Train both, and compare all there is after every step."""
    names = {"accumulate": "parts", "max_norm": "max_norm"}
    loop = {names[name]: value for name, value in options.items()}
    step = captured.captured(data[0], **options)
    random_state = torch.get_rng_state()
    for x, y in data:
        torch.set_rng_state(random_state)
        expected = eager.eager(x, y, **loop)
        if not eager.scaler.step_was_skipped:
            eager.schedule.step()
        after = torch.get_rng_state()
        torch.set_rng_state(random_state)
        loss = step(x, y)
        if not captured.scaler.step_was_skipped:
            captured.schedule.step()
        random_state = torch.get_rng_state()
        assert torch.equal(random_state, after)
        assert same(loss, expected)
        assert same(captured.state(), eager.state())
        assert same(captured.seen(x), eager.seen(x))
    return step


def everything(training: Training) -> dict[str, Any]:
    gradients = [p.grad for p in training.model.parameters()]
    random_state = (torch.get_rng_state(), torch.tensor(random.getstate()[1]))
    state = training.state()
    moments = [v for s in training.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.any()]
    del state["optimizer"]["state"]
    training_flags = [m.training for m in training.model.modules()]
    known = [training.scaler.skipped_steps, training.scaler.step_was_skipped]
    return copy.deepcopy(
        {"state": state, "gradients": gradients, "random": random_state, "moments": moments, "flags": training_flags}
        | {"known": known, "called": training.optimizer.__dict__.get("_opt_called")}
    )
