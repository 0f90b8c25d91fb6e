"""The interpreter with a GPU's arithmetic: rounds as FMAs do, is off by what is documented, as Triton compiles ops."""

from __future__ import annotations

import linecache
import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import approximations
import kernel_tools
from approximations import BOUNDS
from fxprec.kernels.launch.triton_support import constexpr, jit, tl
from fxprec.kernels.rows.emit import functions

if kernel_tools.HAS_TRITON:
    import gpu_arithmetic
    from gpu_arithmetic import ALL, Arithmetic, computing_as

pytestmark = pytest.mark.skipif(not kernel_tools.HAS_TRITON, reason="wants Triton")
interpreted = pytest.mark.parametrize("device", kernel_tools.DEVICES if kernel_tools.INTERPRETING else [])
COUNT = 1024
#: What is computed of fp32 x, y and z, and the instructions on FP32 that Triton makes of it for 9.0 (but for ``neg``,
#: which is exact): with contraction, and without.
COMPILED = {
    "x * y + z": ("fma.rn", "mul.rn add.rn"),
    "z - x * y": ("fma.rn", "mul.rn sub.rn"),
    "-(x * y) + z": ("fma.rn add", "mul.rn sub.rn add.rn"),
    "x * y + x * z": ("mul fma.rn", "mul.rn add.rn"),
    "(x * y + z) * (x * y)": ("mul fma.rn", "mul.rn add.rn"),
    "tl.where(x > y, x * y, 0.0) + z": ("mul selp add", "mul.rn selp add.rn"),
    "tl.sum(x * y) + z": ("mul fma.rn add", "mul.rn add.rn"),
    "tl.exp(x)": ("mul ex2.approx", "mul.rn ex2.approx"),
    "tl.exp2(x)": ("ex2.approx.ftz",) * 2,
    "x / y": ("div.full",) * 2,
    "tl.div_rn(x, y)": ("div.rn",) * 2,
    "tl.sqrt(x)": ("sqrt.approx.ftz",) * 2,
    "tl.sqrt_rn(x)": ("sqrt.rn",) * 2,
    "tl.rsqrt(x)": ("rsqrt.approx.ftz",) * 2,
}


def kernel(expression: str) -> Any:
    """Of three fp32 tensors [COUNT] and the result's pointer; one program."""
    source = f"""
from fxprec.kernels.launch.triton_support import jit, tl
@jit()
def computed(x_ptr, y_ptr, z_ptr, out_ptr):
    place = tl.arange(0, {COUNT})
    x, y, z = tl.load(x_ptr + place), tl.load(y_ptr + place), tl.load(z_ptr + place)
    tl.store(out_ptr + place, {expression})
"""
    name = f"<{expression}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {}
    exec(compile(source, name, "exec"), scope)
    return scope["computed"]


def computed(expression: str, arithmetic: Arithmetic, *given: Tensor, **options: Any) -> Tensor:
    """Of as many tensors as there are; the others are 1."""
    x, y, z = (*given, *[torch.ones(COUNT)] * (3 - len(given)))
    out = torch.empty(COUNT)
    with computing_as(arithmetic):
        kernel(expression)[(1,)](x, y, z, out, **options)
    return out


def rounded(exact: Fraction) -> Fraction:
    """To float32, ties to even, of numbers whose float32 is a normal one."""
    unit = Fraction(2) ** (math.frexp(float(exact))[1] - 24)
    return round(exact / unit) * unit


def numbers(seed: int = 0) -> tuple[Tensor, ...]:
    """Whose sums cancel often; a third of z is next to -x * y."""
    generator = torch.Generator().manual_seed(seed)
    x, y, z = (torch.randn(COUNT, generator=generator) for _ in range(3))
    z[::3] = -(x * y)[::3] * (1 + torch.randn(COUNT, generator=generator)[::3] * 1e-7)
    return x, y, z


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


# -- products and sums -------------------------------------------------------------------------------------------------


def fractions(*values: Tensor) -> Any:
    """Numbers as exact fractions."""
    return zip(*([Fraction(v) for v in x.tolist()] for x in values), strict=True)


@interpreted
@pytest.mark.parametrize(
    ("expression", "first", "second"),
    [
        ("x * y + z", *[lambda x, y, z, r: r(x * y + z)] * 2),
        ("z - x * y", *[lambda x, y, z, r: r(z - x * y)] * 2),
        ("-(x * y) + z", *[lambda x, y, z, r: r(z - r(x * y))] * 2),
        ("x * y + x * z", lambda x, y, z, r: r(x * y + r(x * z)), lambda x, y, z, r: r(x * z + r(x * y))),
        ("x * y - y * z", lambda x, y, z, r: r(x * y - r(y * z)), lambda x, y, z, r: r(r(x * y) - y * z)),
        ("x * y * z + x", *[lambda x, y, z, r: r(r(x * y) * z + x)] * 2),
        ("tl.where(x > -9.0, x * y, 0.0) + z", *[lambda x, y, z, r: r(r(x * y) + z)] * 2),
        (f"tl.broadcast_to((x * y)[None], (1, {COUNT})).reshape({COUNT}) + z", *[lambda x, y, z, r: r(x * y + z)] * 2),
        ("tl.fma(x, y, z)", *[lambda x, y, z, r: r(x * y + z)] * 2),
    ],
)  # fmt: skip
def test_a_product_and_its_sum_are_rounded_once(device: str, expression: str, first: Any, second: Any) -> None:
    given = numbers()
    for contracts, exact in (("first", first), ("second", second)):
        found = computed(expression, Arithmetic(contracts, "exact"), *given)
        assert found.tolist() == [exact(*each, rounded) for each in fractions(*given)]


