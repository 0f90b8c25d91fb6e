"""timm's NativeScaler with our scaler: one call for backward, clipping, step and update; and timm itself."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.integrations.timm import NativeScaler
from tests.integrations.test_beside_autocast import FRAMEWORKS, check


class Theirs:
    """What timm's does, on torch's scaler."""

    def __init__(self, scaler):
        self._scaler = scaler

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_as_timms():
    weights = []
    for make in (lambda: Theirs(torch.amp.GradScaler("cpu", 8.0)), lambda: NativeScaler(fxprec.LossScaler("cpu", 8.0))):
        model, optimizer = model_and_optimizer()
        scaler = make()
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().sum() * factor
            scaler(loss, optimizer, clip_grad=0.5, parameters=model.parameters())
        assert scaler._scaler.get_scale() == 4.0  # halved once
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_an_accumulation_steps_at_its_end_and_values_are_clipped():
    model, optimizer = model_and_optimizer()
    before = model.weight.detach().clone()
    scaler = NativeScaler(fxprec.LossScaler("cpu", 8.0))
    scaler(model(torch.ones(3, 4)).sum(), optimizer, need_update=False)
    assert torch.equal(model.weight, before)
    scaler(model(torch.ones(3, 4)).sum(), optimizer, clip_grad=0.25, clip_mode="value", parameters=model.parameters())
    torch.testing.assert_close(model.weight, before - 0.025)


def test_states_and_refusals():
    assert NativeScaler.state_dict_key == "amp_scaler"
    scaler = NativeScaler(fxprec.LossScaler("cpu", 8.0))
    other = torch.amp.GradScaler("cpu", 32.0)
    scaler.load_state_dict(other.state_dict())
    assert scaler.state_dict()["scale"] == 32.0
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=r"parameters=model\.parameters\(\)"):
        scaler(model(torch.ones(3, 4)).sum(), optimizer, clip_grad=1.0)
    assert model.weight.grad is None
    with pytest.raises(TypeError, match=r"give the LossScaler that fxprec\.convert returned"):
        NativeScaler(other)


@pytest.mark.slow
def test_timm_itself_where_it_lies_beside_the_environment() -> None:
    """``make install`` of CI puts it there, with a torchvision that may be of another build than torch."""
    folder = Path(sys.prefix) / "timm"
    if importlib.util.find_spec("timm") is not None or not folder.exists():
        pytest.skip("timm is here for the tests below, or nowhere")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "timms", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert re.search(r"\b6 passed", done.stdout) and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.fixture(scope="module")
def timm() -> Any:
    """timm itself. A torchvision of another build than torch lacks two ops that its import asks for by name."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not in this environment; see the test above")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        ops = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(ops)
    for part in ("optim", "utils"):
        importlib.import_module(f"timm.{part}")
    return importlib.import_module("timm")


#: A library's ops are gone with it.
_KEPT: list[Any] = []


def vision(timm: Any, name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        small = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", num_classes=5, **small)
    return timm.create_model("resnet10t", num_classes=5)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 32, 32, generator=draw), torch.randint(5, (4,), generator=draw)) for _ in range(count)]


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_with_timms_own_loop_losses_are_those_of_autocast(timm: Any, name: str) -> None:
    losses: list[list[float]] = []
    states = []
    for own in (False, True):
        model = vision(timm, name)
        optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
        ema = timm.utils.ModelEmaV3(model, decay=0.5)
        if own:
            model, scaler = fxprec.convert(model, dtype=torch.bfloat16)
            loss_scaler, around = NativeScaler(scaler), contextlib.nullcontext()
        else:
            loss_scaler, around = timm.utils.NativeScaler("cpu"), torch.autocast("cpu", torch.bfloat16)
        losses.append([])
        for x, target in batches(1) * 3:  # learnt by heart
            with around:
                loss = F.cross_entropy(model(x).float(), target)
            optimizer.zero_grad()
            loss_scaler(loss, optimizer, clip_grad=1.0, clip_mode="agc", parameters=model.parameters())
            ema.update(model)
            losses[-1].append(loss.item())
        assert all(each.dtype == torch.float32 for each in ema.module.parameters())
        states.append((model.state_dict(), ema.module.state_dict()))
        if own:
            assert fxprec.report(model).headline.products.keys() == {"bfloat16"}
    assert losses[1] == pytest.approx(losses[0], rel=0.03) and losses[1][-1] < losses[1][0]
    (theirs, ema_theirs), (ours, ema_ours) = states
    assert theirs.keys() == ours.keys() and ema_theirs.keys() == ema_ours.keys()
    vision(timm, name).load_state_dict(ours)
    fxprec.convert(vision(timm, name)).module.load_state_dict(theirs)


def test_timms_row_of_the_table(timm: Any, tmp_path: Path) -> None:
    check("timm", FRAMEWORKS["timm"].run, tmp_path)


def test_a_scale_goes_to_timms_scaler_and_back(timm: Any) -> None:
    own, theirs = NativeScaler(fxprec.LossScaler("cpu", 8.0)), timm.utils.NativeScaler("cpu")
    theirs.load_state_dict(own.state_dict())
    assert theirs._scaler.get_scale() == 8.0 and theirs.state_dict_key == own.state_dict_key
    own.load_state_dict(theirs.state_dict() | {"scale": 32.0})
    assert own._scaler.get_scale() == 32.0


def test_timms_features_are_lowered_where_they_are_named(timm: Any) -> None:
    plain = vision(timm, "vit").eval()
    (x, _), *_ = batches(1)
    right = plain.forward_features(x)
    model, _ = fxprec.convert(plain, dtype=torch.bfloat16, methods=("forward_features", "forward_head"))
    found = model.forward_features(x)
    assert (found - right).abs().max() < 0.05 * right.abs().max() and not torch.equal(found, right)
    assert model.forward_head(found).shape == (4, 5)
    assert fxprec.report(model).headline.methods == ("forward_features", "forward_head")
