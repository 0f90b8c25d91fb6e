"""What a scaler refuses in the middle of a run, and what it says when the scale collapses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from fxprec.errors import NoGradientsError
from fxprec.scaling.gradients import few, parameters_of


def refuse_shared(
    optimizer: Optimizer,
    owners: dict[int, weakref.ref[Optimizer]],
    names_of: Callable[[Optimizer], dict[int, str]],
) -> None:
    """Raise a RuntimeError if another optimizer unscaled one of the gradients already.

    Args:
        optimizer: the one that is about to.
        owners: id of a parameter -> the optimizer that unscaled it, since the last ``scale``. (After another one there
            may be new gradients, as where two optimizers of a shared encoder take turns.)
        names_of: names of an optimizer's parameters.
    """
    for parameter in parameters_of(optimizer) if owners else ():
        other = owners[id(parameter)]() if id(parameter) in owners else None
        if other is None or other is optimizer or parameter.grad is None:
            continue
        if any(parameter is owned for owned in parameters_of(other)):  # and not a new one with an old id
            raise RuntimeError(
                f"{names_of(optimizer)[id(parameter)]} belongs to two optimizers, {type(other).__name__} and "
                f"{type(optimizer).__name__}: its gradient would be unscaled twice. Give each parameter to one"
            )


def claim(optimizer: Optimizer, owners: dict[int, weakref.ref[Optimizer]]) -> None:
    """Note that the optimizer's gradients are unscaled."""
    reference = weakref.ref(optimizer)
    for group in optimizer.param_groups:
        owners.update(dict.fromkeys(map(id, group["params"]), reference))


def no_gradients(optimizer: Optimizer, model: nn.Module | None) -> NoGradientsError:
    """The error for a step without any gradient: names the optimizer and the likely causes; ``model``: converted."""
    count = sum(1 for _ in parameters_of(optimizer))
    known = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if known and not any(id(parameter) in known for parameter in parameters_of(optimizer)):
        return NoGradientsError(
            f"No inf checks were recorded for this optimizer: none of the {count} parameters of "
            f"{type(optimizer).__name__} has a gradient, and none of them is one of {type(model).__name__}'s: was it "
            "made for another model or a copy, or before model.to() or fully_shard(), which may replace parameters?"
        )
    return NoGradientsError(
        f"No inf checks were recorded for this optimizer: none of the {count} parameters of "
        f"{type(optimizer).__name__} has a gradient. Was backward() called; are they frozen (requires_grad=False); "
        "does the loss depend on them; were they replaced after the optimizer was made (model.to, fully_shard); "
        "was zero_grad() called between backward() and step()? If it is to be passed over where it has none: "
        "LossScaler(skip_without_gradients=True)"
    )


def floor_message(scales: Iterable[float], skipped: int, names: list[str], known: Iterable[str] = ()) -> str:
    """Say what to look at when gradients overflow at every scale; ``known``: what observers know of it."""
    found = ", ".join(f"{scale:g}" for scale in scales)
    where = f" The last overflow was in the gradients of {few(names)}." if names else ""
    steps = f"{skipped} skipped step{'' if skipped == 1 else 's'}"
    return (
        f"the loss scale fell to its floor ({found}) after {steps}: gradients held "
        f"inf or nan at every scale above, so it is the model that makes them.{where} "
        "fxprec.numerics.locate(model, (*inputs, target), loss, scaler) on the batch of the last step names the op "
        "that makes them and what cures it; with fxprec.numerics.watch(model, optimizer, scaler) around the loop this "
        "message does. Look at the loss and the inputs too, and at the learning rate; and train weights that were "
        "pretrained in bfloat16 in bfloat16 (dtype=torch.bfloat16)" + "".join(f".\n{text}" for text in known if text)
    )
