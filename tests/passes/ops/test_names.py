"""Every spelling of an op gets one name; casts tell their dtype."""

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.testing._internal.common_methods_invocations import op_db

from fxprec.passes.graph.annotations import Op
from fxprec.passes.graph.casts import cast, cast_if_float
from fxprec.passes.ops.names import canonical_name, canonical_op, cast_target, dtype_argument
from fxprec.passes.ops.spellings import ALIASES

aten = torch.ops.aten

SPELLINGS: dict[str, list[Any]] = {
    "add": [torch.add, operator.add, torch.Tensor.add, torch.Tensor.__add__, aten.add.Tensor, aten.add, "add",
            "__add__", "__radd__"],
    "matmul": [torch.matmul, operator.matmul, torch.linalg.matmul, aten.matmul.default, "matmul", "__matmul__",
               "__rmatmul__"],
    "linear": [F.linear, torch._C._nn.linear, aten.linear.default],
    "gelu": [F.gelu, torch._C._nn.gelu, aten.gelu.default],
    "scaled_dot_product_attention": [F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention,
                                     aten.scaled_dot_product_attention.default],
    "lstm": [torch._VF.lstm, torch.lstm, aten.lstm.input],
    "rnn_tanh": [torch._VF.rnn_tanh, torch.rnn_tanh],
    "div": [torch.div, torch.true_divide, torch.divide, operator.truediv, "__truediv__", "div", "true_divide"],
    "softmax": [F.softmax, torch.softmax, torch.special.softmax, aten._softmax.default, aten.softmax.int, "softmax"],
    "log_softmax": [F.log_softmax, torch.log_softmax, aten._log_softmax.default, "log_softmax"],
    "layer_norm": [F.layer_norm, torch.layer_norm, torch.native_layer_norm, aten.native_layer_norm.default],
    "batch_norm": [F.batch_norm, torch.batch_norm, aten.native_batch_norm.default,
                   aten._native_batch_norm_legit.default],
    "convolution": [torch.convolution, aten.convolution.default, aten._convolution.default],
    "max_pool2d": [F.max_pool2d, F._max_pool2d, torch.max_pool2d, aten.max_pool2d.default],
    "adaptive_max_pool2d": [F.adaptive_max_pool2d, aten.adaptive_max_pool2d.default],
    "adaptive_max_pool2d_with_indices": [F.adaptive_max_pool2d_with_indices, torch._C._nn.adaptive_max_pool2d],
    "sigmoid": [F.sigmoid, torch.sigmoid, torch.special.expit, "sigmoid"],
    "to": [aten._to_copy.default, aten.to.dtype, torch.ops.prims.convert_element_type.default, cast, cast_if_float,
           "to", "float", "half", "bfloat16", "double", "type", "type_as", "int", "long", "bool", "cuda", "cpu"],
    "getitem": [operator.getitem, "__getitem__"],
    "getattr": [getattr],
    "linalg_norm": [torch.linalg.norm, aten.linalg_norm.default],
    "fft_rfft": [torch.fft.rfft, aten.fft_rfft.default],
    "cat": [torch.cat, torch.concat, torch.concatenate, aten.cat.default],
    "mul": [torch.mul, torch.multiply, operator.mul, "__mul__", "__rmul__", "multiply"],
    "abs": [torch.abs, torch.absolute, operator.abs, abs, "__abs__", "absolute"],
    "clamp": [torch.clamp, torch.clip, "clip"],
    "transpose": [torch.transpose, torch.swapaxes, torch.swapdims, "swapaxes", aten.transpose.int],
    "permute": [torch.permute, torch.permute_copy, aten.permute_copy.default],
    "bitwise_and": [torch.bitwise_and, operator.and_, "__and__", "__rand__", aten.__and__.Tensor],
    "mm": [torch.mm, torch.spmm, "mm"],
    "rand": [torch.rand],
    "erfcx": [torch.special.erfcx, aten.special_erfcx.default],
    "exp2": [torch.exp2, torch.special.exp2, aten.exp2.default, aten.special_exp2.default, "exp2"],
    "im2col": [F.unfold, aten.im2col.default],
    "unfold": ["unfold", torch.Tensor.unfold, aten.unfold.default],
    "item": ["item", "__int__", "__bool__", operator.index],
    "detach": [torch.detach, "detach", aten.detach.default, torch._C._autograd._get_data_attr],
    "higher_order::cond": [torch.ops.higher_order.cond],
    "sequence_concat": [operator.concat],
}  # fmt: skip

IN_PLACE: dict[str, list[Any]] = {
    "add": [operator.iadd, torch.Tensor.add_, "add_", "__iadd__", aten.add_.Tensor],
    "mul": [operator.imul, "mul_", "multiply_", "__imul__"],
    "div": [operator.itruediv, "div_", "true_divide_", "__itruediv__"],
    "relu": [torch.relu_, F.relu_, "relu_", aten.relu_.default],
    "clamp": ["clip_", "clamp_", torch.clamp_],
    "setitem": [operator.setitem, "__setitem__"],
    "bitwise_and": [operator.iand, "__iand__"],
    "copy": ["copy_", aten.copy_.default],
}


