"""The last linear layer with its cross-entropy: a chunk of logits at a time, with the gradients of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import kernel_tools
from fxprec.kernels.nn import linear_cross_entropy as module
from fxprec.kernels.nn.aligned_linear import pitch_of
from fxprec.kernels.nn.linear_cross_entropy import default_chunk, linear_cross_entropy, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: Plain torch, Triton's interpreter, a device.
FORMS = [*([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="torch")]), *kernel_tools.DEVICES]
every_form = pytest.mark.parametrize("device", FORMS)
by_hand = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="what torch does around the op, not the kernel")


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def inputs(
    rows: int, features: int, classes: int, dtype: torch.dtype, device: str, weight_dtype: torch.dtype | None = None
) -> Any:
    hidden = torch.randn(rows, features).to(dtype)
    weight, bias = torch.randn(classes, features) / 2, torch.randn(classes)
    target = torch.randint(0, classes, (rows,))
    target[1::5] = -100
    leaves = (x.to(weight_dtype or dtype).to(device).requires_grad_() for x in (weight, bias))
    return hidden.to(device).requires_grad_(), *leaves, target.to(device)


def results(
    function: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Any, upstream: Any, **options: Any
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    loss = function(leaves[0], leaves[1], target, leaves[2] if bias is not None else None, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


def error(a: Tensor, truth: Tensor) -> float:
    return (a.double() - truth).norm().item() / truth.norm().item()


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("rows", "classes", "chunk", "biased", "options"),
    [(7, 33, 3, False, {}), (9, 129, 4, True, {"label_smoothing": 0.1, "z_loss": 1e-2}), (6, 1100, None, True, {})],
)
def test_loss_and_gradients_are_as_near_to_float64_as_eagers(
    device: str, dtype: torch.dtype, reduction: str, rows: int, classes: int, chunk: Any, biased: bool, options: Any
) -> None:
    hidden, weight, bias, target = inputs(rows, 16, classes, dtype, device)
    upstream = torch.rand(rows if reduction == "none" else (), device=device) + 0.5
    given = (hidden, weight, target, bias if biased else None, upstream)
    ours = results(linear_cross_entropy, *given, reduction=reduction, chunk=chunk, **options)
    theirs = results(reference, *given, reduction=reduction, **options)
    double: Any = (x if x is None or not x.is_floating_point() else x.double() for x in given)
    truth = results(reference, *double, reduction=reduction, **options)
    assert [x.dtype for x in ours] == [torch.float32, *[dtype] * (len(ours) - 1)]
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert error(a, exact) <= 2 * error(b, exact) + torch.finfo(dtype).eps


@every_form
def test_one_chunk_or_many_are_the_same(device: str) -> None:
    hidden, weight, bias, target = inputs(10, 8, 40, torch.float32, device)
    found = [
        results(linear_cross_entropy, hidden, weight, target, bias, None, chunk=chunk, label_smoothing=0.1)
        for chunk in (1, 3, 10, 64)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@every_form
def test_a_float32_weight_of_low_hidden_states_has_a_float32_gradient(device: str) -> None:
    hidden, weight, bias, target = inputs(64, 16, 24, torch.bfloat16, device, torch.float32)
    ours = results(linear_cross_entropy, hidden, weight, target, bias, None, chunk=64)
    assert [x.dtype for x in ours] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    low = (weight.detach().bfloat16().double(), target, bias.detach().bfloat16().double())
    truth = results(reference, hidden.double(), *low, None)
    for a, exact in zip(ours, truth, strict=True):
        assert error(a, exact) <= 2**-7


@every_form
def test_the_gradient_of_the_weight_adds_up_in_float32(device: str) -> None:
    """258 rows of the same gradient: a bfloat16 sum of them stops at 256."""
    hidden = torch.ones(258, 1, dtype=torch.bfloat16, device=device)
    weight = torch.tensor([[-40.0], [40.0]], device=device).bfloat16().requires_grad_()
    target = torch.zeros(258, dtype=torch.int64, device=device)
    linear_cross_entropy(hidden, weight, target, reduction="sum", chunk=1).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-258, 258]


@every_form
def test_float16_gradients_of_a_long_mean_outlive_the_forward(device: str) -> None:
    hidden = torch.full((2048, 2), 0.01, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.eye(2, device=device).half() / 128
    target = torch.zeros(2048, dtype=torch.int64, device=device)
    scale = torch.tensor(65536.0, device=device)
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), hidden, scale)
    truth = hidden.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(reference(truth, weight.double(), target), truth, scale.double())
    torch.testing.assert_close(ours.double(), exact, rtol=4e-3, atol=0)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_backwards_of_one_graph(device: str, dtype: torch.dtype) -> None:
    hidden, weight, bias, target = inputs(6, 8, 40, dtype, device)
    leaves = (hidden, weight, bias)
    loss = linear_cross_entropy(hidden, weight, target, bias) * 8
    found = [torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, True, False)]
    assert not any(gradient.requires_grad for each in found for gradient in each)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, bias), leaves)
    for a, b in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(a, b * 8, rtol=torch.finfo(dtype).eps, atol=1e-6)


@every_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_to_learn_from(device: str, reduction: str) -> None:
    hidden, weight, bias, target = inputs(4, 8, 20, torch.float32, device)
    ignored = target.clone().fill_(-100)
    loss, *gradients = results(linear_cross_entropy, hidden, weight, ignored, bias, None, reduction=reduction)
    assert (loss.isnan() if reduction == "mean" else loss == 0).all() and not any(g.any() for g in gradients)
    empty = results(linear_cross_entropy, hidden[:0], weight, target[:0], bias, None, reduction=reduction)
    assert empty[0].isnan() if reduction == "mean" else empty[0].shape == (0,)
    assert empty[1].shape == (0, 8) and not empty[2].any() and not empty[3].any()


@every_form
def test_any_leading_shape_and_only_the_wanted_gradients(device: str) -> None:
    hidden, weight, bias, target = inputs(6, 8, 20, torch.float32, device)
    folded = hidden.detach().view(2, 3, 8).transpose(0, 1)
    loss = linear_cross_entropy(folded, weight.detach(), target.view(2, 3).t(), bias, reduction="none")
    assert loss.shape == (3, 2)
    (gradient,) = torch.autograd.grad(loss.sum(), bias)
    flat = reference(hidden, weight, target, bias, reduction="none")
    torch.testing.assert_close(loss, flat.view(2, 3).t())
    torch.testing.assert_close(gradient, torch.autograd.grad(flat.sum(), bias)[0])
    assert linear_cross_entropy(hidden[0], weight, target[0]).shape == ()


class Largest(TorchDispatchMode):
    """The most bytes of one floating-point tensor that an op makes, and of those in FP32."""

    bytes = 0
    wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.bytes = max(self.bytes, t.nbytes)
                self.wide = max(self.wide, t.nbytes if t.dtype == torch.float32 else 0)
        return result


@pytest.mark.parametrize("device", kernel_tools.DEVICES)
@pytest.mark.parametrize("of", [(False, False, False), (True, True, False)])
def test_all_logits_are_never_in_memory_nor_a_chunk_in_float32(device: str, of: tuple[bool, ...]) -> None:
    hidden, weight, _, target = (x.detach() for x in inputs(64, 4, 500, torch.float16, device))
    with Largest() as largest:
        module._forward(hidden, weight, target, None, -100, "mean", 0.0, 0.0, 16, [*of])
    assert largest.bytes == 16 * 504 * 2, "a chunk of rows, padded"
    assert largest.wide <= 504 * 4 * 4, "the weight's gradient, padded"


def test_the_default_chunk_holds_twice_the_hidden_states() -> None:
    assert default_chunk(16384, 4096, 128256) == 1024
    assert default_chunk(8192, 768, 50257) == 128, "but no less than this"
    assert default_chunk(1 << 20, 1024, 10) == 1 << 27
    for rows, features, classes in [(16384, 4096, 128256), (32768, 2048, 32000)]:
        logits = default_chunk(rows, features, classes) * pitch_of(classes, 2)
        assert rows * features <= logits <= 2.1 * rows * features


# As a torch op


@by_hand
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str) -> None:
    hidden, weight, bias, target = inputs(5, 4, 6, torch.float32, "cpu")
    made = reduction != "none"
    arguments = (hidden, weight, target, bias, -100, reduction, 0.1, 0.1, 2, [made] * 3)
    torch.library.opcheck(torch.ops.fxprec.linear_cross_entropy.default, arguments)
    detached = (hidden.detach(), weight.detach(), target, None, -100, 0.1, 0.1, 2, [True, True, False])
    torch.library.opcheck(torch.ops.fxprec.linear_cross_entropy_backward.default, (torch.rand(5), *detached))


@by_hand
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_exported_and_checkpointed(reduction: str) -> None:
    hidden, weight, bias, target = inputs(5, 4, 6, torch.float32, "cpu")

    def loss_of(h: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h * 2, w, y, b, label_smoothing=0.1, reduction=reduction, chunk=2).sum() * 3

    def checkpointed(*args: Tensor) -> Any:
        return checkpoint(loss_of, *args, use_reentrant=False)

    class Loss(torch.nn.Module):
        def forward(self, h: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
            return loss_of(h, w, y, b)

    def in_eager(h: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return reference(h * 2, w, y, b, -100, reduction, 0.1).sum() * 3

    wanted = results(in_eager, hidden, weight, target, bias, None)
    exported = torch.export.export(Loss(), (hidden, weight, target, bias))
    assert "fxprec.linear_cross_entropy.default" in exported.graph_module.code
    for function in (torch.compile(loss_of, fullgraph=True, backend="aot_eager"), checkpointed, exported.module()):
        torch.testing.assert_close(results(function, hidden, weight, target, bias, None), wanted)
    made = [n.args[-1] for n in exported.graph.nodes if "linear_cross_entropy" in str(n.target)]
    assert made == [[False] * 3], "an exported forward makes no gradients"


@by_hand
def test_func_grad_and_a_second_derivative() -> None:
    hidden, weight, bias, target = inputs(5, 4, 6, torch.float32, "cpu")
    (wanted,) = torch.autograd.grad(reference(hidden, weight, target, bias), hidden)
    found = torch.func.grad(lambda h: linear_cross_entropy(h, weight, target, bias))(hidden.detach())
    torch.testing.assert_close(found, wanted)
    second = []
    for function in (linear_cross_entropy, reference):
        first = torch.autograd.grad(function(hidden, weight, target, bias), (hidden, weight, bias), create_graph=True)
        second.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), (hidden, weight, bias)))
    torch.testing.assert_close(second[0], second[1])


@by_hand
def test_under_autocast_as_by_a_linear_layer() -> None:
    hidden, weight, bias, target = inputs(5, 4, 6, torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias, chunk=2)
        wanted = reference(hidden.bfloat16(), weight, target, bias)
    torch.testing.assert_close(loss, wanted.float(), rtol=1e-6, atol=0)
    assert loss != linear_cross_entropy(hidden, weight, target, bias)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    assert all(g.dtype == torch.float32 for g in gradients)
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float()), "the chunks add up in float32"


@by_hand
@pytest.mark.parametrize("classes", [8, 9])
def test_a_row_that_is_ignored_and_not_finite_has_no_gradient(classes: int) -> None:
    hidden, weight = torch.randn(4, 16), torch.randn(classes, 16)
    hidden[1] = math.inf
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, torch.tensor([1, -100, 2, 3])).backward()
    assert hidden.grad is not None and hidden.grad[1].eq(0).all() and hidden.grad[0].ne(0).any()


def test_without_gradients_none_are_made() -> None:
    hidden, weight, _, target = inputs(50, 4, 104, torch.float32, "cpu")
    with torch.no_grad():
        _, _, *made = module._forward(hidden, weight, target, None, -100, "mean", 0.0, 0.0, 0, [False] * 3)
    assert [gradient.numel() for gradient in made] == [0, 0, 0]
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad


H, W, Y = torch.zeros(4, 5), torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64)


@by_hand
@pytest.mark.parametrize(
    ("arguments", "options", "wanted", "message"),
    [
        ((H.double(), W, Y), {}, TypeError, "hidden in float32, float16 or bfloat16, got torch.float64"),
        ((H.half(), W.bfloat16(), Y), {}, TypeError, "weight must be torch.float16, as hidden, or float32"),
        ((H, W.half(), Y), {}, TypeError, "weight must be torch.float32"),
        ((H, W, Y, torch.zeros(3).double()), {}, TypeError, "takes bias in"),
        ((H, W, Y.int()), {}, TypeError, "class indices must be int64 or uint8, got torch.int32"),
        ((H, W[:, :4], Y), {}, ValueError, r"do not fit: .4, 5. and .3, 4."),
        ((H, W[:0], Y), {}, ValueError, "do not fit"),
        ((H, W[0], Y), {}, ValueError, "do not fit"),
        ((H, W, Y[:3]), {}, ValueError, r"hidden .4, 5. takes class indices .4,., got .3,."),
        ((H, W, Y, torch.zeros(4)), {}, ValueError, r"bias must be .3."),
        ((H, W, Y), {"chunk": 0}, ValueError, "chunk must be at least one row, got 0"),
        ((H, W, Y), {"reduction": "avg"}, ValueError, "reduction must be one of"),
        ((H, W, Y), {"label_smoothing": 2}, ValueError, "label_smoothing must be between"),
        ((H, W, Y.to("meta")), {}, ValueError, "a target on 'meta', not 'cpu'"),
        ((H, W, Y + 3), {}, IndexError, "Target 3 is out of bounds"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: Any, options: Any, wanted: Any, message: str) -> None:
    with pytest.raises(wanted, match=message):
        linear_cross_entropy(*arguments, **options)


# The gradient's scaling


@kernel_tools.compiles
@pytest.mark.parametrize("architecture", kernel_tools.ARCHITECTURES)
@pytest.mark.parametrize(("values", "results"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")])
def test_scaling_moves_16_bytes_at_a_time(architecture: int, values: str, results: str) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fxprec.kernels.nn import scaled_gradient

    kernel = scaled_gradient.scale_kernel
    types = {
        "values": f"*{values}",
        "factor": "*fp32",
        "denominator": "*fp32",
        "results": f"*{results}",
        "count": "i32",
    }
    constants = {"IN_PLACE": values == results, "BLOCK": scaled_gradient._BLOCK}
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if name != "factor"}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=divisible)
    ptx = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 8}).asm["ptx"]
    assert ptx.count("v4.b32") == (4096 // 256) * (int(values[2:]) + int(results[2:])) // 128
