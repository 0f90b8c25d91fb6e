"""Statements that hold for every model: modes, copies, checkpoints, steps, conversions."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIRST", "GENERIC", "Generic"]

#: The model is converted; the twins stay as they are.
FIRST = "m = convert(m)"


@dataclass(frozen=True)
class Generic:
    text: str
    weight: float = 1.0
    fault: str | None = None


GENERIC = (
    Generic("m.train()", 2),
    Generic("m.eval()", 3),
    Generic("m = copy.deepcopy(m)", 2),
    Generic("old, m = m, copy.deepcopy(m)", 2),
    Generic("old, m = m, old", 2),
    Generic("m = reloaded(m)"),
    Generic("revert(m)"),
    Generic("revert(m); convert(m)"),
    Generic("with original(m): run(m, x(2, $i), $rest)"),
    Generic("inspect(m)", 2),
    Generic("m.load_state_dict(scaled(m.state_dict(), 0.5))", 2),
    Generic("saved = copy.deepcopy(m.state_dict())"),
    Generic("m.load_state_dict(saved)"),
    Generic("step(m)", 2),
    Generic("m.zero_grad()"),
    Generic("m.zero_grad(set_to_none=False)", 0.5),
    Generic("m.requires_grad_(False)"),
    Generic("m.requires_grad_(True)"),
    Generic("m.apply(scale_weights)"),
    Generic("run(functional(m, 2.0), x(2, $i), $rest)"),
    Generic("hooks.append(m.register_forward_hook(lambda module, args, out: None))"),
    Generic("hooks.append(m.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])))"),
    Generic("hooks.append(m.register_forward_hook(counting_hook()))"),
    Generic("if hooks: hooks.pop().remove()", 2),
    Generic("m.to(torch.float32)", 0.5),
    Generic("m.to(torch.bfloat16); m.to(torch.float32)", 0.5),
    Generic("y = run(m, x(2, $i), $rest); m.zero_grad(); backward(y)"),
    Generic("y = run(m, x(2, $i), $rest); step(m); backward(y)"),
    Generic("with torch.no_grad(): double(run(m, x(2, $i), $rest))", 2),
    Generic("m.double(); run(m, x(2, $i).double(), $rest); m.float()", 1),
    Generic("m.double()", 0.2),
    Generic("m.float()", 0.2),
    Generic("with every_module_hooked(): run(m, x(2, $i), $rest)", 1, "A7"),
    Generic("m.forward = lambda *a, m=m, **k: tripled(Root.forward(m, *a, **k))", 1),
    Generic("vars(m).pop('forward', None)", 1),
    Generic("y = run(m, x(2, $i), $rest); z = run(m, x(3, $i), $rest)", 0.2),
)
