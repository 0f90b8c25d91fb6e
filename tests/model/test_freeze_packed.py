"""Frozen models on packed weights: as exact as without, noticed changes, and plain ops for all who look."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.kernels.cpu.packed import Geometry, PackedConv, can_pack, pack_linear
from fxprec.model.conversion import conversion_of
from fxprec.passes.graph.annotations import graph_notes
from fxprec.programs import packed_weights

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no oneDNN with bfloat16 here")


class Block(nn.Module):
    """(N, 8, H, W) -> (N, 5): every form that joins, and a view that wants contiguous values."""

    def __init__(self, views=True):
        super().__init__()
        self.views = views
        self.stem, self.stem_norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 16, (3, 1), padding=(1, 0), bias=False)
        self.inner_norm = nn.BatchNorm2d(16, affine=False)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up, self.down = nn.Linear(16 * 49, 130), nn.Linear(130, 5)
        for norm in (self.stem_norm, self.inner_norm):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        x = F.relu(self.inner_norm(self.inner(x)) + x)
        x = F.hardswish(self.deep(x))
        x = F.adaptive_avg_pool2d(x, 7)
        # As eager torch has it, a view is for contiguous values only.
        flat = x.view(x.size(0), -1) if self.views else x.flatten(1)
        return self.down(F.gelu(self.up(flat)))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(80, 90), nn.Linear(90, 70)

    def forward(self, x):
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


IMAGES = torch.randn(3, 8, 9, 10)


def frozen(model=None, inputs=IMAGES, pack=True, capture="auto"):
    model, _ = fxprec.convert((Block() if model is None else model).eval(), dtype=torch.bfloat16, capture=capture)
    with torch.no_grad():
        model(inputs)
        fxprec.freeze(model, pack=pack)
        model(inputs)
    return model


class Writes(nn.Module):
    """A convolution whose result is written to through a view, or after one was taken."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(8, 4, 3), how

    def forward(self, x):
        y = self.conv(x)
        if self.how == "through a view":
            y.view(-1).mul_(2)
        elif self.how == "through a flattened one":
            y.flatten(1).mul_(2)
        else:
            view = y.view(-1)
            y.mul_(2)
            return view
        return y


@pytest.mark.parametrize("how", ["through a view", "through a flattened one", "after a view"])
def test_what_is_written_through_a_view_is_seen(how):
    model = Writes(how)
    exact = copy.deepcopy(model)(IMAGES).detach()
    with torch.no_grad():
        assert error(frozen(model)(IMAGES), exact.double()) < 0.02


def test_convolutions_that_stayed_float32_are_packed_in_float32():
    model = Block().eval()
    exact = copy.deepcopy(model).double()(IMAGES.double()).detach()
    names = ("stem", "inner", "deep")
    policy = fxprec.Policy.preset("O1").override(modules=dict.fromkeys(names, torch.float32))
    converted, _ = fxprec.convert(model, policy=policy, dtype=torch.bfloat16)
    with torch.no_grad():
        before = converted(IMAGES)
        fxprec.freeze(converted)
        converted(IMAGES)
        with torch.profiler.profile() as profile:
            after = converted(IMAGES)
    store = conversion_of(converted).packed
    assert store is not None and {packing.weight: packing.dtype for packing in store._packed} == {
        **{f"{name}.weight": torch.float32 for name in names},
        "up.weight": torch.bfloat16, "down.weight": torch.bfloat16,
    }  # fmt: skip
    assert sum("_convolution_pointwise" in event.name for event in profile.events() or ()) == 3
    assert error(after, exact) <= 1.5 * error(before, exact)
    assert converted.stem.weight.dtype is torch.float32


class Shared(nn.Module):
    """Layers that are called twice, once with a norm or an activation and once without."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(90, 90)

    def forward(self, x):
        x = self.conv(F.relu(self.norm(self.conv(x))))
        return self.linear(F.gelu(self.linear(x.flatten(2))))


def test_weights_of_several_products():
    model = Shared().eval()
    exact = copy.deepcopy(model).double()(IMAGES.double()).detach()
    packed = frozen(model)
    with torch.no_grad():
        assert error(packed(IMAGES), exact) < 0.02
    assert sorted(map(len, joined(packed))) == [0, 0, 1, 2]


def error(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


def joined(model):
    return [names for each in conversion_of(model).captured for names in graph_notes(each.gm).packed.values()]


def packs(model):
    """The packed copies, by the paths of their weights."""
    return {packing.weight: each for packing, each in conversion_of(model).packed._packed.items()}


class Ops(TorchDispatchMode):
    """Names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


