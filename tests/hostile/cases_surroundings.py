"""What surrounds a forward: environment, clocks, random sources, patched functions, default dtype, iterators."""

from __future__ import annotations

import contextvars
import math
import os
import random
import threading
import time
import types

import numpy
import torch
import torch.nn.functional as F

from tests.hostile.harness import Cases, Run
from tests.hostile.models import again, net

CASES = case = Cases("surroundings")

LOCAL = threading.local()
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)


@case
def environment(t: Run):
    t.patch(os.environ, "FXPREC_HOSTILE", "2.0")
    t.changes(
        net(lambda s, x: s.l(x) / float(os.environ["FXPREC_HOSTILE"])),
        lambda m: t.patch(os.environ, "FXPREC_HOSTILE", "0.1"),
    )


@case
def environment_missing(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) * (3 if os.getenv("FXPREC_HOSTILE_NONE") else 2)),
        lambda m: t.patch(os.environ, "FXPREC_HOSTILE_NONE", "1"),
    )


@case
def own_random(t: Run):
    source = random.Random(1)
    t.changes(net(lambda s, x: s.l(x) * source.random()), again, again)
    t.watch("source", source)


@case
def own_random_decides(t: Run):
    source = random.Random(1)

    def forward(s, x):
        return s.l(x) if source.random() < 0.5 else -2 * s.l(x)

    t.changes(net(forward), *[again] * 5)
    t.watch("source", source)


@case
def python_random(t: Run):
    t.changes(net(lambda s, x: s.l(x) * random.uniform(1, 2)), again, lambda m: random.seed(7))


@case
def python_random_decides(t: Run):
    t.changes(net(lambda s, x: s.l(x) if random.random() < 0.5 else x - s.l(x)), *[again] * 5)


@case
def numpy_random(t: Run):
    t.changes(net(lambda s, x: s.l(x) * float(numpy.random.rand())), again, again)


@case
def numpy_generator(t: Run):
    source = numpy.random.default_rng(1)
    t.changes(net(lambda s, x: s.l(x) * float(source.random())), again, again)
    t.watch("source", source)


@case
def numpy_generator_decides(t: Run):
    source = numpy.random.default_rng(1)
    t.changes(net(lambda s, x: s.l(x) if source.integers(2) else -2 * s.l(x)), *[again] * 5)
    t.watch("source", source)


@case(no_twin="float64 draws other numbers")
def torch_generator(t: Run):
    source = torch.Generator().manual_seed(1)
    t.changes(net(lambda s, x: s.l(x) * torch.rand(8, generator=source)), again, lambda m: source.manual_seed(1))
    t.watch("source", source)


@case(no_twin="what it makes has the default dtype")
def default_dtype(t: Run):
    t.defer(lambda: torch.set_default_dtype(torch.float32))
    t.changes(net(lambda s, x: s.l(x) + torch.ones(8)), lambda m: torch.set_default_dtype(torch.float64))


@case(no_twin="what it makes has the default dtype")
def default_dtype_asked(t: Run):
    t.defer(lambda: torch.set_default_dtype(torch.float32))
    t.changes(
        net(lambda s, x: s.l(x) * (1 if torch.get_default_dtype() is torch.float32 else 3)),
        lambda m: torch.set_default_dtype(torch.float64),
    )


@case
def patched_function_of_math(t: Run):
    t.changes(net(lambda s, x: s.l(x) * math.sqrt(4.0)), lambda m: t.patch(math, "sqrt", lambda x: 5.0))


@case
def patched_function_of_torch(t: Run):
    plain = F.relu
    t.changes(net(lambda s, x: F.relu(s.l(x))), lambda m: t.patch(F, "relu", lambda x: plain(x) + 1))


@case
def patched_method_of_a_child(t: Run):
    plain = torch.nn.Linear.forward
    t.changes(net(lambda s, x: s.l(x)), lambda m: t.patch(torch.nn.Linear, "forward", lambda s, x: plain(s, x) * 3))


@case
def patched_clock(t: Run):
    t.patch(time, "time", lambda: 2.0)
    t.changes(net(lambda s, x: s.l(x) * time.time()), lambda m: t.patch(time, "time", lambda: 0.5))


