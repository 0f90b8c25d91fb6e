"""A captured step and what happens between its calls: shapes, changes of the model, checkpoints, other forwards."""

from __future__ import annotations

import copy
import math
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import captured_tools as tools
import fxprec
from fxprec import optim

OURS, THEIRS, Net, Training = tools.OURS, tools.THEIRS, tools.Net, tools.Training
batches, everything, recorder, same = tools.batches, tools.everything, tools.recorder, tools.same


# -- shapes, modes, changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_one_graph_a_shape_and_a_mode(name: str, recorder: Any) -> None:
    eager, captured = Training(name), Training(name)
    step = captured.captured(batches(1)[0])
    for number, rows in enumerate((4, 3, 4, 3, 5, 4)):
        x, y = batches(6, rows)[number]
        assert same(step(x, y), eager.eager(x, y))
    assert recorder.recordings == 3 == len(step.graphs)
    for training in (eager, captured):
        training.model.norm.eval()
    for x, y in batches(2):
        assert same(step(x, y), eager.eager(x, y))
    for training in (eager, captured):
        training.model.norm.train()
    for x, y in batches(2):
        assert same(step(x, y), eager.eager(x, y))
    assert recorder.recordings == 4 and same(captured.state(), eager.state())


def test_keywords_of_any_order_take_one_graph(recorder: Any) -> None:
    class Loss(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), y)

    model, (x, y) = Loss(), batches(1)[0]
    step = fxprec.capture_step(model, None, optim.SGD(model.parameters(), lr=0.1), None, {"y": y, "x": x})
    assert step(x=x, y=y) > step(y=y, x=x) > step({"y": y, "x": x}) > step(UserDict(x=x, y=y))
    assert recorder.recordings == 1 and step.graphs == ("x=float32[4, 6], y=int64[4]",)


def test_a_graph_that_is_captured_in_an_accumulation_copies_the_weights_all_the_same(recorder: Any) -> None:
    eager, captured = Training(THEIRS), Training(THEIRS)
    with fxprec.accumulate(captured.model):
        step = captured.captured(batches(1)[0])
    for x, y in batches(3):
        assert same(step(x, y), eager.eager(x, y))


def test_shapes_without_end_are_refused(recorder: Any) -> None:
    training = Training()
    step = training.captured(batches(1)[0], max_graphs=2)
    step(*batches(1, rows=3)[0])
    before = everything(training)
    with pytest.raises(fxprec.CaptureError, match=r"float32\[5, 6\].*2 graphs already.*max_graphs"):
        step(*batches(1, rows=5)[0])
    assert same(everything(training), before)
    step(*batches(1)[0])


def _replace(training: Any) -> None:
    with torch.no_grad():
        new = nn.Parameter(training.model.down.weight * 2)
    training.optimizer.state.pop(training.model.down.weight, None)
    group = training.optimizer.param_groups[0]
    group["params"] = [new if p is training.model.down.weight else p for p in group["params"]]
    training.model.down.weight = new


def _other_memory(training: Any) -> None:
    training.model.down.weight.data = training.model.down.weight.data * 2


def _decay(training: Any) -> None:
    training.optimizer.param_groups[0]["weight_decay"] = 0.5


def _freeze(training: Any) -> None:
    training.model.up.weight.requires_grad_(False)


def _hook(training: Any) -> None:
    training.model.down.register_forward_hook(lambda module, args, output: output * 3)


def _gradient_hook(training: Any) -> None:
    training.model.down.weight.register_hook(lambda gradient: gradient * -3)


def _scale_gradient(weight: Any) -> None:
    weight.grad.mul_(-3)


def _late_gradient_hook(training: Any) -> None:
    training.model.down.weight.register_post_accumulate_grad_hook(_scale_gradient)


def _step_hook(training: Any) -> None:
    training.optimizer.register_step_pre_hook(lambda *_: _scale_gradient(training.model.down.weight))


def _group(training: Any) -> None:
    owned = training.optimizer.param_groups[0]["params"]
    owned[:] = [p for p in owned if p is not training.model.down.bias]
    training.optimizer.state.pop(training.model.down.bias, None)
    training.optimizer.add_param_group({"params": [training.model.down.bias], "lr": 1.0})


def _leave(training: Any) -> None:
    owned = training.optimizer.param_groups[0]["params"]
    owned[:] = [p for p in owned if p is not training.model.down.bias]