@interpreted
@pytest.mark.parametrize("contracts", ["nothing", "first"])
def test_where_a_launch_may_not_contract_products_are_rounded(device: str, contracts: str) -> None:
    x, y, z = numbers()
    options = {} if contracts == "nothing" else {"enable_fp_fusion": False}
    found = computed("x * y + z", Arithmetic(contracts, "exact"), x, y, z, **options)
    assert torch.equal(found, x * y + z)
    assert not torch.equal(found, computed("x * y + z", Arithmetic("first", "exact"), x, y, z))


@interpreted
def test_the_terms_of_a_sum_enter_it_unrounded(device: str) -> None:
    """What rounding takes from squares is left where each is taken from its rounded self."""
    x = torch.randn(COUNT // 8)
    first, second = torch.zeros(2, COUNT // 8, 8)  # of which a thread has eight
    first[:, 0], first[:, 1], second[:, 0], second[:, 1] = -x * x, x, 1.0, x
    plain, contracted = (
        computed("tl.sum(x * y) + z * 0.0", Arithmetic(contracts, "exact"), first.reshape(-1), second.reshape(-1))[0]
        for contracts in ("nothing", "first")
    )
    exact = (first.double() * second.double()).sum()
    assert plain == 0.0 != exact and torch.isclose(contracted.double(), exact, rtol=1e-6)


@interpreted
def test_sums_are_rounded_once_and_not_twice(device: str) -> None:
    """Next to halfway between two numbers of FP32, by less than float64 holds: rounded twice, both would go to even."""
    half = (torch.ones(COUNT, dtype=torch.float64) + 2.0**-24).numpy()
    tiny = torch.full((COUNT,), 2.0**-80, dtype=torch.float64).numpy()
    assert (gpu_arithmetic.rounded_sum(half, tiny) == 1.0 + 2.0**-23).all()
    assert (gpu_arithmetic.rounded_sum(half, -tiny) == 1.0).all()
    assert (gpu_arithmetic.rounded_sum(-half, -tiny) == -1.0 - 2.0**-23).all()
    assert (gpu_arithmetic.rounded_sum(half * 3, 3 * tiny) == 3.0 + 2.0**-22).all()


# -- approximations ----------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("expression", "function", "name"),
    [
        ("tl.exp2(x)", lambda x, y: x.exp2(), "ex2.approx.ftz.f32"), ("x / y", torch.div, "div.full.f32"),
        ("tl.exp(x)", lambda x, y: x.exp(), "ex2.approx.f32"), ("tl.erf(x)", lambda x, y: x.erf(), "erff"),
        ("tl.sqrt(y)", lambda x, y: y.sqrt(), "sqrt.approx.ftz.f32"), ("tl.log(y)", lambda x, y: y.log(), "logf"),
        ("tl.rsqrt(y)", lambda x, y: y.rsqrt(), "rsqrt.approx.ftz.f32"), ("tl.log2(y)", lambda x, y: y.log2(), "log2f"),
    ],
)  # fmt: skip
def test_results_are_at_their_bounds(device: str, expression: str, function: Any, name: str) -> None:
    x, y, _ = numbers()
    x, y = x * 4, y.abs() + 0.01
    wide = function(x.double(), y.double())
    unit = torch.ldexp(torch.ones(COUNT, dtype=torch.float64), torch.frexp(wide)[1] - 24)
    bound = BOUNDS[name]
    allowed = bound.ulps * unit + 0.5 * unit if bound.ulps else bound.relative * wide.abs() + 0.5 * unit
    if expression == "tl.exp(x)":
        allowed = allowed + x.double().abs() * wide * 2.0**-23  # the rounded product with log2(e), and its last digit
    sides: dict[str, Tensor] = {}
    for errs in ("exact", "above", "below", "mixed"):
        found = computed(expression, Arithmetic("nothing", errs), x, y).double()
        assert ((found - wide).abs() <= allowed).all(), errs
        sides[errs] = found
    moved = (wide.abs() > 0) & ~((wide.abs() > 1 - 2.0**-22) & (name == "erff"))
    assert (sides["above"] > sides["exact"])[moved].all() and (sides["below"] < sides["exact"])[moved].all()
    mixed = (sides["mixed"] == sides["above"])[moved].double().mean()
    assert 0.3 < mixed < 0.7 and torch.equal(
        sides["mixed"], computed(expression, Arithmetic("first", "mixed"), x, y).double()
    )


@interpreted
@pytest.mark.parametrize("errs", ["exact", "above", "below", "mixed"])
def test_special_values_are_those_of_ptx(device: str, errs: str) -> None:
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38]).repeat(COUNT // 8)
    for expression, expected in {
        "tl.exp2(x)": [1.0, 1.0, math.inf, 0.0, math.nan, 1.0, 1.0, math.inf],
        "tl.exp(x)": [1.0, 1.0, math.inf, 0.0, math.nan, None, None, math.inf],
        "tl.sqrt(x)": [0.0, -0.0, math.inf, math.nan, math.nan, 0.0, -0.0, None],
        "tl.rsqrt(x)": [math.inf, -math.inf, 0.0, math.nan, math.nan, math.inf, -math.inf, None],
        "0.0 / (x * 0.0 + 3.0)": [0.0, 0.0, math.nan, math.nan, math.nan, 0.0, 0.0, 0.0],
        "tl.erf(x)": [0.0, -0.0, 1.0, -1.0, math.nan, None, None, 1.0],
    }.items():
        found = computed(expression, Arithmetic("first", errs), odd)[:8].tolist()
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs), (expression, found)
        assert all(math.copysign(1, a) == math.copysign(1, b) for a, b in pairs if b == 0), (expression, found)


