"""origins: positions and timesteps stay FP32 until a periodic function, a weight or a learned value takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.passes.placement.origins import COUNTS
from fxprec.passes.policy.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LENGTH = 1200


class Model(nn.Module):
    """Angles that a function makes of integers beside a low ``h``, and what it returns of them."""

    def __init__(self, angles):
        super().__init__()
        self.angles, self.layer = angles, nn.Linear(8, 8)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("ids", torch.arange(LENGTH)[None])
        self.register_buffer("steps", torch.arange(LENGTH).float())

    def forward(self, x, ids, mask):
        h = self.layer(x)
        return self.angles(self, h, ids, mask), self.layer(h)


def turned(angles):
    return torch.cat([angles.sin(), angles.cos()], -1)


def in_place(m, h, ids, mask):
    steps = ids.type_as(h)
    steps.mul_(0.01)
    return steps.sin()


def in_a_checkpoint(m, h, ids, mask):
    return checkpoint(lambda h, t: (t.type_as(h) * 0.01).sin(), h, ids, use_reentrant=False)


#: From integers to a value that is wrong where they were rounded on the way.
SPELLINGS = {
    "inv_freq @ ids.float()": lambda m, h, ids, mask: turned(
        (m.inv_freq[None, :, None].expand(ids.shape[0], -1, 1) @ ids[:, None, :].float()).transpose(1, 2)
    ),
    "inv_freq @ ids.type_as(h)": lambda m, h, ids, mask: turned(
        (m.inv_freq[None, :, None] @ ids[:, None, :].type_as(h)).transpose(1, 2)
    ),
    "type_as": lambda m, h, ids, mask: turned(ids.type_as(h)[..., None] * m.inv_freq),
    "to(h.dtype)": lambda m, h, ids, mask: turned(ids.to(h.dtype)[..., None] * m.inv_freq),
    "type(h.type())": lambda m, h, ids, mask: turned(ids.type(h.type())[..., None] * m.inv_freq),
    "to(h)": lambda m, h, ids, mask: turned(ids.to(h)[..., None] * m.inv_freq),
    "both to(h.dtype)": lambda m, h, ids, mask: turned(ids.to(h.dtype)[..., None] * m.inv_freq.to(h.dtype)),
    "a number": lambda m, h, ids, mask: (ids.to(h.dtype) * 0.01).sin(),
    "arange": lambda m, h, ids, mask: turned(torch.arange(h.shape[1]).to(h)[:, None] * m.inv_freq),
    "arange(dtype=h.dtype)": lambda m, h, ids, mask: (torch.arange(h.shape[1], dtype=h.dtype) * 0.01).sin(),
    "a constant": lambda m, h, ids, mask: turned(torch.arange(LENGTH).float().type_as(h)[:, None] * m.inv_freq),
    "a buffer": lambda m, h, ids, mask: turned(m.ids.to(h.dtype)[..., None] * m.inv_freq),
    "a float buffer": lambda m, h, ids, mask: turned(m.steps.type_as(h)[:, None] @ m.inv_freq[None]),
    "a total of a mask": lambda m, h, ids, mask: turned((mask.long().cumsum(1) - 1).type_as(h)[..., None] * m.inv_freq),
    "a total of floats": lambda m, h, ids, mask: turned((mask.to(h.dtype).cumsum(1) - 1)[..., None] * m.inv_freq),
    "outer": lambda m, h, ids, mask: turned(torch.outer(ids[0].type_as(h), m.inv_freq)),
    "einsum": lambda m, h, ids, mask: turned(torch.einsum("i,j->ij", ids[0].type_as(h), m.inv_freq)),
    "einsum over a batch": lambda m, h, ids, mask: turned(
        torch.einsum("bi,bj->ij", ids.type_as(h), m.inv_freq.expand(2, -1))
    ),
    "polar": lambda m, h, ids, mask: torch.view_as_real(
        torch.polar(torch.ones(LENGTH, 4), ids[0].type_as(h)[:, None] * m.inv_freq)
    ),
    "timestep": lambda m, h, ids, mask: turned((ids[:, -1].to(h.dtype) * 0.5)[:, None] * m.inv_freq),
    "grid": lambda m, h, ids, mask: turned(
        torch.stack(torch.meshgrid(torch.arange(500).type_as(h), torch.arange(3).type_as(h), indexing="ij"), -1)
        @ torch.stack([m.inv_freq, m.inv_freq])
    ),
    "a distance": lambda m, h, ids, mask: (ids[0, :9, None].to(h.dtype) - ids[0, -9:].to(h.dtype)) * 0.5,
    "what is returned": lambda m, h, ids, mask: ids.type_as(h),
    "a target": lambda m, h, ids, mask: torch.nn.functional.mse_loss(ids.type_as(h), ids.type_as(h) + 0.5),
    "full_like": lambda m, h, ids, mask: turned(torch.full_like(h[..., :1], 999.0) * m.inv_freq),
    "new_full": lambda m, h, ids, mask: turned(h.new_full((3, 1), 999) * m.inv_freq),
    "full(dtype=h.dtype)": lambda m, h, ids, mask: turned(torch.full((3, 1), 301, dtype=h.dtype) * m.inv_freq),
    "tensor(dtype=h.dtype)": lambda m, h, ids, mask: turned(
        torch.tensor([301, 407], dtype=h.dtype)[:, None] * m.inv_freq
    ),
    "new_tensor": lambda m, h, ids, mask: turned(h.new_tensor([301, 407])[:, None] * m.inv_freq),
    "new_ones": lambda m, h, ids, mask: turned((h.new_ones(3) * 301)[:, None] * m.inv_freq),
    "a view of ones_like": lambda m, h, ids, mask: turned(torch.ones_like(h[0, :, 0])[:, None] * 301 * m.inv_freq),
    "zeros_like": lambda m, h, ids, mask: turned((torch.zeros_like(h[..., :1]) + 301) * m.inv_freq),
    "ones(dtype=h.dtype)": lambda m, h, ids, mask: turned((torch.ones(3, 1, dtype=h.dtype) * 301) * m.inv_freq),
    "equal": lambda m, h, ids, mask: (t := ids[0].type_as(h), (t[:, None] == t[None]).sum().float())[1],
    "less": lambda m, h, ids, mask: ((ids.to(h.dtype) + 1) < 600).float(),
    "equal, and read low": lambda m, h, ids, mask: (
        t := ids[0].type_as(h),
        m.layer(h * t[:, None]),
        m.layer(h + t[:, None]),
        (t[:, None] == t[None]).float(),
    )[-1],
    "in place": in_place,
    "in a checkpoint": in_a_checkpoint,
}
DYNAMO = (
    "type(h.type())",
    "inv_freq @ ids.type_as(h)",
    "to(h.dtype)",
    "arange(dtype=h.dtype)",
    "both to(h.dtype)",
    "in a checkpoint",
)
INPUTS = torch.randn(2, LENGTH, 8), torch.arange(LENGTH).repeat(2, 1), torch.ones(2, LENGTH, dtype=torch.bool)


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {}) for each in SPELLINGS),
        *((each, {"example_inputs": True, "level": "O2"}) for each in SPELLINGS),
        *((each, {"capture": "dynamo"}) for each in DYNAMO),
        *((each, {"dtype": FP16}) for each in ("inv_freq @ ids.type_as(h)", "a float buffer")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:float16 on a CPU")
def test_integers_are_not_rounded(spelling, settings):
    model = Model(SPELLINGS[spelling])
    expected = model(*INPUTS)[0]
    example = {"example_inputs": INPUTS} if "example_inputs" in settings else {}
    found = fxprec.convert(model, **{"dtype": BF16, **settings, **example}).module(*INPUTS)[0]
    assert found.dtype is FP32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4)


#: Floats that are made of an integer input without a cast: without inputs nobody knows that it is an integer.
UNCAST = {
    "a quotient": lambda m, h, ids, mask: turned((ids / 512 * 1000)[..., None] * m.inv_freq),
    "a product": lambda m, h, ids, mask: turned((ids * 0.123)[..., None] * m.inv_freq),
    "with a buffer": lambda m, h, ids, mask: turned(ids[..., None] * m.inv_freq),
    "outer": lambda m, h, ids, mask: turned(torch.outer(ids[0], m.inv_freq)),
    "a sum": lambda m, h, ids, mask: (ids[0] + 0.25).sin(),
    "of views": lambda m, h, ids, mask: torch.stack([ids.t() / 3, ids.t() / 7], 1).sin(),
    "of a sum of integers": lambda m, h, ids, mask: ((ids + 1).unsqueeze(-1) * m.inv_freq).sin(),
    "a total": lambda m, h, ids, mask: (ids / 3).cumsum(1).div(1000).sin(),
    "a comparison": lambda m, h, ids, mask: (ids[0, :, None] + 0.5 < ids[0, None] + 0.75).float(),
    "what is returned": lambda m, h, ids, mask: ids * 0.5,
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("spelling", UNCAST)
def test_a_graph_that_was_captured_without_inputs_rounds_no_integers(spelling, level):
    model = Model(UNCAST[spelling])
    expected = model(*INPUTS)[0]
    converted = fxprec.convert(model, dtype=BF16, level=level, capture="symbolic").module
    converted(INPUTS[0], INPUTS[1].float(), INPUTS[2])
    torch.testing.assert_close(converted(*INPUTS)[0], expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    "f",
    [
        lambda m, h, ids, mask: m.inv_freq[(ids + 1) % 4],
        lambda m, h, ids, mask: nn.functional.embedding((ids * 2).view(-1) % 8, m.layer.weight),
        lambda m, h, ids, mask: h.masked_fill((ids > 3)[..., None], 0.0),
        lambda m, h, ids, mask: h * ids[..., None].to(h.dtype),
        lambda m, h, ids, mask: h * 2 + mask[..., None],
    ],
    ids=["an index", "ids of a lookup", "a comparison", "a mask", "floats"],
)
def test_integers_of_which_no_float_is_made_cost_no_further_graph(f):
    model = fxprec.convert(Model(f), dtype=BF16, level="O2", capture="symbolic").module
    model(*INPUTS)
    assert len(fxprec.graphs(model)) == 1


def test_the_report_says_why():
    model = fxprec.convert(Model(SPELLINGS["inv_freq @ ids.type_as(h)"]), dtype=BF16, example_inputs=INPUTS).module
    whys = {row.op: row.why for row in fxprec.report(model).graphs[0].rows}
    assert whys["matmul"] == whys["to"] == COUNTS


@pytest.fixture
def decided(tools):
    def run(f, level="O1", **settings):
        gm = tools.traced(f, torch.randn(2, 4), torch.randn(4, 4), torch.arange(8).view(2, 4))
        tools.rewritten(gm, tools.context(level, **settings))
        return {node.name: node.meta["precision"] for node in gm.graph.nodes if node.op.startswith("call")}, gm

    return run


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * ids.to(y.dtype),
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * (ids > 2).type_as(y),
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * ids.unsqueeze(0).type_as(y).squeeze(0),
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * (1 - (ids > 2).type_as(y)),
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * torch.full_like(y, 999.0),
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * 2 + torch.ones_like(y) * -1000.0,
        lambda x, w, ids: (y := nn.functional.linear(x, w)) * 2 + torch.ones_like(y) * 1000.0,
    ],
    ids=["a mask of integers", "of bools", "through views", "inverted", "a factor", "a mask of ones", "a term"],
)
def test_a_mask_casts_nothing(decided, f):
    """A learned value is multiplied with a mask in its own dtype, as it was."""
    found, gm = decided(lambda x, w, ids: nn.functional.linear(f(x, w, ids), w))
    casts = [node.name for node in gm.graph.nodes if node.meta.get("inserted")]
    assert casts == ["x_bf16", "w_bf16", "linear_1_f32"]
    assert found["mul"].output is BF16


def test_a_count_widens_nobody_whom_its_cast_would_not(decided):
    def f(x, w, ids):
        y = nn.functional.linear(x, w)
        steps = ids.type_as(y) + 1
        return nn.functional.linear(y + steps, w), steps.sin()

    found, _ = decided(f)
    assert (found["type_as"].output, found["add"].output, found["sin"].reads) == (FP32, FP32, FP32)
    assert found["add_1"].output is BF16


def test_a_weight_takes_counts_as_it_takes_everything(decided):
    found, _ = decided(lambda x, w, ids: nn.functional.linear(ids.float(), w))
    assert found["linear"].reads is BF16 and found["linear"].rule == "low"


def test_counts_that_the_program_has_low_are_left_low(decided):
    found, _ = decided(lambda x, w, ids: ids.to(BF16) * 0.1)
    assert found["mul"].output is BF16


def test_an_override_stands(decided):
    policy = Policy().override(ops={"matmul": "low"})
    found, _ = decided(lambda x, w, ids: ids.float() @ ids.float().t(), policy=policy)
    assert found["matmul"].compute is BF16
    found, _ = decided(lambda x, w, ids: ids.float() @ ids.float().t())
    assert found["matmul"].compute is FP32


def test_autocasts_placement_is_as_it_was(decided):
    found, _ = decided(lambda x, w, ids: ids.type_as(nn.functional.linear(x, w)) * 0.1, placement="autocast")
    assert found["type_as"].output is BF16


@pytest.mark.parametrize("call", [lambda x, kind: x.type(kind), lambda x, kind: x.type(dtype=kind)], ids=["", "dtype="])
@pytest.mark.parametrize("example_inputs", [None, INPUTS], ids=["", "example_inputs"])
def test_integers_take_the_type_of_a_lowered_float_by_its_name(call, example_inputs):
    """A linear reads them, whose dtype nobody could tell from a string."""
    model = Model(lambda m, h, ids, mask: m.layer(call(ids[0, :8] % 2, h.type())))
    expected = model(*INPUTS)[0]
    found = fxprec.convert(model, example_inputs, dtype=BF16).module(*INPUTS)[0]
    assert found.dtype is FP32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
