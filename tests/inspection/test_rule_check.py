"""assert_rule_holds: rows of custom ops that hold, and one kernel for each way in which a row can be wrong."""

from __future__ import annotations

import pytest
import torch

from fxprec.passes.policy.policy import Policy
from fxprec.testing import assert_rule_holds

X, W = torch.randn(8, 256).requires_grad_(), torch.randn(256).requires_grad_()


def define(name, kernel, fake=None, backward=None):
    """A custom op of two inputs, with autograd where there is a backward."""
    op = torch.library.custom_op(f"fxprec_rules::{name}", mutates_args=())(kernel)
    op.register_fake(fake or (lambda x, w: torch.empty_like(x)))
    if backward is not None:
        op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return f"fxprec_rules::{name}"


def _gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double() * w.double().sigmoid()).to(x.dtype) if x.dtype is torch.float64 else _wide_gate(x, w)


def _wide_gate(x, w):
    return (x.float() * w.float().sigmoid()).to(x.dtype)


def _of_gate(ctx, gradient):
    x, w = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in ctx.saved_tensors)
    s = w.sigmoid()
    of_w = (gradient.to(x.dtype) * x * s * (1 - s)).sum(0)
    return (gradient.to(x.dtype) * s).to(gradient.dtype), of_w.to(ctx.saved_tensors[1].dtype)


GATE = define("gate", _gate, backward=_of_gate)


def _low_sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[:, 0])
    for column in (x * w).abs().unbind(1):
        total = total + column  # in the dtype of the input
    return total


LOW_SUMS = define("low_sums", _low_sums, fake=lambda x, w: torch.empty_like(x[:, 0]))


def policy(op, rule):
    return Policy().with_rule(op, rule, "a test")


@pytest.mark.parametrize("rule", ["low", "full", "follow", "promote", "keep"])
def test_a_kernel_that_computes_wide_inside_bears_every_rule(rule):
    assert_rule_holds(policy(GATE, rule), GATE, X, W)
    assert_rule_holds(policy(GATE, rule), GATE, X[:1], W, low=torch.float16)


def test_sums_in_low_are_found_and_in_fp32_they_hold():
    args = X.detach(), W.detach()
    with pytest.raises(AssertionError, match=r"low: a test\): in bfloat16 result 0 is off .*computes too low"):
        assert_rule_holds(policy(LOW_SUMS, "low"), LOW_SUMS, *args)
    assert_rule_holds(policy(LOW_SUMS, "full"), LOW_SUMS, *args)


def gate_of_others(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _gate(x, w)


def test_gradients_that_are_summed_in_low_are_found():
    def sums_low(ctx, gradient):
        of_x, _ = _of_gate(ctx, gradient)
        x, w = ctx.saved_tensors
        total = torch.zeros_like(w)
        for row in (gradient * x).abs() * (w.sigmoid() * (1 - w.sigmoid())):
            total = total + row
        return of_x, total

    op = define("low_gradients", gate_of_others, backward=sums_low)
    x = torch.rand(256, 8).requires_grad_()
    w = torch.randn(8).requires_grad_()
    with pytest.raises(AssertionError, match="in bfloat16 gradient 1 is off from float64"):
        assert_rule_holds(policy(op, "low"), op, x, w)
    assert_rule_holds(policy(op, "full"), op, x, w)


def test_what_the_kernel_does_not_take_is_found():
    def refuses(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise TypeError("float32 only")
        return x * w

    op = define("refuses", refuses)
    args = X.detach(), W.detach()
    with pytest.raises(AssertionError, match="does not take bfloat16: float32 only"):
        assert_rule_holds(policy(op, "low"), op, *args)
    assert_rule_holds(policy(op, "full"), op, *args)


def test_a_fake_that_says_another_dtype_is_found():
    def widens(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mul(x.to(torch.promote_types(x.dtype, torch.float32)), w)

    op = define("widens", widens)
    with pytest.raises(AssertionError, match=r"puts out \(float32\), and its fake implementation says \(bfloat16\)"):
        assert_rule_holds(policy(op, "low"), op, X.detach(), W.detach())


def test_an_op_without_autograd_is_found_unless_it_is_never_differentiated():
    op = define("no_autograd", gate_of_others)
    with pytest.raises(AssertionError, match="does not take bfloat16"):
        assert_rule_holds(policy(op, "low"), op, X, W)
    assert_rule_holds(policy(op, "low"), op, X, W, gradients=False)


def test_a_kernel_without_float64_wants_a_reference():
    def single(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise TypeError("no float64")
        return _wide_gate(x, w)

    op = define("single", single)
    args = X.detach(), W.detach()
    with pytest.raises(ValueError, match=r"does not take float64 .*give a reference="):
        assert_rule_holds(policy(op, "low"), op, *args)
    assert_rule_holds(policy(op, "low"), op, *args, reference=lambda x, w: x * w.sigmoid())
    with pytest.raises(AssertionError, match="off from float64"):
        assert_rule_holds(policy(op, "low"), op, *args, reference=lambda x, w: x * w)


def test_what_nobody_says_anything_of_is_an_error():
    with pytest.raises(ValueError, match="torch has no op 'fxprec_rules::nowhere'"):
        assert_rule_holds(Policy(), "fxprec_rules::nowhere", X)
    with pytest.raises(ValueError, match="the policy says nothing of fxprec_rules::gate"):
        assert_rule_holds(Policy(), GATE, X, W)


def test_an_autocast_registration_is_a_row_too():
    op = define("registered", gate_of_others)
    torch.library.register_autocast(op, "cpu", torch.bfloat16)
    assert_rule_holds(Policy(), op, X.detach(), W.detach())