@interpreted
def test_bfloat16_is_rounded_to_nearest_even(device: str) -> None:
    x = torch.cat(
        (torch.randn(COUNT - 6), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, math.inf, math.nan, 3.4e38, -0.0]))
    )
    found = computed("x.to(tl.bfloat16).to(tl.float32)", Arithmetic("nothing", "exact"), x)
    assert torch.equal(found.nan_to_num(), x.bfloat16().float().nan_to_num()) and torch.equal(found.isnan(), x.isnan())


@jit()
def _apply(x_ptr, out_ptr, FUNCTION: constexpr, BLOCK: constexpr):
    """x_ptr, out_ptr: fp32 [BLOCK], in a grid of one."""
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, FUNCTION(tl.load(x_ptr + place)))


@interpreted
@pytest.mark.parametrize(
    ("name", "low", "high", "most"),
    [("exp", -30, 1.93, 4), ("tanh", -30, 1.5, 27), ("expm1", -30, 1.9, 10), ("log1p", -30, 30, 6)],
)
def test_functions_of_row_programs(device: str, name: str, low: float, high: float, most: int) -> None:
    """With exact arithmetic they are off by 3, 6, 6 and 4 ulp: tests/kernels/rows/test_row_functions.py."""
    spread = torch.logspace(low, high, COUNT // 2, dtype=torch.float64).float()
    x = torch.cat((spread, torch.linspace(-0.99, 10.0**high, COUNT // 2) if name == "log1p" else -spread))
    exact = getattr(torch, name)(x.double()).float()
    worst = 0
    for arithmetic in ALL:
        out = torch.empty_like(x)
        with computing_as(arithmetic):
            _apply[(1,)](x, out, FUNCTION=getattr(functions, name), BLOCK=COUNT)
        worst = max(worst, kernel_tools.ulps(out, exact))
    assert most // 3 < worst <= most


# -- the compiler ------------------------------------------------------------------------------------------------------


def floats(ptx: str) -> set[str]:
    """Its instructions on FP32."""
    found = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)*)\.f32\b", ptx, re.MULTILINE)
    return {name for name in found if not name.startswith(("setp", "mov", "neg"))}


@kernel_tools.compiles
@pytest.mark.parametrize("expression", COMPILED)
def test_what_triton_makes_of_the_ops(expression: str) -> None:
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "z_ptr", "out_ptr"), "*fp32")
    made = COMPILED[expression]
    if expression == "-(x * y) + z" and kernel_tools.triton_release() >= (3, 8):  # which makes a difference of it
        made = ("fma.rn", "mul.rn sub.rn")
    for fuses, expected in zip((True, False), made, strict=True):
        options = {"num_warps": 4, "enable_fp_fusion": fuses}
        ptx = kernel_tools._compiled(kernel(expression), 90, options, pointers, {}, {}).ptx
        assert floats(ptx) == set(expected.split()), expression


def test_approximations_are_found_in_ptx() -> None:
    lines = [
        "ex2.approx.ftz.f32 %r1, %r2;",
        "@%p1 tanh.approx.f32 %r1, %r2;",
        "div.full.f32 a, b, c;",
        "div.rn.f32 a, b;",
    ]
    ptx = "".join(f"\n\t{line}" for line in lines)
    assert approximations.approximations(ptx) == {"ex2.approx.ftz.f32", "tanh.approx.f32", "div.full.f32"}
    with pytest.raises(AssertionError, match="of unknown error"):
        approximations.check_approximations(ptx)
