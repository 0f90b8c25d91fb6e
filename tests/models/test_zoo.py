"""Real models train right: one step of each, converted, against FP32 and beside eager autocast."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from benchmarks.measure.ledgers import added_up
from benchmarks.workloads.subjects import Subject
from benchmarks.workloads.zoo import SIZE, ZOO
from fxprec.model.conversion import conversion_of
from fxprec.testing import count_casts

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None or importlib.util.find_spec("diffusers") is None,
        reason="wants the [zoo] extra: transformers and diffusers",
    ),
]

_HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product", "linear", "_grouped_mm")


class _FullPrecisionMatmuls(TorchDispatchMode):
    """Matmuls, convolutions and attention that run on FP32 operands."""

    def __init__(self):
        super().__init__()
        self.found = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::").startswith(_HEAVY):
            self.found += any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args)
        return func(*args, **(kwargs or {}))


class _Step:
    """One forward and backward: loss, gradients, FP32 matmuls, casts executed."""

    def __init__(self, model, case, inputs, autocast=False):
        def loss():
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return case.loss(model(**inputs))

        loss().backward()  # captures, makes shadows
        model.zero_grad()
        with count_casts() as self.casts:
            value = loss()
            value.backward()
        self.loss = value.item()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with _FullPrecisionMatmuls() as heavy:
            loss()
        self.fp32_matmuls = heavy.found

    def cosine(self, other):
        a = torch.cat([self.gradients[name].flatten() for name in other.gradients])
        b = torch.cat([gradient.flatten() for gradient in other.gradients.values()])
        return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


#: Of these two layers differ: dense and routed ones; one with a table of positions, and one that reads it.
TWO_LAYERS = ("deepseek", "t5")


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_one_step(name, monkeypatch):
    monkeypatch.setitem(SIZE, "num_hidden_layers", 2 if name in TWO_LAYERS else 1)
    case = ZOO[name]
    torch.manual_seed(0)
    model = case.build().train()
    inputs = case.inputs()
    fp32 = _Step(copy.deepcopy(model), case, inputs)
    eager = _Step(copy.deepcopy(model), case, inputs, autocast=True)
    converted = fxprec.convert(model).module
    assert converted is model
    ours = _Step(converted, case, inputs)

    assert ours.gradients.keys() == fp32.gradients.keys()
    assert all(gradient.dtype is torch.float32 for gradient in ours.gradients.values())
    assert abs(ours.loss - fp32.loss) <= max(0.03 * abs(fp32.loss), abs(eager.loss - fp32.loss))
    assert ours.cosine(fp32) >= min(0.98, eager.cosine(fp32))
    assert ours.fp32_matmuls <= eager.fp32_matmuls
    # A returned value that others read (a key of a cache) costs a cast back and two of its gradient, listed apart.
    if ours.casts.total > eager.casts.total:
        on_path = fxprec.report(converted).headline.on_path
        assert ours.casts.total - 3 * on_path <= eager.casts.total, (ours.casts, on_path, eager.casts)
    captures = conversion_of(converted).captures
    converted(**inputs)
    assert conversion_of(converted).captures == captures, "an equal call is captured again"


@pytest.mark.slow
def test_generate_runs_in_our_graphs():
    torch.manual_seed(0)
    model = ZOO["gpt2"].build().eval()
    ids = torch.randint(1, 200, (1, 5))
    plain = copy.deepcopy(model).generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    converted = fxprec.convert(model).module
    out = converted.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out.shape == plain.shape
    assert isinstance(converted, type(model))
    with _FullPrecisionMatmuls() as heavy:
        converted(ids)
    assert heavy.found == 0
    assert fxprec.report(converted).headline.captures >= 1


def _generate(model):
    return model.generate(torch.arange(1, 6)[None], max_new_tokens=2, min_new_tokens=2, do_sample=False)


def _features(model):
    return model.get_image_features(pixel_values=torch.ones(1, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run", "method"), [("t5", _generate, "encoder"), ("clip", _features, "get_image_features")]
)
def test_what_goes_around_forward_is_lowered_by_name(name, run, method):
    for methods, lowered in (((), False), ((method,), True)):
        model = fxprec.convert(ZOO[name].build().eval(), methods=methods).module
        run(model)
        with _FullPrecisionMatmuls() as heavy:
            run(model)
        assert (heavy.found == 0) == lowered


@pytest.mark.slow
def test_a_method_around_forward_stands_in_the_report():
    case = ZOO["clip"]
    model = fxprec.convert(case.build().eval()).module
    model(**case.inputs())
    assert "convert(model, methods=('get_image_features',))" in str(fxprec.report(model))


@pytest.mark.slow
def test_save_pretrained_round_trip(tmp_path):
    from transformers import BertForMaskedLM

    model = fxprec.convert(ZOO["bert"].build()).module
    model(**ZOO["bert"].inputs())
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is BertForMaskedLM
    for (name, a), (other, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.filterwarnings("ignore:float16 on a CPU")
def test_one_step_in_float16(name):
    """Tiny: float16 matmuls are slow here. Loss and gradients with a static scale, beside eager autocast's."""
    case = ZOO[name]
    torch.manual_seed(0)
    model = case.build().eval()
    inputs = case.inputs()
    fp32 = _Step(copy.deepcopy(model), case, inputs)
    converted, scaler = fxprec.convert(model, dtype=torch.float16, scaler=128.0)
    loss = case.loss(converted(**inputs))
    scaler.scale(loss).backward()
    ours = {name: p.grad / 128 for name, p in converted.named_parameters() if p.grad is not None}
    a = torch.cat([ours[name].flatten() for name in fp32.gradients])
    b = torch.cat([gradient.flatten() for gradient in fp32.gradients.values()])
    assert loss.dtype is torch.float32
    assert abs(loss.item() - fp32.loss) <= 0.01 * abs(fp32.loss)
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) >= 0.99


#: Backwards that nobody can differentiate, of which a ledger of gradients says so.
WITHOUT_DERIVATIVE = {
    "deepseek": {"transformers::grouped_mm_fallback_backward"},
    "wav2vec2": {"aten::_weight_norm_interface_backward", "aten::_ctc_loss_backward"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gradients"),
    [("deepseek", True), ("gan", False), ("mamba", False), ("wav2vec2", True)],
)
def test_the_error_ledger_adds_up(name, gradients):
    """Routes that differ in the reference, weights made of others, a scan, and six graphs."""
    found = added_up(Subject.of_zoo(name, ZOO[name]), torch.bfloat16, "O1", gradients)
    assert found.measured != 0 and found.adds_up
    lacking = {remark.partition(" has no derivative in ")[0] for remark in found.remarks}
    assert lacking == WITHOUT_DERIVATIVE.get(name, set())


@pytest.mark.slow
def test_a_unet_with_text_is_one_graph_and_has_its_users_paths():
    """Its helpers keep their results (functools.cache), and its class has a ``__getattr__`` of its own."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 3, 8)
    expected = model(*inputs).sample
    fxprec.convert(model, dtype=torch.bfloat16)
    torch.testing.assert_close(model(*inputs).sample, expected, atol=0.1, rtol=0.1)
    report = fxprec.report(model)
    assert len(fxprec.graphs(model)) == 1 and "__dict__" not in str(report)
    fxprec.testing.assert_precision(model, "down_blocks.0.attentions.0.proj_in", torch.bfloat16)
