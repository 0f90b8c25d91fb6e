"""Children of TorchScript, and others that keep their parameters elsewhere: declined with a reason, served, lowered."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16
pytestmark = [
    pytest.mark.filterwarnings("ignore::fxprec.ServiceWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.fc, self.inner = nn.Linear(8, 8), inner

    def forward(self, x):
        return self.inner(self.fc(x))


class Counting(Around):
    """Looks at the child's parameters, and does not call it."""

    def forward(self, x):
        return self.fc(x) * len([*self.inner.parameters()])


class Elsewhere(Inner):
    """Its parameters are those of another module."""

    def __init__(self):
        super().__init__()
        self.__dict__["held"] = self.__dict__.pop("_parameters")

    def __getattr__(self, name):
        return self.__dict__["held"] if name == "_parameters" else super().__getattr__(name)


def _traced():
    return torch.jit.trace(Inner(), torch.randn(2, 8))


CHILDREN = [_traced, lambda: torch.jit.script(Inner()), lambda: torch.jit.freeze(_traced().eval()), Elsewhere]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("around", [Around, Counting])
@pytest.mark.parametrize("child", CHILDREN, ids=["traced", "scripted", "frozen", "elsewhere"])
def test_children_of_script(child, around, capture, tools):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = around(child())
    x = torch.randn(4, 8)
    expected = model(x)
    converted = fxprec.convert(model, dtype=LOW, capture=capture).module
    for _ in range(2):
        output = converted(x)
        assert output.dtype is torch.float32
        assert torch.allclose(output, expected, atol=0.05, rtol=0.05)
    assert LOW in tools.matmul_dtypes(converted, x)
    if capture == "auto":
        (why,) = conversion_of(converted).declined[:1]
        expected_reason = "keeps its parameters elsewhere" if child is Elsewhere else "is a TorchScript module"
        assert why.startswith(f"submodule 'inner' {expected_reason}")


def test_training_around_a_traced_child():
    model = Around(_traced())
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    fxprec.convert(model, dtype=LOW).module(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=0.1, atol=0.1)
