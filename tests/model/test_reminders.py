"""What runs in FP32 though the model was converted says so once, and nothing is left of what looks for it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxprec
from fxprec.torch_internals import CALLED_THROUGH

LOW = torch.bfloat16
X = torch.randn(4, 8)


class Own(nn.Module):
    """A layer of one's own: that its weight is lowered, only a graph shows."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.w


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up, self.own = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), Own()

    def encode(self, x):
        return self._encode(x)

    def _encode(self, x):
        return self.norm(self.down(x))

    def decode(self, z):
        return self.own(self.up(z))

    def fit(self, x):
        return self.training_step(x)

    def training_step(self, x):
        return F.mse_loss(self.up(x), x)

    def forward(self, x):
        return self.decode(self.encode(x))


class Pipe(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae, self.head = Coder(), nn.Linear(8, 8)

    def latents(self, x):
        return self.vae.encode(x)

    def forward(self, x):
        return self.head(self.vae(x))


def converted(kind=Coder, **settings):
    torch.manual_seed(0)
    return fxprec.convert(kind() if isinstance(kind, type) else kind, dtype=LOW, **settings).module


def said(*calls):
    """The warnings of these calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if issubclass(w.category, fxprec.NotLoweredWarning)]


def left(model):
    return [path for path, module in model.named_modules() if CALLED_THROUGH in vars(module)]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("run", "what", "methods"),
    [
        (lambda m: m.latents(X), "Pipe.vae.encode runs 'vae.down'", "vae.encode"),
        (lambda m: m.vae.encode(X), "Pipe.vae.encode runs 'vae.down'", "vae.encode"),
        (lambda m: m.vae._encode(X), "Pipe.vae._encode runs 'vae.down'", "vae._encode"),
        (lambda m: m.vae.fit(X), "Pipe.vae.training_step runs 'vae.up'", "vae.training_step"),
        (lambda m: m.vae.decode(X), "Pipe.vae.decode runs 'vae.up'", "vae.decode"),
        (lambda m: m.vae(X), "the submodule 'vae' of Pipe was called by itself", "vae"),
        (lambda m: m.vae.forward(X), "the submodule 'vae' of Pipe was called by itself", "vae"),
        (lambda m: m.head(X), "the submodule 'head' of Pipe was called by itself", "head"),
        (lambda m: (lambda each: each(X))(m.head), "the submodule 'head' of Pipe was called by itself", "head"),
    ],
)
def test_the_first_run_names_the_method_and_the_argument(run, what, methods, before, capture):
    torch._dynamo.reset()
    m = converted(Pipe, capture=capture)
    if before:
        m(X)
    (text,) = said(lambda: run(m), lambda: run(m), lambda: m.latents(X))
    assert text.startswith(what) and f"fxprec.convert(model, methods=({methods!r},)" in text
    fxprec.revert(m)
    assert not said(lambda: run(m))
    m = converted(m, capture=capture, methods=(methods,))
    assert not said(lambda: run(m), lambda: run(m))


def test_it_points_at_the_users_line():
    m = converted()
    with pytest.warns(fxprec.NotLoweredWarning, match="Coder.encode") as caught:
        m.encode(X)
    assert caught[0].filename == __file__ and "self.down(x)" in open(__file__).read().splitlines()[caught[0].lineno - 1]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_layer_of_ones_own_is_known_from_the_graph(capture):
    torch._dynamo.reset()
    m = converted(capture=capture)
    m(X)
    assert left(m) == ["down", "up", "own"]  # the norm is not lowered
    (text,) = said(lambda: m.own(X))
    assert "'own'" in text
    assert not said(lambda: converted(capture=capture).norm(X))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_graphs_are_as_ever(capture):
    """They decline nothing, break nowhere and are not captured again, before and after the warning, with hooks too."""
    for hooks in (False, True):
        torch._dynamo.reset()
        m = Coder()
        for layer in (m.down, m.own) if hooks else ():
            layer.register_forward_hook(lambda *_: None)
        plain = copy.deepcopy(m)
        m = converted(m, capture=capture)
        expected = m(X)
        for _ in range(3):
            m(X)
            m.eval()(X)
            m.train()(X)
        before = fxprec.report(m).headline
        assert said(lambda m=m: m.encode(X))
        assert torch.equal(m(X), expected) and torch.equal(m.eval()(X), expected)
        after = fxprec.report(m.train()).headline
        assert (after.captures, after.breaks) == (before.captures, before.breaks) and not after.breaks and not after.net
        assert not after.not_static or hooks
        assert torch.equal(fxprec.revert(m)(X), plain(X))


@pytest.mark.parametrize("settings", [{"level": "O0"}, {"level": "O3"}])
def test_nothing_to_say_where_nothing_is_lowered_or_all_is_low(settings):
    m = converted(**settings)
    assert left(m) == [] and not said(lambda: m.down(X.to(m.down.weight.dtype)))


def test_nothing_to_say_of_what_a_policy_keeps():
    for capture in ("auto", "dynamo"):
        keep = fxprec.Policy.preset("O1").override(modules={"down": torch.float32})
        m = converted(policy=keep, capture=capture)
        assert not said(lambda m=m: m.down(X)) and said(lambda m=m: m.up(X))
        keep = fxprec.Policy.preset("O1").override(ops={"linear": torch.float32})
        m = converted(policy=keep, capture=capture)
        assert not said(lambda m=m: m.down(X), lambda m=m: m(X), lambda m=m: m.up(X))


def test_nothing_to_say_under_autocast_in_original_in_low_and_frozen():
    m = converted()

    def under_autocast():
        with torch.autocast("cpu", LOW):
            m.encode(X)

    def in_original():
        with fxprec.original(m):
            m.encode(X), m(X)

    assert not said(under_autocast, in_original)
    m.to(LOW)
    assert not said(lambda: m.down(X.to(LOW)))
    m.float()
    assert said(lambda: m.down(X))
    m = converted()
    fxprec.freeze(m)
    assert left(m) == []


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_nothing_to_say_where_the_net_serves():
    class Broken(Coder):
        def forward(self, x):
            h = self.encode(x)
            return self.decode(h if h.sum() > 1e9 else h + h.sum().item())

    torch._dynamo.reset()
    m = converted(Broken)
    assert not said(lambda: m(X), lambda: m(X))
    assert fxprec.report(m).headline.breaks
    with Watching():
        assert not said(lambda: m(X))
    steps = converted(type("Steps", (Coder,), {"forward": lambda self, x: iter([self.down(x), self.up(x)])}))
    assert not said(lambda: [*steps(X)])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "own copy"])
def test_copies_have_no_trace_and_run_themselves(how):
    class Copied(Own):
        def __deepcopy__(self, memo):
            new = object.__new__(type(self))
            new.__dict__.update(self.__dict__)
            new._parameters = {"w": nn.Parameter(self.w.detach() * 2)}
            return new

    m = Coder()
    if how == "own copy":
        m.own = Copied()
    m = converted(m)
    keys, modules = [*m.state_dict()], [path for path, _ in m.named_modules()]
    assert left(m) == ["down", "up", "own"]
    if how == "own copy":
        part = copy.deepcopy(m.own)
        assert torch.equal(part(X), X @ (m.own.w * 2))
        return
    for part in (m, m.down):
        if how == "deepcopy":
            other = copy.deepcopy(part)
        elif how == "pickle":
            assert b"fxprec.model.reminders" not in pickle.dumps(part)
            other = pickle.loads(pickle.dumps(part))
        else:
            torch.save(part, file := io.BytesIO())
            other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert left(other) == []
    assert [*m.state_dict()] == keys and [path for path, _ in m.named_modules()] == modules
    assert not said(lambda: other(X)), "a copied part is a model by itself"
    assert said(lambda: m.down(X))


def test_a_replica_runs_itself():
    m = converted()
    replica = m.down._replicate_for_data_parallel()
    replica.weight, replica.bias = m.down.weight * 3, m.down.bias * 0
    assert not said(lambda: torch.testing.assert_close(replica(X), X @ (m.down.weight * 3).T))


def test_revert_and_convert_again():
    m = converted()
    for _ in range(3):
        assert len(said(lambda: m.encode(X), lambda: m.encode(X))) == 1
        fxprec.revert(m)
        assert left(m) == [] and not said(lambda: m.encode(X), lambda: m(X))
        converted(m)


class Wrapper(nn.Module):
    """Around a model that it gives back, as adapters do when they are merged."""

    def __init__(self):
        super().__init__()
        self.base = Coder()

    def forward(self, x):
        return self.base(x)

    def merge_and_unload(self):
        return self.base


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_what_is_left_of_a_model_that_is_gone_says_so_until_it_is_converted(capture):
    torch._dynamo.reset()
    m = converted(Wrapper, capture=capture)
    m(X)
    base = m.merge_and_unload()
    del m
    gc.collect()
    copied = copy.deepcopy(base)
    (text,) = said(lambda: base(X), lambda: base(X))
    assert "of a converted Wrapper" in text and "fxprec.convert(model)" in text
    assert not said(lambda: copied(X))
    base = converted(base, capture=capture)
    assert not said(lambda: base(X))
    (text,) = said(lambda: base.encode(X))
    assert text.startswith("Coder.encode")


def test_what_is_left_of_a_model_that_is_gone_is_quiet_where_it_is_not_full():
    m = converted()
    left_over, last = m.down, m.up
    del m
    gc.collect()
    with torch.autocast("cpu", dtype=LOW):
        assert not said(lambda: left_over(X))
    assert not said(lambda: left_over.to(LOW)(X.to(LOW)))
    assert not said(lambda: converted(nn.Sequential(last, nn.ReLU()), level="O0")(X))
    assert not said(lambda: last(X))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_refused_conversion_leaves_no_trace(capture):
    m = Coder()
    policy = fxprec.Policy.preset("O1").override(modules={"nowhere": torch.float32})
    with pytest.raises(fxprec.PolicyError):
        converted(m, policy=policy, capture=capture)(X)
    assert left(m) == []


def test_of_many_threads_one_warns():
    for _ in range(20):
        m = converted()
        barrier = threading.Barrier(8)
        failed = []

        def run(m=m, barrier=barrier, failed=failed):
            barrier.wait()
            try:
                m.encode(X)
                m(X)
            except BaseException as error:
                failed.append(error)

        def all_of_them(run=run):
            threads = [threading.Thread(target=run) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert len(said(all_of_them)) == 1 and not failed


def test_as_an_error_it_comes_once_and_errors_of_the_module_pass_through():
    m = converted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fxprec.NotLoweredWarning):
            m.encode(X)
        m.encode(X)
    m = converted()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), pytest.warns(fxprec.NotLoweredWarning):
        m.down(torch.ones(2, 3))


def test_functional_calls():
    m = converted()
    assert not said(lambda: torch.func.functional_call(m, dict(m.named_parameters()), (X,)))
    weights = {"weight": torch.eye(8), "bias": torch.zeros(8)}
    (text,) = said(lambda: torch.testing.assert_close(torch.func.functional_call(m.down, weights, (X,)), X))
    assert text.startswith("the submodule 'down' of Coder was called by itself")


def test_conversions_within_others():
    inner = converted()
    outer = nn.Sequential(inner, nn.Linear(8, 8))
    assert not said(lambda: outer(X))
    (text,) = said(lambda: outer[0].encode(X))
    assert text.startswith("Coder.encode")
    assert not said(lambda: outer[1](X)), "which nobody converted"


def test_conversions_around_others():
    """Of the part that runs by itself the outer one reminds, the inner one after ``revert`` of the outer."""
    outer = converted(Pipe, methods=("head",))
    assert not said(lambda: outer.head(X)) and len(said(lambda: outer.vae.encode(X), lambda: outer.vae.down(X))) == 1
    fxprec.revert(outer)
    converted(outer.vae)
    (text,) = said(lambda: outer.latents(X))
    assert text.startswith("Coder.encode runs 'down'")


def test_a_forward_from_before():
    m = Coder()
    kept, encode = m.forward, m.encode
    converted(m, methods=("encode",))
    (text,) = said(lambda: kept(X), lambda: kept(X))
    assert text.startswith("Coder runs in FP32, not through its graphs: it was taken from the model before convert")
    fxprec.revert(m)
    converted(m, methods=("encode",))
    (text,) = said(lambda: encode(X))
    assert text.startswith("Coder.encode runs in FP32, not through its graphs")


def test_a_call_of_ones_own():
    class Called(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) + 1

    m = Coder()
    m.down = Called(8, 8)
    m = converted(m, capture="dynamo")
    assert len(said(lambda: m.encode(X), lambda: m.encode(X))) == 1


def test_other_tracers_pass_it_by():
    m = converted()
    traced = torch.fx.symbolic_trace(m.down)
    exported = torch.export.export(m.down, (X,)).module()
    compiled = torch.compile(m.down, backend="eager", fullgraph=True)
    plain = copy.deepcopy(m.down)
    for other in (traced, exported, compiled):
        assert not said(lambda other=other: torch.testing.assert_close(other(X), plain(X)))
    m.down.compile(backend="eager")
    assert not said(lambda: m.down(X))
    fxprec.revert(m)
    assert left(m) == ["down"], "what the user compiled stays"


def test_a_captured_graph_costs_nothing_more():
    """No module is called: what they are called through is not even looked at."""
    m = converted(nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)]))
    m(X)

    def calls():
        """Functions that run in a call of the model, after one at which guards may look at other attributes anew."""
        m(X)
        seen = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_qualname) if "call" in event else None)
        try:
            m(X)
        finally:
            sys.setprofile(before)
        return seen

    with_reminders = calls()
    assert all(vars(module).pop(CALLED_THROUGH) is not None for module in m.children())
    assert with_reminders == calls() and "Reminder.__call__" not in with_reminders