def runs_packed(model, *inputs):
    """Whether a call takes packed weights."""
    with torch.profiler.profile() as profiler:
        model(*inputs)
    return any(event.name.startswith("mkldnn::_") for event in profiler.events() or ())


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_joined_form_is_as_exact_as_autocast(capture, layout):
    model = Block(views=layout is torch.contiguous_format).eval()
    exact = copy.deepcopy(model).double()(IMAGES.double())
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(IMAGES)
    model, inputs = model.to(memory_format=layout), IMAGES.to(memory_format=layout)
    model = frozen(model, inputs, capture=capture)
    with torch.no_grad():
        assert runs_packed(model, inputs)
        assert error(model(inputs), exact) < 2 * error(autocast, exact)
    forms = [("batch_norm", "relu"), ("batch_norm", "add", "relu"), ("hardswish",), ("gelu",)]
    assert all(form in joined(model) for form in forms)


@pytest.mark.parametrize("shape", [(80,), (1, 80), (0, 80), (5, 80), (2, 3, 80), (2, 0, 80), (1, 2, 3, 80)])
@pytest.mark.parametrize("large", [True, False])
def test_linears_take_any_shape(shape, large):
    model = nn.Sequential(nn.Linear(80, 90 if large else 30), nn.GELU(), nn.Linear(90 if large else 30, 3))
    x = torch.randn(shape)
    plain, model = frozen(copy.deepcopy(model), x, pack=False), frozen(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=0.01, rtol=0.01)
        assert model(x).stride() == plain(x).stride()


@pytest.mark.parametrize("shape", [(8, 5, 6), (1, 8, 5, 6), (0, 8, 5, 6), (4, 8, 3, 3)])
def test_convolutions_take_any_shape(shape):
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1, stride=2, padding="valid"))
    x = torch.randn(shape)
    plain, model = frozen(copy.deepcopy(model), x, pack=False), frozen(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), atol=0.01, rtol=0.01)
        assert model(x).stride() == plain(x).stride()


UPS = [
    dict(kernel_size=2, stride=2),
    dict(kernel_size=3, stride=(2, 3), padding=1, output_padding=(1, 2), bias=False),
    dict(kernel_size=3, padding=2, dilation=2, groups=2),
    dict(kernel_size=(3, 1), stride=2, groups=8, bias=False),
]


@pytest.mark.parametrize("options", UPS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_convolutions_are_packed(options, norm, dtype):
    up = nn.ConvTranspose2d(8, 24, **options)
    model = nn.Sequential(up, nn.BatchNorm2d(24), nn.ReLU()) if norm else nn.Sequential(up, nn.Hardswish())
    if norm:
        nn.init.uniform_(model[1].running_var, 0.5, 2)
        nn.init.uniform_(model[1].weight, 0.5, 2)
    exact = copy.deepcopy(model.eval()).double()
    policy = fxprec.Policy.preset("O1").override(modules={"0": dtype})
    plain, _ = fxprec.convert(copy.deepcopy(model), dtype=torch.bfloat16, policy=policy)
    model, _ = fxprec.convert(model, dtype=torch.bfloat16, policy=policy)
    with torch.no_grad():
        plain(IMAGES), model(IMAGES)
        fxprec.freeze(plain, pack=False), fxprec.freeze(model)
        model(IMAGES)
        for count, side in (*((3, side) for side in range(9, 15)), (1, 1), (0, 9)):  # more sizes than are packed
            x = torch.randn(count, 8, side, 10)
            assert error(model(x), exact(x.double())) <= 2 * error(plain(x), exact(x.double())) or count == 0
            assert model(x).shape == plain(x).shape and model(x).stride() == plain(x).stride()
        if not norm:  # which wants a batch
            assert error(model(x := IMAGES[0]), exact(x.double())) < 0.01 and model(x).shape == plain(x).shape
        assert runs_packed(model, IMAGES)
    assert set(packs(model)) == {"0.weight"}
    assert joined(model)[0] == (("batch_norm", "relu") if norm else ("hardswish",))


@pytest.mark.parametrize(
    ("options", "channels"),
    [
        (dict(kernel_size=2, stride=2, groups=2, dilation=2), (16, 16)),
        (dict(kernel_size=1, stride=2, padding=1, groups=4), (32, 32)),
        (dict(kernel_size=3, groups=2), (8, 24)),
    ],
)
def test_grouped_transposed_weights_serve_several_sizes(options, channels):
    """oneDNN's layouts of some do not give back what was packed."""
    layer = nn.Sequential(nn.ConvTranspose2d(*channels, **options)).eval().to(memory_format=torch.channels_last)
    exact, model = copy.deepcopy(layer).double(), frozen(layer, torch.randn(4, channels[0], 6, 6))
    with torch.no_grad():
        for count, side in ((4, 6), (3, 6), (2, 9), (1, 5), (1, 7), (4, 6)):
            x = torch.randn(count, channels[0], side, 6)
            assert error(model(x), exact(x.double())) < 0.01


@pytest.mark.parametrize(
    "options", [dict(stride=1, dilation=2, output_padding=1), dict(stride=2, dilation=3, output_padding=(1, 2))]
)
def test_an_output_padding_as_large_as_the_stride_is_torchs(options):
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, **options)).eval()
    exact, model = copy.deepcopy(model).double(), frozen(model)
    with torch.no_grad():
        assert error(model(IMAGES), exact(IMAGES.double())) < 0.01 and not runs_packed(model, IMAGES)
    assert any("output padding" in each for each in graph_notes(fxprec.graph_module(model)).declined)


