"""The op table is complete, agrees with torch.autocast, and says of kernels what they really do."""

import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.names import canonical_name
from fxprec.passes.ops.rule import rows, table
from fxprec.passes.ops.spellings import ALIASES
from fxprec.passes.ops.table import OP_TABLE, OpRule, row_of

ROOT = Path(__file__).parents[3]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
MODULE_OPS: dict[str, tuple[str, ...]] = GENERATE["MODULE_OPS"]
MODULE_EXCEPTIONS: dict[str, str] = GENERATE["MODULE_EXCEPTIONS"]
LOW_DTYPES = (torch.bfloat16, torch.float16)


# Completeness


def public(home: Any) -> list[str]:
    """Names of the callables that users reach there: no classes, no private names, but dunders."""
    names = (name for name in dir(home) if not re.match(r"_(?!_)", name))
    return [
        n for n in names if callable(f := getattr(home, n, None)) and not (isinstance(f, type) and n != "__class__")
    ]


#: Methods for named dimensions, which torch 2.13 has no more.
NAMED_TENSORS = {"align_as", "align_to", "has_names", "refine_names", "rename", "rename_"}

_TORCH_FUNCTION = "Python machinery of overriding, no op"
_AUTOGRAD = "autograd bookkeeping: changes no value"
_STORAGE = "memory, devices and interchange with other libraries: no value is computed"
_PYTHON = "Python's object protocol"
_FUNCTIONAL = "makes or runs Python callables"
_REMOVED = "removed from torch: raises when called"


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


#: Spelled name -> why no row of the op table is about it.
DECIDED_EXCEPTIONS = (
    _because(_TORCH_FUNCTION, "has_torch_function has_torch_function_unary has_torch_function_variadic "
             "handle_torch_function __torch_function__ __torch_dispatch__ boolean_dispatch assert_int_or_pair Optional "
             "Callable")
    | _because(_AUTOGRAD, "backward register_hook register_post_accumulate_grad_hook reinforce retain_grad")
    | _because(_STORAGE, "__array__ __array_wrap__ __dlpack__ __dlpack_device__ record_stream module_load")
    | _because(_PYTHON, "__class__ __deepcopy__ __delattr__ __dir__ __format__ __getattribute__ __getstate__ __hash__ "
               "__init__ __init_subclass__ __iter__ __new__ __reduce__ __reduce_ex__ __repr__ __reversed__ __setattr__ "
               "__setstate__ __sizeof__ __str__ __subclasshook__ __call__")
    | _because(_FUNCTIONAL, "call attrgetter itemgetter methodcaller")
    | _because(_REMOVED, "eig lstsq solve symeig")
)  # fmt: skip

HOMES: dict[str, tuple[Any, str]] = {
    "torch.nn.functional": (F, "call_function"),
    "Tensor": (torch.Tensor, "call_method"),
    "operator": (__import__("operator"), "call_function"),
    "torch.linalg": (torch.linalg, "call_function"),
    "torch.special": (torch.special, "call_function"),
    "torch.fft": (torch.fft, "call_function"),
}


@pytest.mark.parametrize("home", HOMES)
def test_every_callable_has_a_row_or_a_reason(home: str) -> None:
    where, kind = HOMES[home]
    missing = []
    for name in public(where):
        op = canonical_name(name if kind == "call_method" else getattr(where, name), kind)
        if (op is None or op.name not in OP_TABLE) and name not in DECIDED_EXCEPTIONS.keys() | NAMED_TENSORS:
            missing.append(name)
    assert len(public(where)) > 20
    assert not missing, f"{home}: no row in op_rows_*.py and no reason in DECIDED_EXCEPTIONS"


def test_exceptions_are_not_in_the_table() -> None:
    known = {name for where, _ in HOMES.values() for name in dir(where)}
    assert {name for name in DECIDED_EXCEPTIONS if name not in known} == set()
    assert {name for name in DECIDED_EXCEPTIONS if name in OP_TABLE} == set()


def layers() -> list[str]:
    return [name for name in dir(nn) if isinstance(getattr(nn, name), type)]


def test_every_layer_is_known_by_its_ops_or_a_reason() -> None:
    assert len(layers()) > 150
    assert [name for name in layers() if (name in MODULE_OPS) == (name in MODULE_EXCEPTIONS)] == []
    assert {op for ops in MODULE_OPS.values() for op in ops if op not in OP_TABLE} == set()