@case
def context_variable(t: Run):
    t.defer(lambda: CONTEXT.set(2.0))
    t.changes(net(lambda s, x: s.l(x) / CONTEXT.get()), lambda m: CONTEXT.set(0.1))


@case
def thread_local(t: Run):
    t.patch(LOCAL.__dict__, "k", 2.0)
    t.changes(net(lambda s, x: s.l(x) / LOCAL.k), lambda m: t.patch(LOCAL.__dict__, "k", 0.1))


@case
def kept_iterator(t: Run):
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    t.changes(net(lambda s, x: s.l(x) * next(numbers)), again, again)
    t.see("left", list(numbers))


@case
def kept_generator(t: Run):
    numbers = (float(n) for n in range(1, 9))
    t.changes(net(lambda s, x: s.l(x) * next(numbers)), again, again)
    t.see("left", list(numbers))


@case
def builtin_shadowed(t: Run):
    def change(m):
        globals()["max"] = min
        t.defer(lambda: globals().pop("max"))

    t.changes(net(lambda s, x: s.l(x) * max(2.0, 5.0)), change)


@case
def warn_only_of_determinism(t: Run):
    def on(m):
        t.defer(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True, warn_only=True)

    t.changes(net(lambda s, x: s.l(x) * (2 if torch.is_deterministic_algorithms_warn_only_enabled() else 1)), on)


@case
def anomaly_mode(t: Run):
    def on(m):
        t.defer(lambda: torch.autograd.set_detect_anomaly(False))
        torch.autograd.set_detect_anomaly(True)

    t.changes(net(lambda s, x: s.l(x) * (2 if torch.is_anomaly_enabled() else 1)), on)


@case
def flag_of_a_backend(t: Run):
    def off(m):
        flags = torch.backends.mkldnn.flags(enabled=False)
        t.defer(lambda: flags.__exit__(None, None, None))
        flags.__enter__()

    t.changes(net(lambda s, x: s.l(x) * (2 if torch.backends.mkldnn.enabled else 1)), off)


@case
def flag_of_an_object_of_torchs(t: Run):
    flags = torch.backends.cuda.matmul

    def on(m):
        t.defer(lambda: setattr(flags, "allow_tf32", False))
        flags.allow_tf32 = True

    t.changes(net(lambda s, x: s.l(x) * (2 if torch.backends.cuda.matmul.allow_tf32 else 1)), on)


@case
def flag_that_a_function_tells(t: Run):
    def off(m):
        t.defer(lambda: torch.backends.cuda.enable_flash_sdp(True))
        torch.backends.cuda.enable_flash_sdp(False)

    t.changes(net(lambda s, x: s.l(x) * (2 if torch.backends.cuda.flash_sdp_enabled() else 1)), off)


@case
def numbers_of_a_tensor(t: Run):
    numbers = torch.ones(1)
    t.changes(net(lambda s, x: s.l(x) * numbers.tolist()[0]), lambda m: numbers.fill_(3.0))


@case
def numbers_of_a_tensor_as_an_array(t: Run):
    numbers = torch.ones(1)
    t.changes(net(lambda s, x: s.l(x) * float(numbers.numpy()[0])), lambda m: numbers.fill_(3.0))


@case
def size_of_a_tensor(t: Run):
    sized = torch.ones(1)
    t.changes(net(lambda s, x: s.l(x) * sized.numel()), lambda m: sized.resize_(3))


@case
def size_of_an_attribute(t: Run):
    model = net(lambda s, x: s.l(x) * s.sized.numel(), sized=torch.ones(1))
    t.changes(model, lambda m: setattr(m.sized, "data", t.wide(torch.ones(3))))


@case
def attribute_that_a_parameter_lacks(t: Run):
    model = net(lambda s, x: s.l(x) * getattr(s.l.weight, "tag", 1.0))
    t.changes(model, lambda m: setattr(m.l.weight, "tag", 3.0), lambda m: delattr(m.l.weight, "tag"))


@case
def attribute_that_an_object_lacks(t: Run):
    settings = types.SimpleNamespace()

    def forward(s, x):
        try:
            return s.l(x) * settings.factor
        except AttributeError:
            return s.l(x)

    t.changes(net(forward), lambda m: setattr(settings, "factor", 3.0))