def test_sizes_of_results_and_images_of_three_dimensions():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.last = nn.ConvTranspose3d(8, 6, 3, 2), nn.ConvTranspose3d(6, 2, 1)

        def forward(self, x):
            y = self.up(x, output_size=(8, 8, 6))
            return self.last(y) + y[:, :2]  # no sum is joined to a transposed one

    model, x = Decoder().eval(), torch.randn(2, 8, 3, 3, 2)
    exact = copy.deepcopy(model).double()(x.double()).detach()
    plain, model = frozen(copy.deepcopy(model), x, pack=False), frozen(model, x)
    with torch.no_grad():
        assert error(model(x), exact) <= 2 * error(plain(x), exact)
    assert set(packs(model)) == {"up.weight", "last.weight"} and set(joined(model)) == {()}


@pytest.mark.parametrize("groups", [1, 3])
def test_a_transposed_weight_beyond_a_few_sizes_is_as_it_was(groups):
    weight = torch.randn(6, 4, 3, 2).bfloat16()
    conv = PackedConv(weight, Geometry((1, 1), (0, 0), (1, 1), groups, (0, 0)))
    for side in range(5, 12):
        conv._for_input(torch.Size([1, 6, side, side]))
    assert conv._plain is not None and torch.equal(conv._plain, weight)


@pytest.mark.parametrize("who", ["image", "weights", "nobody"])
def test_results_lie_as_they_would_by_plain_ops(who):
    model, x = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(2, 8, 9, 9)
    if who == "weights":
        model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last) if who == "image" else x
    plain, model = frozen(copy.deepcopy(model), x, pack=False), frozen(model, x)
    with torch.no_grad():
        assert runs_packed(model, x) and model(x).stride() == plain(x).stride()