class Recorder(TorchFunctionMode):
    """Canonical names of the torch functions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = canonical_name(func, "call_function")
        if op is not None:
            self.names.add(op.name)
        return func(*args, **kwargs or {})


@pytest.mark.filterwarnings("ignore")
def test_layers_run_the_ops_that_are_said() -> None:
    ran: dict[str, set[str]] = {}
    for info in module_db:
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        for _, given in zip(range(4), inputs, strict=False):
            layer = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
            if given.forward_input is None:
                continue
            with Recorder() as recorder:
                try:
                    layer(*given.forward_input.args, **given.forward_input.kwargs)
                except RuntimeError:  # a sample of FractionalMaxPool wants other random numbers
                    continue
            ran.setdefault(info.module_cls.__name__, set()).update(recorder.names)
    assert len(ran) > 90
    allowed = {"interpolate", "interpolate_nearest"}  # one function, told apart by its mode
    wrong = {
        name: ops
        for name, ops in ran.items()
        if name in MODULE_OPS and not ops & set(MODULE_OPS[name]) and not allowed & set(MODULE_OPS[name])
    }
    assert wrong == {}


def test_rows_are_named_canonically_and_give_a_reason() -> None:
    assert {name for name in OP_TABLE if ALIASES.get(name, name) != name} == set()
    assert {name for name, row in OP_TABLE.items() if not row.why or row.why.endswith(".")} == set()


def test_a_name_in_two_places_is_refused() -> None:
    one = rows(Rule.LOW, "a", "matmul mm")
    assert table(one, rows(Rule.FULL, "b", "exp"))["mm"] == OpRule(Rule.LOW, "a")
    with pytest.raises(ValueError, match="mm in two places"):
        table(one, rows(Rule.FULL, "b", "mm"))


# Agreement with torch.autocast


def autocast_lists() -> dict[str, Rule]:
    """aten name -> rule, from the lists that torch.autocast on CUDA is built from."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", "")
    rules = {
        "AT_FORALL_LOWER_PRECISION_FP": Rule.LOW,
        "AT_FORALL_FP32": Rule.FULL,
        "AT_FORALL_FP32_SET_OPT_DTYPE": Rule.FULL,
        "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": Rule.FULL,
        "AT_FORALL_PROMOTE": Rule.PROMOTE,
    }
    found = {}
    for macro, rule in rules.items():
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None, macro
        for name in re.findall(r"_\((?:ADD_NS\()?(\w+)", body[1]):
            found[name] = rule
    return found


def registered(key: str) -> set[str]:
    return {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if name.startswith("aten::")  # other tests register custom ops
    }


def row_of_aten(aten_name: str) -> OpRule | None:
    op = canonical_name(getattr(torch.ops.aten, aten_name), "call_function")
    return row_of(op.name) if op is not None else None


def test_autocasts_cuda_lists_and_ours_agree() -> None:
    lists = autocast_lists()
    if hasattr(torch.linalg, "matrix_sqrth"):  # torch 2.14 registers it by itself, with a cast to float32
        lists["linalg_matrix_sqrth"] = Rule.FULL
    assert registered("AutocastCUDA") - lists.keys() <= {"binary_cross_entropy", "cudnn_convolution", "norm",
                                                          "cudnn_convolution_transpose", "_cudnn_rnn"}  # fmt: skip
    ours = {name: row.autocast or row.rule for name in lists if (row := row_of_aten(name)) is not None}
    assert ours == lists


def test_autocasts_cpu_ops_have_rows() -> None:
    assert {name for name in registered("AutocastCPU") if row_of_aten(name) is None} == set()


def test_rules_that_differ_from_autocasts_copy_values_are_bound_by_memory_or_take_coordinates() -> None:
    differ = {name: row.autocast for name, row in OP_TABLE.items() if row.autocast not in (None, row.rule)}
    bound = {"mv": Rule.LOW, "addmv": Rule.LOW, "addr": Rule.LOW}
    coordinates = dict.fromkeys(("grid_sample", "grid_sampler_2d_cpu_fallback"), Rule.PROMOTE)
    assert differ == {name: Rule.FULL for name in differ if "nearest" in name} | bound | coordinates


# What kernels really do (samples of torch's own op tests, on a CPU)


def small_samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[list[Any], Any]]:
    """Flattened (input, args, kwargs) of a few samples, and how to put them together again."""
    for _, sample in zip(range(count), info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), strict=False):
        flat, spec = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
        if sum(leaf.numel() for leaf in flat if isinstance(leaf, torch.Tensor)) < 3000:
            yield flat, spec


def call(function: Callable[..., Any], flat: list[Any], spec: Any) -> Any:
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
    first, args, kwargs = tree_unflatten(copies, spec)
    return function(first, *args, **kwargs)


def floats(flat: list[Any]) -> list[int]:
    return [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32]


def cast_at(flat: list[Any], positions: list[int], dtype: torch.dtype) -> list[Any]:
    return [leaf.to(dtype) if i in positions else leaf for i, leaf in enumerate(flat)]


def entries() -> Iterator[tuple[Any, str, OpRule]]:
    """The ops of torch's tests that run in FP32 and whose name has a row."""
    for info in op_db:
        found: Any = torch
        for part in info.name.split("."):
            found = getattr(found, part, None)
        kind = "call_function" if callable(found) else "call_method"
        op = canonical_name(found if callable(found) else info.name, kind)
        if op is not None and op.name in OP_TABLE and torch.float32 in info.dtypes:
            yield info, op.name, OP_TABLE[op.name]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("low", LOW_DTYPES, ids=str)
