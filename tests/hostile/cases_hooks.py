"""Hooks of modules, tensors, parameters, state dicts; of one module, or of all."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as modules

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again, net

CASES = case = Cases("hooks")


@case
def pre_hook_of_the_model(t: Run):
    t.comes_and_goes(Two(), lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 3,)))


@case
def pre_hook_of_a_child(t: Run):
    t.comes_and_goes(Two(), lambda m: m.r.register_forward_pre_hook(lambda m, args: args[0] * 3))


@case
def pre_hook_with_keywords(t: Run):
    m = net(lambda s, x: s.child(s.l(x), scale=2.0))
    m.child = net(lambda s, x, scale=1.0: s.l(x) * scale)

    def hook(m, args, kwargs):
        return args, {"scale": kwargs["scale"] * 3}

    t.comes_and_goes(m, lambda m: m.child.register_forward_pre_hook(hook, with_kwargs=True))


@case
def hook_of_the_model(t: Run):
    t.comes_and_goes(Two(), lambda m: m.register_forward_hook(lambda m, args, out: out * 3))


@case
def hook_of_a_child(t: Run):
    t.comes_and_goes(Two(), lambda m: m.l.register_forward_hook(lambda m, args, out: out * 3))


@case
def hook_with_keywords_and_always(t: Run):
    def hook(m, args, kwargs, out):
        return out + len(kwargs) + len(args)

    t.comes_and_goes(Two(), lambda m: m.l.register_forward_hook(hook, with_kwargs=True, always_call=True))


@case
def hook_that_collects(t: Run):
    kept = []
    t.comes_and_goes(Two(), lambda m: m.l.register_forward_hook(lambda m, args, out: kept.append(out.detach())))
    t.see("count", len(kept))


@case
def hook_that_collects_before_conversion(t: Run):
    kept, m = {}, Two()
    handle = m.l.register_forward_hook(lambda m, args, out: kept.update(h=out.detach(), x=args[0]))
    t.changes(m, again)
    t.see("kept", list(kept))
    handle.remove()
    kept.clear()
    with torch.no_grad():
        t(m, t.randn(4, 8))
    t.see("kept", list(kept))


@case
def hook_that_looks_at_values(t: Run):
    seen = []

    def hook(m, args, out):
        seen.append(bool(torch.isfinite(out).all()))
        return out * 2 if out.detach().sum() > -1e9 else out

    t.comes_and_goes(Two(), lambda m: m.l.register_forward_hook(hook))
    t.see("seen", seen)


@case
def hook_that_looks_at_a_switch(t: Run):
    switch = {"on": True}
    m = Two()
    m.l.register_forward_hook(lambda m, args, out: out * 3 if switch["on"] else None)
    t.changes(m, lambda m: switch.update(on=False))


@case
def hook_that_counts(t: Run):
    calls = [0]

    def hook(m, args, out):
        calls[0] += 1
        return out * calls[0]

    m = Two()
    m.l.register_forward_hook(hook)
    t.changes(m, again, again)
    t.see("calls", calls)


@case
def hooks_in_order(t: Run):
    m = Two()
    m.l.register_forward_hook(lambda m, args, out: out + 1)
    m.l.register_forward_hook(lambda m, args, out: out * 3, prepend=True)
    t.changes(m, lambda m: m.l.register_forward_hook(lambda m, args, out: out * out))


@case
def hook_of_a_shared_child(t: Run):
    m = net(lambda s, x: s.l(s.l(x)))
    t.comes_and_goes(m, lambda m: m.l.register_forward_hook(lambda m, args, out: out + 1))


@case
def global_hook(t: Run):
    def hook(m, args, out):
        return out * 3 if isinstance(m, nn.Linear) else None

    handles = []

    def register(m):
        handles.append(modules.register_module_forward_hook(hook))
        t.defer(handles[0].remove)

    t.changes(Two(), register, again, lambda m: handles[0].remove())


@case
def global_hook_that_records(t: Run):
    kinds = []

    def register(m):
        handle = modules.register_module_forward_hook(lambda m, args, out: kinds.append(type(m).__name__))
        t.defer(handle.remove)

    t.changes(Two(), register)
    t.see("kinds", kinds)


@case
def global_pre_hook(t: Run):
    def register(m):
        handle = modules.register_module_forward_pre_hook(
            lambda m, args: (args[0] * 2,) if isinstance(m, nn.Linear) else None
        )
        t.defer(handle.remove)

    t.changes(Two(), register)


@case
def global_hook_before_conversion(t: Run):
    handle = modules.register_module_forward_hook(lambda m, a, out: out * 3 if isinstance(m, nn.Linear) else None)
    t.defer(handle.remove)
    t.changes(Two(), lambda m: handle.remove())


@case
def state_dict_hooks(t: Run):
    def add(m, state, prefix, local):
        state[prefix + "extra"] = torch.ones(1)

    def drop(m, state, prefix, *rest):
        state.pop(prefix + "extra", None)

    m = Two()
    m.register_state_dict_post_hook(add)
    m.register_load_state_dict_pre_hook(drop)
    seen = []
    m.register_load_state_dict_post_hook(lambda m, keys: seen.append(len(keys.missing_keys)))
    t.changes(m, lambda m: m.load_state_dict(m.state_dict()))
    t.see("seen", (seen, list(m.state_dict())))


@case
def hook_that_raises_once(t: Run):
    def hook(m, args, out):
        handle.remove()
        raise KeyError("once")

    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    handle = m.l.register_forward_hook(hook)
    t.raises(KeyError, m, x)
    t.backward(t(m, x))


@case
def hook_that_stops_early(t: Run):
    """Features of an inner layer by an exception, as extractors do it."""

    class Stop(Exception):
        pass

    kept = []

    def hook(m, args, out):
        kept.append(out)
        raise Stop

    m, x = t.convert(Two()), t.randn(4, 8)
    handle = m.l.register_forward_hook(hook)
    for _ in range(2):
        t.raises(Stop, m, x)
    handle.remove()
    t.see("kept", len(kept))
    t.backward(t(m, x))


@case
def hook_that_removes_itself(t: Run):
    m = Two()

    def hook(m, args, out):
        handle.remove()
        return out * 3

    handle = m.l.register_forward_hook(hook)
    t.changes(m, again)


@case
def hooks_that_gather_a_profile(t: Run):
    times = []
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for name, child in m.named_children():
        child.register_forward_pre_hook(lambda m, a, n=name: times.append(("in", n)))
        child.register_forward_hook(lambda m, a, o, n=name: times.append(("out", n)))
    t.changes(m, again)
    t.see("times", times)