class Stack(nn.Module):
    """Sums of every kind: over what came in, what is read again, what is returned, and what nobody wants any more."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))

    def forward(self, x):
        first, second, third, fourth, fifth, sixth, seventh, eighth = self.convs
        x = F.relu(first(x) + x.bfloat16())  # an input
        x = F.relu(third(second(x)) + x)  # nobody reads it afterwards
        y = fifth(fourth(x)) + x  # read again
        y = sixth(y) + x  # not any more
        kept = seventh(y)
        view = kept[:, :4]  # returned
        return F.relu(eighth(y) + kept), view


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_written_over_what_nobody_reads_any_more(layout, dtype):
    model = Stack().eval()
    exact = copy.deepcopy(model).double()
    given = IMAGES.to(dtype).to(memory_format=layout)
    before = given.clone()
    plain, model = frozen(copy.deepcopy(model), given, pack=False), frozen(model, given)
    with torch.no_grad():
        # More sizes than are packed: oneDNN's kernel of a sum with relu refuses plain weights.
        for count, side in ((3, 9), *((2, side) for side in range(5, 11)), (3, 9)):
            x = torch.randn(count, 8, side, 10).to(dtype).to(memory_format=layout)
            for ours, theirs, right in zip(model(x), plain(x), exact(x.double()), strict=True):
                assert error(ours, right) <= 1.5 * error(theirs, right)
        assert torch.equal(given, before) and runs_packed(model, given)
        with torch.profiler.profile() as profiler:
            model(given)
    names = [event.name for event in profiler.events() or ()]
    assert names.count("mkldnn::_convolution_pointwise_") == 2


def test_a_sum_of_other_shapes_is_broadcast():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 1)

        def forward(self, x, y):
            return F.relu(self.conv(x) + self.conv(y))

    x, y = torch.randn(2, 8, 5, 5), torch.randn(2, 8, 5, 5)
    model = Shifted().eval()
    part = y[:1, :, :1]
    exact, other = copy.deepcopy(model)(x, part), copy.deepcopy(model)(part, x)
    model, _ = fxprec.convert(model, dtype=torch.bfloat16)
    with torch.no_grad():
        model(x, y)
        fxprec.freeze(model)
        model(x, y)
        torch.testing.assert_close(model(x, part), exact, atol=0.05, rtol=0.05)
        torch.testing.assert_close(model(part, x), other, atol=0.05, rtol=0.05)
    assert ("add", "relu") in joined(model)


@pytest.mark.parametrize("training", [False, True])
def test_a_norm_is_folded_into_the_fp32_weight(training):
    """From the low weight it would be rounded twice."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    norm = model.eval()[1]
    if training:  # there is no graph of eval mode before the model is frozen
        model, _ = fxprec.convert(model.train(), dtype=torch.bfloat16)
        model(torch.randn(2, 64, 5, 5)).sum().backward()
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    exact = (model[0].weight.double() * scale.view(-1, 1, 1, 1)).float().bfloat16()
    if training:
        fxprec.freeze(model)
        with torch.no_grad():
            model(torch.randn(1, 64, 5, 5))
    else:
        model = frozen(model, torch.randn(1, 64, 5, 5))
    folded, _ = packs(model)["0.weight"].copies
    assert torch.equal(folded._for_input(torch.Size([1, 64, 5, 5])).to_dense(), exact)
    again = copy.deepcopy(model)  # which has but the low weight, and is close
    with torch.no_grad():
        x = torch.randn(1, 64, 5, 5)
        torch.testing.assert_close(again(x), model(x), atol=0.05, rtol=0.05)


def test_the_norm_of_a_model_that_was_training_is_folded_as_well():
    model, _ = fxprec.convert(Block(), dtype=torch.bfloat16)
    model(IMAGES).sum().backward()
    fxprec.freeze(model)
    with torch.no_grad():
        model(IMAGES)
    assert ("batch_norm", "add", "relu") in joined(model)


def test_each_size_of_image_has_its_packed_weight_up_to_a_few():
    conv = PackedConv(torch.randn(16, 8, 3, 3).bfloat16(), Geometry((1, 1), (0, 0), (1, 1), 1))
    weight = conv._for_input(torch.Size([1, 8, 5, 5])).to_dense()
    bytes_of_one = conv.nbytes
    for side in range(5, 12):
        assert torch.equal(conv._for_input(torch.Size([1, 8, side, side])).to_dense(), weight)
    assert conv._for_input(torch.Size([1, 8, 11, 11])).layout is torch.strided and conv.nbytes == 5 * bytes_of_one


# -- weights that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "data", "parameter", "statistics", "refresh", "unversioned"])
def test_a_changed_weight_is_packed_anew(how):
    model = frozen()
    with torch.no_grad():
        before = model(IMAGES)
        if how == "in place":
            model.up.weight.mul_(2)
        elif how == "data":
            model.up.weight.data = 2 * model.up.weight.data
        elif how == "parameter":
            model.up.weight = nn.Parameter(2 * model.up.weight, requires_grad=False)
        elif how == "statistics":
            model.stem_norm.running_mean.add_(1)
        else:
            model.up.weight.data.mul_(2)
            if how == "refresh":
                fxprec.refresh(model)
        after = copy.deepcopy(model)
        first, second, third = model(IMAGES), model(IMAGES), model(IMAGES)
        assert not torch.equal(first, before)
        torch.testing.assert_close(first, second, atol=0.05, rtol=0.05)
        assert torch.equal(second, third) and runs_packed(model, IMAGES)
        torch.testing.assert_close(second, after(IMAGES), atol=0.05, rtol=0.05)