def test_ops_that_may_be_lowered_have_low_kernels(low: torch.dtype) -> None:
    """Where the FP32 call runs, the low one does: a lowered program never dies of a missing kernel."""
    checked, missing = set(), set()
    for info, name, row in entries():
        if row.rule in (Rule.FULL, Rule.KEEP):
            continue
        for flat, spec in small_samples(info, torch.float32, 3):
            positions = floats(flat)
            try:
                call(info.op, flat, spec)
            except Exception:
                continue
            checked.add(name)
            try:
                call(info.op, cast_at(flat, positions, low), spec)
            except Exception as error:
                missing.add((name, str(error)[:80]))
    assert len(checked) > 200
    assert missing == set()


def test_kernels_promote_inside_where_the_row_says_so() -> None:
    checked, wrong = set(), set()
    for info, name, row in entries():
        if not row.native_promotion:
            continue
        for flat, spec in small_samples(info, torch.float32, 3):
            dimensioned = [i for i in floats(flat) if flat[i].dim() > 0]
            for position in dimensioned if len(dimensioned) > 1 else []:
                checked.add(name)
                mixed = cast_at(flat, [position], torch.bfloat16)
                try:
                    result = call(info.op, mixed, spec)
                    want = call(info.op, cast_at(mixed, [position], torch.float32), spec)
                except Exception as error:
                    wrong.add((name, str(error)[:80]))
                    continue
                if isinstance(result, torch.Tensor) and row.result != "bool":
                    exact = result.dtype is torch.float32 and torch.allclose(result, want, equal_nan=True)
                    wrong |= set() if exact or row.rule is not Rule.PROMOTE else {(name, str(result.dtype))}
    assert len(checked) > 30
    assert wrong == set()


NORM_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm": lambda x, w, b, m, v: F.layer_norm(x.mT, (8,), w, b),
    "group_norm": lambda x, w, b, m, v: F.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b),
    "batch_norm": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, training=True),
}


@pytest.mark.parametrize("low", LOW_DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", [name for name, row in OP_TABLE.items() if "cpu" in row.mixed and not row.dtype_keyword]
)
def test_mixed_kernels_read_low_compute_wide_and_write_low(name: str, low: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, 16, generator=generator).to(low).requires_grad_()
    weight, bias = (torch.rand(8, generator=generator).requires_grad_() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rms_norm warns of mixed dtypes and falls back: no free ports for it
        result = NORM_CALLS[name](x, weight, bias, torch.zeros(8), torch.ones(8))
    wide = NORM_CALLS[name](x.double(), weight.double(), bias.double(), torch.zeros(8).double(), torch.ones(8).double())
    assert result.dtype is low
    assert (result.double() - wide).abs().max() <= torch.finfo(low).eps * wide.abs().max()
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype is low
    assert weight.grad is not None and weight.grad.dtype is torch.float32


def test_dtype_keyword_accumulates_in_fp32() -> None:
    keyword = [name for name, row in OP_TABLE.items() if row.dtype_keyword]
    assert keyword == ["sum", "mean"]
    x = torch.full((70_000,), 1.0, dtype=torch.float16)  # the sum is beyond float16's largest number
    assert torch.sum(x, dtype=torch.float32) == 70_000 and torch.mean(x, dtype=torch.float32) == 1.0


@pytest.mark.parametrize("low", LOW_DTYPES, ids=str)
def test_mean_accumulates_wide_when_it_writes_low(low: torch.dtype) -> None:
    mixed = [name for name, row in OP_TABLE.items() if row.mixed and row.dtype_keyword]
    assert mixed == ["mean"]
    x = torch.full((70_000,), 1.0, dtype=low)
    assert x.mean() == 1.0 and x.mean().dtype is low and x.mean(0, keepdim=True) == 1.0


def writes(info: Any) -> bool:
    """Whether the entry is an in-place op: its result is its input."""
    only_in_place = not hasattr(torch, info.name) and hasattr(torch.Tensor, info.name + "_")
    return info.name.endswith("_") or info.variant_test_name == "in_place" or only_in_place


def test_results_that_share_memory_are_marked_as_views() -> None:
    """An in-place write to an unmarked alias would be lost behind a cast."""
    checked, unmarked = set(), set()
    for info, name, row in entries():
        for flat, spec in small_samples(info, torch.float32, 2):
            copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
            first, args, kwargs = tree_unflatten(copies, spec)
            if not isinstance(first, torch.Tensor) or first.numel() == 0 or first.layout is not torch.strided:
                continue
            address = first.untyped_storage().data_ptr()
            try:
                results, _ = tree_flatten(info.op(first, *args, **kwargs))
            except Exception:
                continue
            checked.add(name)
            for result in results:
                if isinstance(result, torch.Tensor) and result.layout is torch.strided and result.numel():
                    aliases = result.untyped_storage().data_ptr() == address
                    unmarked |= {name} if aliases and not row.view and not writes(info) else set()
    assert len(checked) > 300
    assert unmarked == set()


# docs/precision.md


def test_the_page_on_precision_is_up_to_date() -> None:
    assert (ROOT / "docs" / "precision.md").read_text(encoding="utf-8") == GENERATE["page"](), (
        "run python docs/generate.py"
    )


def test_the_page_names_every_op_and_layer() -> None:
    text = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert [name for name in (*OP_TABLE, *MODULE_OPS, *MODULE_EXCEPTIONS) if f"`{name}`" not in text] == []