def name_of(spelling: Any) -> Op | None:
    return canonical_name(spelling, "call_method" if isinstance(spelling, str) else "call_function")


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_share_a_name(name: str) -> None:
    assert {str(spelling): name_of(spelling) for spelling in SPELLINGS[name]} == {
        str(spelling): Op(name) for spelling in SPELLINGS[name]
    }


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_spellings(name: str) -> None:
    assert [name_of(spelling) for spelling in IN_PLACE[name]] == [Op(name, in_place=True)] * len(IN_PLACE[name])


def resolve(path: str) -> Any:
    """torch.<path>, or the Tensor method of that name."""
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    return path if callable(getattr(torch.Tensor, path, None)) else None


@pytest.mark.parametrize("variant", ["aliases", "method", "operator", "inplace", "inplace_operator"])
def test_torchs_own_aliases_and_variants(variant: str) -> None:
    """torch lists for its tests what else each op is called: all must end up at the same name."""
    checked, wrong = 0, []
    for info in op_db:
        function = resolve(info.name)
        base = name_of(function) if function is not None else None
        if base is None:
            continue
        for other in others(info, variant):
            spelled = name_of(other)
            checked += 1
            if spelled is None or spelled.name != base.name or spelled.in_place != variant.startswith("inplace"):
                wrong.append((info.name, other, spelled, base))
    assert checked > {"aliases": 50, "method": 200, "operator": 5, "inplace": 100, "inplace_operator": 5}[variant]
    assert not wrong


def others(info: Any, variant: str) -> list[Any]:
    if variant == "aliases" and info.variant_test_name == "binary":
        return []  # max(x, y) is maximum, but max(x) is not: a name cannot tell
    if variant == "aliases":
        return [found for alias in info.aliases if (found := resolve(alias.name)) is not None]
    found = getattr(info, f"{variant}_variant")
    name = getattr(found, "__name__", "<lambda>")
    if found is None or name == "<lambda>":
        return []
    return [found] if "operator" in variant else [name] if callable(getattr(torch.Tensor, name, None)) else []


def test_aliases_end_at_names_that_are_no_aliases() -> None:
    assert {name: target for name, target in ALIASES.items() if target in ALIASES and ALIASES[target] != target} == {}


def test_other_libraries_keep_their_namespace() -> None:
    with torch.library._scoped_library("fxprec_names", "DEF") as library:
        library.define("scale_(Tensor(a!) x) -> Tensor(a!)")
        library.define("nms(Tensor x) -> Tensor")
        assert canonical_name(torch.ops.fxprec_names.nms.default) == Op("fxprec_names::nms")
        assert canonical_name(torch.ops.fxprec_names.scale_.default) == Op("fxprec_names::scale", in_place=True)


def test_callables_of_nobody() -> None:
    unhashable = type("Unhashable", (), {"__hash__": None, "__call__": lambda self: None})()
    for target in (len, lambda x: x, unhashable, torch.nn.functional.has_torch_function):
        assert canonical_name(target, "call_function") is None
    assert canonical_name("fc.weight", "get_attr") is None


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    return graph.create_node("call_method" if isinstance(target, str) else "call_function", target, (x, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "dtype"),
    [
        (call("float"), torch.float32),
        (call("half"), torch.float16),
        (call("bfloat16"), torch.bfloat16),
        (call("long"), torch.int64),
        (call("to", torch.bfloat16), torch.bfloat16),
        (call("to", dtype=torch.float16), torch.float16),
        (call("to", "cpu", torch.float16), torch.float16),
        (call("to", torch.device("cpu"), torch.float64, True), torch.float64),
        (call("to", "cpu"), None),
        (call("to", device="cpu"), None),
        (call("cuda"), None),
        (call("type", torch.float16), torch.float16),
        (call("type", "torch.HalfTensor"), torch.float16),
        (call("type", torch.DoubleTensor), torch.float64),
        (call("type"), None),
        (call("type_as", 0), None),
        (call(aten._to_copy.default, dtype=torch.bfloat16), torch.bfloat16),
        (call(aten._to_copy.default, device="cpu"), None),
        (call(aten.to.dtype, torch.float16), torch.float16),
        (call(torch.ops.prims.convert_element_type.default, torch.float16), torch.float16),
        (call(torch.Tensor.half), torch.float16),
        (call(cast, torch.bfloat16), torch.bfloat16),
        (call(cast_if_float, torch.float32), torch.float32),
    ],
    ids=str,
)
def test_cast_target(node: Node, dtype: torch.dtype | None) -> None:
    assert canonical_op(node) == Op("to")
    assert cast_target(node) is dtype


def test_dtype_argument() -> None:
    assert dtype_argument(call(torch.softmax, 0, dtype=torch.float32)) is torch.float32
    assert dtype_argument(call(torch.softmax, 0, torch.float32)) is torch.float32
    assert dtype_argument(call(torch.softmax, 0)) is None


def test_arguments_tell_apart_what_one_function_does() -> None:
    assert canonical_op(call(F.interpolate, scale_factor=2)) == Op("interpolate_nearest")
    assert canonical_op(call(F.interpolate, None, 2, "nearest-exact")) == Op("interpolate_nearest")
    assert canonical_op(call(F.interpolate, scale_factor=2, mode="area")) == Op("interpolate_area")
    assert canonical_op(call(F.interpolate, scale_factor=2, mode="bilinear")) == Op("interpolate")
    assert canonical_op(call(operator.truediv, 2)) == Op("div")
    graph = Graph()
    assert canonical_op(graph.call_function(operator.truediv, (1.0, graph.placeholder("x")))) == Op("rdiv")