def test_weights_that_change_at_each_call_are_not_packed(monkeypatch):
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    weights = [torch.randn(90, 80).bfloat16() for _ in range(3)]
    packed = []
    monkeypatch.setattr(packed_weights, "pack_linear", lambda weight: packed.append(weight) or pack_linear(weight))
    with torch.no_grad():
        for weight in weights * 2:
            model[0].weight.data = weight
            assert error(model(x), F.linear(x.double(), weight.double(), model[0].bias.double())) < 0.01
        assert packed == []
        model(x)
        assert len(packed) == 1 and runs_packed(model, x)


def test_weights_that_are_overwritten_at_each_call_are_not_packed(monkeypatch):
    """By a road that counts no version."""
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    packed = []
    monkeypatch.setattr(packed_weights, "pack_linear", lambda weight: packed.append(weight) or pack_linear(weight))
    with torch.no_grad():
        for _ in range(4):
            model[0].weight.data.mul_(1.5)
            weight, bias = model[0].weight.double(), model[0].bias.double()
            assert error(model(x), F.linear(x.double(), weight, bias)) < 0.01
        assert packed == []
        model(x)
        assert len(packed) == 1 and runs_packed(model, x)


def test_one_weight_in_two_places_is_packed_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = nn.Linear(80, 80)

        def forward(self, x):
            return self.two(F.relu(self.one(x)))

    model = frozen(Tied(), x := torch.randn(2, 80))
    assert len(packs(model)) == 1
    with torch.no_grad():
        assert runs_packed(model, x)


def test_a_weight_that_stays_fp32_is_packed_from_its_shadow():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Embedding(90, 64)

        def forward(self, x):
            return F.linear(self.codes(x), self.codes.weight)

    model = frozen(Head(), x := torch.arange(5))
    assert model.codes.weight.dtype is torch.float32
    with torch.no_grad():
        assert runs_packed(model, x)
        model.codes.weight.data.mul_(0.5)
        expected = F.linear(model.codes(x), model.codes.weight)
        for _ in range(3):
            assert error(model(x), expected.double()) < 0.01
        assert runs_packed(model, x)


def test_weights_that_another_process_may_write_run_plain():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    model.share_memory()
    with torch.no_grad():
        for _ in range(3):
            model(x)
        assert not runs_packed(model, x)


def test_what_was_packed_under_inference_mode_serves_outside_of_it():
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1), nn.Flatten()).eval()
    model.append(nn.Linear(4 * 25, 90).eval())
    x, larger = torch.randn(2, 8, 5, 5), torch.randn(3, 8, 5, 5)
    model, _ = fxprec.convert(model, dtype=torch.bfloat16)
    with torch.inference_mode():
        model(x)
        fxprec.freeze(model)
        model(x)
    assert runs_packed(model, x) and model(larger).shape == (3, 90)
    with torch.no_grad():
        assert runs_packed(model, larger)


# -- copies ------------------------------------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_hold_plain_weights(copied):
    model = frozen(nn.Sequential(nn.Linear(80, 90), nn.ReLU(), nn.Linear(90, 3)), x := torch.randn(2, 80))
    again = copied(model)
    assert {name: each.shape for name, each in again.state_dict().items()} == {
        name: each.shape for name, each in model.state_dict().items()
    }
    assert all(each.layout is torch.strided and each.dtype is torch.bfloat16 for each in again.state_dict().values())
    assert not packs(again)
    with torch.no_grad():
        assert torch.equal(again(x), model(x)) and runs_packed(again, x)


def test_a_copy_is_packed_as_the_model_is():
    model = copy.deepcopy(frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80), pack=False))
    with torch.no_grad():
        assert not runs_packed(model, x)
    assert conversion_of(model).packed is None


def test_a_model_on_another_device_runs_plain():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    with torch.no_grad():
        assert model.to("meta")(x.to("meta")).device.type == "meta"


# -- who looks ---------------------------------------------------------------------------------------------------------