def _growth(training: Any) -> None:
    training.scaler.set_growth_factor(4.0)


def _load_optimizer(training: Any) -> None:
    state = training.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1.0
    training.optimizer.load_state_dict(state)


def _module(training: Any) -> None:
    training.model.drop = nn.Dropout(0.99)


def _remade_copy(training: Any) -> None:
    for wanted in (False, True):
        training.model.up.weight.requires_grad_(wanted)
        training.seen(batches(1)[0][0])


def _revert(training: Any) -> None:
    fxprec.revert(training.model)


@pytest.mark.parametrize("name", [OURS, THEIRS])
@pytest.mark.parametrize(
    "change",
    [
        _replace,
        _other_memory,
        _decay,
        _freeze,
        _hook,
        _gradient_hook,
        _late_gradient_hook,
        _step_hook,
        _group,
        _leave,
        _growth,
        _load_optimizer,
        _module,
        _remade_copy,
        _revert,
    ],
)
def test_a_change_of_what_a_graph_holds_is_captured_again(change: Any, name: str, recorder: Any) -> None:
    eager, captured = (Training(name, init_scale=4.0, growth_interval=2) for _ in range(2))
    data, step = batches(6), captured.captured(batches(1)[0])
    for number, (x, y) in enumerate(data):
        if number == 3:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                change(eager)
                change(captured)
        torch.manual_seed(number)
        expected = eager.eager(x, y) if change is not _revert else _plain(eager, x, y, number)
        torch.manual_seed(number)
        assert same(step(x, y), expected)
        assert same(captured.model.state_dict(), eager.model.state_dict())
        assert captured.scaler.get_scale() == eager.scaler.get_scale()
    assert recorder.recordings == 2 and len(step.graphs) == 1


def _plain(training: Any, x: Tensor, y: Tensor, number: int) -> Tensor:
    """The usual step of a model that was reverted."""
    if number < 3:
        return training.eager(x, y)
    training.optimizer.zero_grad()
    loss = F.cross_entropy(training.model(x), y)
    training.scaler.scale(loss).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return loss.detach()


def test_a_number_that_changes_at_every_step_is_an_error(recorder: Any) -> None:
    training = Training(THEIRS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=20)  # cycles betas too
    step = training.captured(batches(1)[0])
    with pytest.raises(fxprec.CaptureError, match=r"param_groups\[0\]\['betas'\].*cycle_momentum=False"):
        for batch in batches(8):
            step(*batch)
            schedule.step()
    assert recorder.recordings < 6


def test_a_rate_that_is_a_tensor_is_read_where_it_is(recorder: Any) -> None:
    ends = []
    for graphs in (True, False):
        training = Training(THEIRS)
        training.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25)
        step = training.captured(batches(1)[0]) if graphs else training.eager
        for x, y in batches(3):
            step(x, y)
            rate.mul_(0.5)
        assert training.optimizer.param_groups[0]["lr"] is rate
        training.optimizer.param_groups[0]["lr"] = torch.tensor(0.125)  # which a graph of the other does not read
        step(*batches(1)[0])
        ends.append(training.model.state_dict())
    assert same(*ends) and recorder.recordings == 2


# -- what Python is told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_checkpoints_go_to_the_usual_loop_and_back(name: str, recorder: Any) -> None:
    one, other = (Training(name, init_scale=4.0, growth_interval=3) for _ in range(2))
    step, data = one.captured(batches(1)[0]), batches(9)
    for batch in data[:3]:
        step(*batch)
        one.schedule.step()
    other.load(one.state())
    for batch in data[3:6]:
        assert same(step(*batch), other.eager(*batch))
        one.schedule.step()
        other.schedule.step()
    assert same(one.state(), other.state())
    for batch in data[6:]:
        other.eager(*batch)
    one.load(other.state())
    assert same(step(*data[0]), other.eager(*data[0]))
    assert same(one.state(), other.state())


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_weights_that_are_written_between_steps_are_read(name: str, recorder: Any) -> None:
    eager, captured = Training(name), Training(name)
    step = captured.captured(batches(1)[0])
    other = copy.deepcopy(Training(name).model.state_dict())
    for number, (x, y) in enumerate(batches(6)):
        for training in (eager, captured):
            if number == 2:
                training.model.load_state_dict(other)
            if number == 3:
                with torch.no_grad():
                    training.model.up.weight.mul_(-1.0)
            if number == 4:
                training.model.up.weight.data.mul_(-1.0)
                fxprec.refresh(training.model)
            if number == 5:  # a step of the usual loop in between
                training.eager(x, y)
        assert same(step(x, y), eager.eager(x, y))
        assert same(captured.seen(x), eager.seen(x))
    assert same(captured.state(), eager.state()) and recorder.recordings == 1


