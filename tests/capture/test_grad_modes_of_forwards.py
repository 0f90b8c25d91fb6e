"""Forwards and children that set a grad mode: inference tensors, gradients and the mode are as in the original."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import fxprec

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)


class Inference(Plain):
    @torch.inference_mode()
    def forward(self, x):
        return self.fc(x)


class NotInference(Plain):
    @torch.inference_mode(False)
    def forward(self, x):
        return self.fc(x)


class NoGrad(Plain):
    @torch.no_grad()
    def forward(self, x):
        return self.fc(x)


class NoGradUncalled(Plain):
    @torch.no_grad
    def forward(self, x):
        return self.fc(x)


class InferenceBlock(Plain):
    def forward(self, x):
        with torch.inference_mode():
            return self.fc(x)


class Switches(Plain):
    def forward(self, x):
        torch.set_grad_enabled(False)
        y = self.fc(x)
        torch.set_grad_enabled(True)
        return y


class LeavesItOff(Plain):
    def forward(self, x):
        torch.set_grad_enabled(False)
        return self.fc(x)


class Methods(Plain):
    @torch.no_grad()
    def first(self, x):
        return self.fc(x)

    @torch.inference_mode()
    def second(self, x):
        return self.fc(x)

    def forward(self, x):
        return self.first(x), self.second(x), self.fc(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), inner()

    def forward(self, x):
        return self.fc(x), self.inner(x)


MODELS = {kind.__name__: kind for kind in (Inference, NotInference, NoGrad, NoGradUncalled, InferenceBlock)} | {
    "Switches": Switches,
    "LeavesItOff": LeavesItOff,
    "Methods": Methods,
    "Around(Inference)": lambda: Around(Inference),
    "Around(NoGrad)": lambda: Around(NoGrad),
}
MODES = {"": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_made_in_the_mode_of_the_original(name, capture, tools):
    torch._dynamo.reset()
    model = MODELS[name]()
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW, capture=capture).module
    x = torch.randn(4, 8)
    for mode in ("", "no_grad", "inference_mode", ""):
        seen = []
        for each in (model, converted):
            try:
                with MODES[mode]():
                    outputs = each(x)
                    after = torch.is_grad_enabled()
                after = after, torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(True)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            seen.append(([(y.is_inference(), y.requires_grad, y.is_leaf, y.dtype) for y in outputs], after))
        assert seen[1] == seen[0], mode
    assert torch.float32 not in tools.matmul_dtypes(converted, x)
    torch.set_grad_enabled(True)
