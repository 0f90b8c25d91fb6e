"""A call runs the forward once, whatever dynamo fails at: what a forward writes is written once, errors are its own."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16
ERRORS = {error.__name__: error for error in (RuntimeError, NotImplementedError)}


def _double(x: torch.Tensor, error: str) -> torch.Tensor:
    return x * 2


double = torch.library.custom_op("fxprec_tests::double_without_fake", _double, mutates_args=())


@double.register_fake
def _(x: torch.Tensor, error: str) -> torch.Tensor:
    raise ERRORS[error](f"no fake: {error}")


double.register_autograd(lambda ctx, gradient: (gradient * 2, None))


class Counting(nn.Module):
    """Counts its forwards in an attribute, a list, a buffer and a norm."""

    def __init__(self, error="RuntimeError"):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.error = 0, [], error

    def count(self, x):
        self.calls += 1
        self.sizes.append(x.shape[0])
        self.seen.add_(1)


class FailsFirst(Counting):
    """Before anything else ran."""

    def forward(self, x):
        self.count(x)
        return self.head(double(self.norm(self.fc(x)), self.error))


class FailsAfterBreak(Counting):
    def forward(self, x):
        self.count(x)
        x = self.norm(self.fc(x))
        torch._dynamo.graph_break()
        return self.head(double(x, self.error))


class FailsTwice(Counting):
    def forward(self, x):
        self.count(x)
        x = double(self.norm(self.fc(x)), self.error)
        torch._dynamo.graph_break()
        return double(self.head(x), self.error)


class Child(Counting):
    def forward(self, x):
        self.count(x)
        return double(self.fc(x), self.error)


class FailsInChild(Counting):
    """Dynamo leaves the loop to the interpreter, and comes to the children's frames one by one."""

    def __init__(self, error):
        super().__init__(error)
        self.blocks = nn.ModuleList([Child(error), Child(error)])

    def forward(self, x):
        self.count(x)
        for block in self.blocks:
            x = self.norm(block(x))
            torch._dynamo.graph_break()
        return x


class FailsLater(Counting):
    """Only a later call comes to it: the frame is captured once more."""

    def forward(self, x):
        self.count(x)
        x = self.norm(self.fc(x))
        if x.shape[0] > 4:
            x = double(x, self.error)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FailsFirst, FailsAfterBreak, FailsTwice, FailsInChild, FailsLater])
def test_what_dynamo_fails_at_runs_once(kind, tools, error="RuntimeError"):
    model = kind(error)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW).module
    for rows in (4, 6, 4):
        x = torch.randn(rows, 8)
        expected = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxprec.ServiceWarning)  # that nothing was captured
            output = converted(x)
        assert output.dtype is torch.float32
        assert torch.allclose(output, expected, atol=0.1)
        assert (converted.calls, converted.sizes) == (model.calls, model.sizes)
        for name, buffer in model.named_buffers():
            if not buffer.is_floating_point() or name.endswith("seen"):
                assert torch.equal(converted.get_buffer(name), buffer), name
    assert torch.float32 not in tools.matmul_dtypes(converted, x)
    assert conversion_of(converted).net


@pytest.mark.slow
def test_what_dynamo_cuts_a_graph_at_runs_once(tools):
    test_what_dynamo_fails_at_runs_once(FailsAfterBreak, tools, "NotImplementedError")


class Mistaken(Counting):
    """The model's own mistake, in its first piece or after a break."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken

    def forward(self, x):
        self.count(x)
        x = self.norm(self.fc(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_of_the_model_is_its_own_and_nothing_runs_twice(broken):
    model = Mistaken(broken)
    converted = fxprec.convert(copy.deepcopy(model), dtype=LOW).module
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        with pytest.raises(RuntimeError) as expected:
            model(x)
        with pytest.raises(RuntimeError) as caught:
            converted(x)
        assert str(caught.value) == str(expected.value)
        assert type(caught.value) is RuntimeError
        assert (converted.calls, converted.sizes) == (model.calls, model.sizes)
        assert converted.norm.num_batches_tracked == model.norm.num_batches_tracked
        assert converted.seen == model.seen
