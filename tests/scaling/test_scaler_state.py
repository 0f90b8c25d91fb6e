"""A scaler that is saved and loaded at any boundary continues bit for bit."""

import copy

import pytest
import torch
from torch import nn

from fxprec.scaling.loss_scaler import LossScaler

INF = float("inf")
#: Whether an iteration overflows: in a row, apart, and at the end of an interval.
PLAN = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0]


class Run:
    """Two micro-batches an iteration; cut into operations, between any two of which it can be saved and loaded."""

    def __init__(self, optimizer, options):
        self.make = lambda: LossScaler("cpu", 2.0**10, growth_interval=2, on_floor=None, **options)
        self.losses = options["num_losses"]
        self.scaler = self.make()
        self.parameters = [nn.Parameter(torch.linspace(0.5, 1.5 + i, 3)) for i in range(2)]
        self.new_optimizer = lambda: optimizer(self.parameters)
        self.optimizer = self.new_optimizer()

    def operations(self, style):
        for overflow in PLAN:
            yield self.optimizer.zero_grad
            for micro_batch in (0, 1):
                yield lambda overflow=overflow, i=micro_batch: self.backward(style, i, INF if overflow and i else 1.0)
            yield self.step

    def backward(self, style, micro_batch, factor):
        loss_id = 0 if style == "delayed" else micro_batch % self.losses
        loss = sum((p ** (2 + micro_batch)).sum() for p in self.parameters) * factor
        if style == "scale":
            self.scaler.scale(loss).backward()
            return
        delay = style == "delayed" and micro_batch == 0
        with self.scaler.scale_loss(loss, self.optimizer, loss_id, delay_unscale=delay) as scaled:
            scaled.backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def resume(self):
        """All that a checkpoint would hold, into new objects."""
        state = copy.deepcopy(self.scaler.state_dict())
        scales = self.optimizer.state_dict(), [p.detach().clone() for p in self.parameters]
        gradients = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.parameters[:] = [nn.Parameter(value) for value in scales[1]]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer = self.new_optimizer()
        self.optimizer.load_state_dict(copy.deepcopy(scales[0]))
        self.scaler = self.make()
        self.scaler.load_state_dict(state)
        assert self.scaler.state_dict() == state

    def result(self):
        moments = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        tensors = [p.detach() for p in self.parameters] + [m for m in moments if isinstance(m, torch.Tensor)]
        return self.scaler.state_dict(), [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("style", ["scale", "blocks", "delayed"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("hysteresis", [1, 3])
@pytest.mark.parametrize("consecutive_hysteresis", [True, False])
@pytest.mark.parametrize("min_scale", [None, 128.0])
@pytest.mark.parametrize("num_losses", [1, 2])
def test_saved_and_loaded_at_every_boundary(style, dynamic, hysteresis, consecutive_hysteresis, min_scale, num_losses):
    options = {
        "dynamic": dynamic, "hysteresis": hysteresis, "consecutive_hysteresis": consecutive_hysteresis,
        "min_scale": min_scale, "num_losses": num_losses,
    }  # fmt: skip

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    straight, scales = Run(sgd, options), set()
    for operation in straight.operations(style):
        operation()
        scales |= {straight.scaler.get_scale(i) for i in range(num_losses)}
    often = Run(sgd, options)
    for operation in often.operations(style):
        operation()
        often.resume()
    assert often.result() == straight.result()
    assert straight.scaler.skipped_steps == sum(PLAN)
    assert len(scales) > 1 or not dynamic


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_saved_once_in_the_middle_of_hysteresis_and_of_an_accumulation(fused):
    options = {"dynamic": True, "num_losses": 1, "hysteresis": 3, "recheck": True, "max_scale": 2.0**11}
    ends = []
    for cut in (None, *range(len(PLAN) * 4)):
        run = Run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused), options)
        for i, operation in enumerate(run.operations("scale")):
            operation()
            if i == cut:
                run.resume()
        ends.append(run.result())
    assert all(end == ends[0] for end in ends)


def test_what_is_saved():
    scaler = LossScaler("cpu", 4.0, num_losses=2, hysteresis=2)
    loss = {"scale": 4.0, "growth_tracker": 0, "hysteresis_left": 2}
    assert scaler.state_dict() == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
        "fxprec": {"losses": [loss, loss], "skipped_steps": 0, "scaled": False, "blocks": []},
    }


