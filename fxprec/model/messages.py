"""Errors to raise and warnings to give about the calls and graphs of a converted model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.user_code import user_level
from fxprec.errors import (
    CaptureError,
    ConversionError,
    NotCapturedError,
    ServiceWarning,
    SeveralGraphsError,
    UnusedSettingWarning,
)
from fxprec.model.method import Method
from fxprec.settings import Settings


class Messages:
    """The errors and warnings of one converted model, in its words."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._warned_autocast = False

    def frozen(self, what: str) -> ConversionError:
        """Return the error for what a frozen model cannot do."""
        return ConversionError(
            f"{what}: the model was frozen by fxprec.freeze, its FP32 weights are gone. "
            "Keep the original checkpoint, and load and train an unfrozen model"
        )

    def not_symbolic(self, method: Method, reason: CaptureDeclined) -> CaptureError:
        """Return the error for a method that ``capture="symbolic"`` cannot take."""
        return CaptureError(
            f"capture='symbolic' cannot take {self._called(method)}: {reason}. "
            "Leave capture out: dynamo takes such models"
        )

    def traced(self, tracer: str, instead: str) -> ConversionError:
        """Return the error for a call under somebody else's trace."""
        return ConversionError(
            f"{tracer} of the converted {self._name}: its forward runs graphs of its own. "
            f"Take the rewritten graph: {instead}"
        )

    def not_captured(
        self, method: Method, has_graphs: bool, net: Mapping[str, str] | None, declined: Iterable[str]
    ) -> NotCapturedError:
        """Return the error for a method without a graph.

        Args:
            has_graphs: it has some for other modes.
            net: 'where' -> 'why' of what ran outside of graphs, if no call had a graph; else None.
            declined: why static capture was declined, of any method.
        """
        called = self._called(method)
        # All calls ran outside of graphs: the first reason is the one that matters.
        if net:
            where, why = next(iter(net.items()))
            return NotCapturedError(f"{called} has no graph: it {self._served()}. {where}: {why}")
        # The reason nearest to what was asked for: of this method, else of the settings. Those of methods other than
        # forward begin with their name; for forward all are taken.
        waits = ["lower='pays' asks for sizes"] if self._settings.pays else []
        own = [why for why in declined if method.key == "forward" or why.startswith(f"{method.key}: ")]
        why = "".join(f" ({reason})" for reason in (own or waits)[-1:])
        if has_graphs:
            owner = method.owner()
            mode = "training" if owner is not None and owner.training else "eval"
            return NotCapturedError(
                f"no graph of {called} is for the modes that its modules are in now ({mode}){why}: "
                "call it once so, and look again; fxprec.graphs(model) gives those of other modes"
            )
        give = "or give convert(model, example_inputs=(...)), " if method.key == "forward" else ""
        return NotCapturedError(f"{called} is captured at its first call{why}: call it once, {give}and look again")

    def changed(self, method: Method, what: str) -> NotCapturedError:
        """Return the error for a graph of dynamo with a value of the model built in that is another one by now."""
        return NotCapturedError(
            f"{what} of {self._name} is another than at the first call, and dynamo's graph of {self._called(method)} "
            "serves any: fxprec.graphs(model) gives it with that of the first call. Convert a copy of the model"
        )

    def several(self, method: Method, part: str) -> SeveralGraphsError:
        """Return the error for a method that was captured in pieces."""
        return SeveralGraphsError(
            f"{self._called(method)} has no graph of its own: it is captured in pieces, with Python code between them "
            f"({part}). fxprec.graphs(model) gives the pieces; to have one graph, write {method.called_here} without "
            "such breaks"
        )

    def warn_of_form(self, method: Method, why: str) -> None:
        """Warn that a graph is not called as its method is."""
        warnings.warn(
            f"the graph of {self._called(method)} takes tensors one by one and gives a tuple of tensors, not what "
            f"{method.called_here} gives: {why}. Its inputs are named after where they come from",
            category=ServiceWarning,
            stacklevel=user_level(),
        )

    def warn_nothing_captured(self, method: Method, net: Mapping[str, str]) -> None:
        """Warn that a first call found nothing to capture."""
        why = "; ".join(dict.fromkeys(net.values()))
        warnings.warn(
            f"no graph of {self._called(method)} was captured: it {self._served()}. Why: {why}",
            category=ServiceWarning,
            stacklevel=user_level(),
        )

    def warn_autocast(self, how: str) -> None:
        """Warn once that somebody else's autocast has no effect."""
        if not self._warned_autocast:
            self._warned_autocast = True
            warnings.warn(
                f"the converted {self._name} was {how} torch.autocast: its own graphs decide what is lowered and run "
                "with autocast off. Leave the autocast context away; where a framework has it, its switch: Lightning's "
                "Trainer(precision='32-true'), TrainingArguments(bf16=False, fp16=False), "
                "Accelerator(mixed_precision='no') (see docs/frameworks.md)",
                category=UnusedSettingWarning,
                stacklevel=user_level(),
            )

    def _served(self) -> str:
        """Say how a method runs where there is no graph."""
        under = "" if self._settings.policy.level == "O0" else f" under torch.autocast({self._settings.device!r})"
        return f"runs{under} as it stands"

    def _called(self, method: Method) -> str:
        return self._name if method.key == "forward" else f"{self._name}.{method.key}"