def test_the_gradient_of_an_input_is_there():
    model = Block().eval()
    with torch.no_grad():
        plain, model = frozen(copy.deepcopy(model), pack=False), frozen(model)
    gradients = []
    for each in (plain, model):
        x = IMAGES.clone().requires_grad_()
        each(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
    with torch.no_grad():
        assert runs_packed(model, x)


def test_a_weight_that_asks_for_gradients_gets_them():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    model[0].weight.requires_grad_()
    model.eval()(x).sum().backward()
    assert model[0].weight.grad is not None


def test_a_dispatch_mode_sees_plain_ops():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    with torch.no_grad(), Ops() as ops:
        model(x)
    assert not any("mkldnn" in name for name in ops.names) and any("addmm" in name for name in ops.names)


def test_transforms_get_plain_ops():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 3, 80))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model)(x), model(x), atol=0.01, rtol=0.01)
        tangent = torch.func.jvp(model, (x,), (x,))[1]
        assert tangent.abs().sum() > 0


def test_a_jit_trace_has_plain_ops():
    model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (x,))
        assert "mkldnn::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(x), model(x), atol=0.01, rtol=0.01)


def test_the_graph_of_a_frozen_model_has_plain_ops():
    model = frozen()
    gm = fxprec.graph_module(model)
    assert "mkldnn" not in gm.code
    with torch.no_grad():
        torch.testing.assert_close(gm(IMAGES), model(IMAGES), atol=0.05, rtol=0.05)


def test_weights_made_under_inference_mode_run_plain():
    with torch.inference_mode():
        model = frozen(nn.Sequential(nn.Linear(80, 90)), x := torch.randn(2, 80))
        assert model(x).shape == (2, 90)


# -- captures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pieces_between_graph_breaks_run_packed():
    model = frozen(Breaks(), x := torch.randn(2, 80))
    assert joined(model).count(("gelu",)) >= 1 and {*packs(model)} == {"first.weight", "second.weight"}
    with torch.no_grad():
        assert runs_packed(model, x)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_low_parameters_at_o3_are_packed_in_the_graphs_that_there_are(capture):
    torch._dynamo.reset()  # its captures of nn.Sequential's forward are counted through all tests
    model, _ = fxprec.convert(
        nn.Sequential(nn.Linear(80, 90)).eval(), level="O3", dtype=torch.bfloat16, capture=capture
    )
    x = torch.randn(2, 80)
    with torch.no_grad():
        model(x)
        captures = conversion_of(model).captures
        fxprec.freeze(model)
        assert runs_packed(model, x)
        if capture == "auto":  # dynamo's guards notice that weights want no gradients any more
            assert conversion_of(model).captures == captures


def test_off_by_an_argument():
    model = frozen(pack=False)
    with torch.no_grad():
        assert not runs_packed(model, IMAGES)
    assert "packed" not in str(fxprec.report(model))


def test_without_onednn_as_without_packing(monkeypatch):
    monkeypatch.setattr("fxprec.passes.pack.can_pack", lambda dtype: False)
    model = frozen()
    with torch.no_grad():
        assert not runs_packed(model, IMAGES)
    assert joined(model) == []


def test_the_report_says_what_is_packed():
    model = frozen()
    text = " ".join(str(fxprec.report(model)).split())
    assert (
        "5 products on weights that oneDNN packed once, with 2 batch_norms, 2 relus, 1 add, 1 hardswish, 1 gelu" in text
    )
    assert "beside the weights" in text
    told = fxprec.explain(model, "up")
    assert "served by oneDNN, on a weight packed once, with gelu" in told
    assert "packed_linear" not in fxprec.graph_module(model).code


class Force(nn.Module):
    """Makes a leaf of its own, for whose gradient its caller asks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(80, 90), nn.Linear(90, 70)

    def forward(self, x):
        leaf = x.detach().requires_grad_()
        return self.second(torch.tanh(self.first(leaf))).square().sum(), leaf


def test_a_graph_that_makes_leaves_is_not_packed_and_gives_their_gradients():
    x, own = torch.randn(8, 80), Force()
    energy, leaf = own(x)
    (right,) = torch.autograd.grad(energy, leaf)
    model = frozen(own, x)
    assert any("gradients of it may be asked for" in each for each in graph_notes(fxprec.graph_module(model)).declined)
    for _ in range(3):
        energy, leaf = model(x)
        torch.testing.assert_close(torch.autograd.grad(energy, leaf)[0], right, rtol=0.05, atol=0.05)