def test_a_weight_of_another_optimizer_is_copied_when_it_is_written(recorder: Any) -> None:
    losses = []
    for graphs in (True, False):
        training, ((x, y), after) = Training(THEIRS), batches(2)
        weight = training.model.down.weight
        other = optim.SGD([weight], lr=0.1)  # which writes the copy of its weight by itself
        F.cross_entropy(training.model(x), y).backward()
        other.step()
        others = [p for p in training.model.parameters() if p is not weight]
        training.optimizer = torch.optim.SGD(others, lr=0.1, fused=True)
        training.optimizer.zero_grad()
        weight.grad = None
        step = training.captured((x, y)) if graphs else training.eager
        step(x, y)
        weight.grad = None
        with torch.no_grad():
            weight.mul_(5)
        losses.append(step(*after))
    assert same(*losses)


def test_a_second_model_with_the_same_weights_sees_the_steps(recorder: Any) -> None:
    for name in (OURS, THEIRS):
        training = Training(name)
        step, x = training.captured(batches(1)[0]), batches(1)[0][0]
        training.model.eval()
        twin = Net()
        for (path, _), p in zip([*twin.named_parameters()], training.model.parameters(), strict=True):
            owner, _, leaf = path.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, p)
        fxprec.convert(twin.eval())
        training.model.train()
        with torch.no_grad():
            twin(x)
            step(*batches(1)[0])
            after = twin(x)
            fxprec.refresh(twin)
            assert torch.equal(twin(x), after)


def test_a_step_between_a_forward_and_its_backward_is_seen(recorder: Any) -> None:
    training = Training(OURS)
    step = training.captured(batches(1)[0])
    x, y = batches(1)[0]
    loss = F.cross_entropy(training.model(x), y)
    step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_gone_after_a_step(recorder: Any) -> None:
    training, (x, y) = Training(), batches(1)[0]
    step = training.captured((x, y))
    F.cross_entropy(training.model(x), y).backward()
    step(x, y)
    assert all(p.grad is None for p in training.model.parameters())


def test_schedulers_do_not_warn(recorder: Any) -> None:
    training = Training()
    step = training.captured(batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*batches(1)[0])
        training.schedule.step()
    untouched = Training()
    untouched.captured(batches(1)[0])
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        untouched.schedule.step()


def test_a_scale_that_collapses_is_an_error(recorder: Any) -> None:
    training = Training(OURS, init_scale=4.0, min_scale=1.0)
    x, y = batches(1)[0]
    step = training.captured((x, y))
    bad = x * math.inf
    step(bad, y)
    assert training.scaler.get_scale() == 2.0 and training.scaler.step_was_skipped
    with pytest.raises(fxprec.LossScaleFloorError, match="2 skipped steps"):
        step(bad, y)
    assert training.scaler.skipped_steps == 2
    step(x, y)
    assert not training.scaler.step_was_skipped and training.scaler.get_scale() == 1.0


def test_overflows_of_the_warm_up_do_not_count(recorder: Any) -> None:
    training = Training(OURS, init_scale=2.0, min_scale=1.0)
    x, y = batches(1)[0]
    step = training.captured((x * math.inf, y))
    assert training.scaler.get_scale() == 2.0 and training.scaler.skipped_steps == 0
    step(x, y)
    assert not training.scaler.step_was_skipped


def test_an_iteration_that_has_begun_is_refused() -> None:
    training, (x, y) = Training(init_scale=4.0), batches(1)[0]
    step = training.captured((x, y))
    training.scaler.scale(F.cross_entropy(training.model(x), y)).backward()
    for call in (lambda: step(x, y), lambda: training.captured((x, y))):
        with pytest.raises(RuntimeError, match="scaler has begun an iteration"):
            call()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    step(x, y)
    training.scaler.scale(F.cross_entropy(training.model(x), y))  # and no step: the other way out of the message
    with pytest.raises(RuntimeError, match=r"scaler.update\(scaler.get_scale\(\)\)"):
        step(x, y)
    training.scaler.update(training.scaler.get_scale())
    step(x, y)