def test_blocks_are_taken_up_by_the_optimizers_that_fit():
    def made():
        parameters = [nn.Parameter(torch.ones(2 + i)) for i in range(2)]
        return parameters, [torch.optim.SGD([p], lr=1.0) for p in parameters], LossScaler("cpu", 4.0, num_losses=2)

    parameters, optimizers, scaler = made()
    for loss_id, delay, factor in ((0, False, INF), (1, True, 1.0)):
        with scaler.scale_loss(
            parameters[loss_id].sum() * factor, optimizers[loss_id], loss_id, delay_unscale=delay
        ) as x:
            x.backward()
    state = copy.deepcopy(scaler.state_dict())
    assert state["fxprec"]["blocks"] == [
        {"sizes": [1, 2], "delayed": None, "overflow": {0: True}},
        {"sizes": [1, 3], "delayed": 1, "overflow": {}},
    ]
    fresh, again, loaded = made()
    loaded.load_state_dict(state)
    for new, old in zip(fresh, parameters, strict=True):
        new.grad = old.grad.clone()
    loaded.step(again[1])  # in another order
    loaded.step(again[0])
    loaded.update()
    assert fresh[1].tolist() == [0, 0, 0] and fresh[0].tolist() == [1, 1]
    assert (loaded.get_scale(0), loaded.get_scale(1)) == (2.0, 4.0)


def test_a_new_iteration_without_the_gradients_forgets_the_blocks():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.25), LossScaler("cpu", 4.0)
    with scaler.scale_loss(parameter.sum() * INF, optimizer) as loss:
        loss.backward()
    loaded = LossScaler("cpu")
    loaded.load_state_dict(scaler.state_dict())
    optimizer.zero_grad()
    with loaded.scale_loss(parameter.sum(), optimizer) as loss:
        loss.backward()
    loaded.step(optimizer)
    assert parameter.tolist() == [0.75, 0.75]


def test_gradients_that_are_put_aside_cannot_be_saved():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), LossScaler("cpu", 4.0, num_losses=2)
    parameter.grad = torch.ones(2)
    with scaler.scale_loss(parameter.sum(), optimizer, 1, delay_unscale=True) as loss:
        loss.backward()
        with pytest.raises(RuntimeError, match="save after the scale_loss block that unscales"):
            scaler.state_dict()
    with pytest.raises(RuntimeError, match="put aside until the scaled ones are unscaled, and cannot be saved"):
        scaler.state_dict()
    scaler.unscale_(optimizer)
    assert len(scaler.state_dict()["fxprec"]["blocks"]) == 1


def test_bounds_of_the_loading_scaler_hold():
    state = LossScaler("cpu", 2.0**16, num_losses=2).state_dict()
    for bounds, expected in (({"max_scale": 2.0**20, "min_scale": 2.0**18}, 2.0**18), ({"max_scale": 8.0}, 8.0)):
        scaler = LossScaler("cpu", expected, num_losses=2, **bounds)
        scaler.load_state_dict(state)
        assert [scaler.get_scale(i) for i in (0, 1)] == [expected] * 2 and scaler._init_scale == expected


def test_torchs_keys_win_so_that_an_edited_file_is_obeyed():
    scaler = LossScaler("cpu", 4.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 5})
    assert scaler.get_scale() == 1024.0 and scaler._get_growth_tracker() == 5


def test_a_state_of_torchs_loads_into_every_loss_and_starts_hysteresis_anew():
    state = torch.amp.GradScaler("cpu", 8.0).state_dict()
    scaler = LossScaler("cpu", num_losses=3, hysteresis=4)
    scaler.load_state_dict(state)
    saved = scaler.state_dict()["fxprec"]["losses"]
    assert saved == [{"scale": 8.0, "growth_tracker": 0, "hysteresis_left": 4}] * 3


def test_more_hysteresis_left_than_there_is_is_cut():
    scaler = LossScaler("cpu", hysteresis=2)
    scaler.load_state_dict(LossScaler("cpu", hysteresis=9).state_dict())
    assert scaler.state_dict()["fxprec"]["losses"][0]["hysteresis_left"] == 2


def test_a_scaler_that_was_used_is_loaded_in_place_and_forgets_its_iteration():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), LossScaler("cpu", 4.0)
    state = scaler.state_dict()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    tensor = scaler._scale
    scaler.load_state_dict({**state, "scale": 8.0})
    assert scaler._scale is tensor and tensor.item() == 8.0
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)  # no second step of an old iteration
    scaler.update()


def test_the_count_of_skips_is_saved_and_what_was_skipped_is_not():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), LossScaler("cpu", 4.0)
    scaler.scale(parameter.sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    loaded = LossScaler("cpu")
    loaded.load_state_dict(scaler.state_dict())
    for again in (loaded, copy.deepcopy(scaler)):
        assert again.skipped_steps == 1 and not again.step_was_skipped and again.overflow_parameters() == []


class Marked(LossScaler):
    """A user's, with an attribute of its own."""


def test_attributes_of_a_subclass_stay_in_copies():
    scaler = Marked("cpu", 8.0, growth_factor=3.0, num_losses=2, hysteresis=2)
    scaler.mark = "mine"
    copied = copy.deepcopy(scaler)
    assert copied.mark == "mine" and vars(copied).keys() == vars(scaler).keys()
    assert copied.state_dict() == scaler.state_dict()
