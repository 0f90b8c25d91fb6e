"""Ask something of a converted model, on checked batches, and leave it as it was; or ask a copy of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fxprec.capture.pytrees import leaves_of
from fxprec.errors import ConversionError
from fxprec.model.checks import named_methods
from fxprec.model.conversion import conversion_of
from fxprec.model.swapped import attach, take_off
from fxprec.torch_internals import tree_map_only

P = ParamSpec("P")
R = TypeVar("R")

#: ``(*inputs, target)``, or the arguments by name, which the loss then gets as its target.
Batch = tuple[Any, ...] | list[Any] | Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]


def not_in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function callable in inference mode, which has no derivatives: there it computes as under ``no_grad``."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


@dataclass(frozen=True, slots=True)
class Problem:
    """Converted model, with what its outputs are judged by.

    Attributes:
        model: converted.
        loss: ``loss(output, target)``, a scalar; None: the output is a scalar, or has a ``loss``, or speaks for itself.
        method: which one is called, as named in ``convert(methods=...)``: ``"vae.decode"``.
    """

    model: nn.Module
    loss: Loss | None
    method: str = "forward"

    @classmethod
    def of(cls, model: nn.Module, loss: Loss | None, asks: str, method: str = "forward") -> Problem:
        """Check the arguments of the function ``asks``.

        Raises:
            ConversionError: the model is not converted, or frozen.
            TypeError: the loss is no function, the method no name.
            ValueError: there is no such method, or it was not converted.
        """
        if conversion_of(model).frozen is not None:
            raise ConversionError(
                f"{type(model).__name__} is frozen: it has no FP32 weights that {asks} could compare with. Convert it "
                "again from a checkpoint, or ask before fxprec.freeze"
            )
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function (output, target) -> scalar, or None, not {type(loss).__name__}")
        if not isinstance(method, str):
            raise TypeError(f"method must be a name, such as 'vae.decode', not {type(method).__name__}")
        try:
            # The conversion knows the methods that it has; the model, those that could have been converted.
            conversion_of(model).method(method)
        except ValueError:
            named_methods(model, (method,))  # raises where the model has none of that name, and says which it has
            raise
        return cls(model, loss, method)

    def run(self, batch: Batch) -> Tensor | list[Tensor]:
        """Run the model and return its loss, or else its float outputs.

        Raises:
            TypeError: the model takes other arguments.
            ValueError: the loss is no scalar, or there is nothing to judge.
        """
        # Of named inputs the whole batch is the target: labels are among them, which the model may take as well.
        named = dict(batch) if isinstance(batch, Mapping) else {}
        inputs, target = ([], batch) if isinstance(batch, Mapping) else ([*batch], None)
        if self.loss is not None and inputs:
            target = inputs.pop()
        self._check_arguments(inputs, named)
        name = conversion_of(self.model).method(self.method).name
        owner = self.model.get_submodule(name.path)
        output = (owner if name.name == "forward" else getattr(owner, name.name))(*inputs, **named)
        if self.loss is not None:
            value = self.loss(output, target)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                cure = ": take its mean" if isinstance(value, Tensor) else ""
                raise ValueError(f"loss(output, target) must be a scalar, a tensor of floats, not {what}{cure}")
            return value
        # transformers' models return their loss beside the logits.
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor) and own.numel() == 1 and own.is_floating_point():
            return own
        values = [each for each in leaves_of(output) if isinstance(each, Tensor) and each.is_floating_point()]
        if not values:
            what = type(self.model).__name__ + (f".{self.method}" if self.method != "forward" else "")
            raise ValueError(f"{what} gives no tensor of floats: give a loss(output, target)")
        return values[0] if len(values) == 1 and values[0].numel() == 1 else values

    def _check_arguments(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        conversion = conversion_of(self.model)
        entry = conversion.method(self.method)
        signature = entry.signature
        try:
            signature.bind(*inputs, **named)
        except TypeError as error:
            # A target too many is the usual mistake, and the signature alone does not say so.
            of_batch = "a batch is the inputs alone where no loss is given: leave the target out, or give loss="
            if named or self.loss is not None:
                of_batch = "a batch is (*inputs, target), or a dict of arguments"
            raise TypeError(f"{error}: {conversion.name}.{entry.name}{signature}; {of_batch}") from None

    def step(self, batch: Batch, scale: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run forward and backward at a loss scale; return the loss, or else the outputs, and gradients by parameter.

        Of outputs that are no loss the backward is that of their sum.
        """
        value = self.run(batch)
        run_backward(value, scale)
        values = value if isinstance(value, list) else [value]
        return [each.detach() for each in values], gradients_of(self.model)

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each batch, checked; tensors of inference mode are copied, as nothing could be differentiated in them.

        Raises:
            TypeError: batches cannot be iterated over, or one of them is neither a tuple nor a dict.
            ValueError: there is none; a batch has no target.
        """
        if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
            raise TypeError(
                f"batches must be a list of batches, each (*inputs, target), not a {type(batches).__name__}: give "
                "[(x, y)] for a single one"
            )
        empty = True
        for batch in batches:
            empty = False
            if not isinstance(batch, tuple | list | Mapping):
                raise TypeError(
                    f"a batch must be a tuple (*inputs, target) or a dict of arguments, not a {type(batch).__name__}: "
                    "give [(x, y)] for a single one"
                )
            if self.loss is not None and not isinstance(batch, Mapping) and len(batch) < 2:
                raise ValueError(f"a batch of {len(batch)} part{'s' * (len(batch) != 1)} is not (*inputs, target)")
            yield tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, batch)
        if empty:
            raise ValueError("there is no batch: the list is empty, or an iterator that was used up")


def run_backward(value: Tensor | list[Tensor], scale: float = 1.0) -> bool:
    """Run the backward of a loss, or of the sum of outputs, at a loss scale; return False where nothing has one."""
    total: Any = value if isinstance(value, Tensor) else sum(each.sum() for each in value)
    if total.requires_grad:
        (total * scale if scale != 1.0 else total).backward()
    return total.requires_grad


def scale_of(scaler: object) -> float:
    """Return the loss scale that a scaler multiplies by: 1.0 without any, or where it is disabled.

    Raises:
        TypeError: it is no scaler.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a LossScaler or None, not {type(scaler).__name__}")
    # A disabled scaler has a scale as well, which nothing is multiplied by.
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def converted_anew(model: nn.Module, **changed: Any) -> nn.Module:
    """Return a copy that is as ``fxprec.convert`` makes it: what can be captured without inputs is captured at once.

    Raises:
        FxprecError: as ``fxprec.convert``: an override matches nothing, say.
    """
    copied = under(model, **changed)
    conversion = conversion_of(copied)
    conversion.capture_now(copied)
    conversion.check_policy(copied)
    return copied


def under(model: nn.Module, **changed: Any) -> nn.Module:
    """Return a copy of a converted model, converted with its settings, but for those that are given."""
    settings = conversion_of(model).settings
    # The user's model is left alone: a copy of its weights gets a conversion of its own.
    copied = copy.deepcopy(model)
    take_off(copied)
    attach(copied, replace(settings, **changed))
    return copied


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return path -> gradient, of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
