"""Register functions of other modules that a user wants in one precision, by name.

::

    amp.register_half_function(my_ops, "correlate")
    model, optimizer = amp.initialize(model, optimizer)

A registered function is replaced in its module by a decorated one when ``initialize`` comes. torch is not patched: its
functions and module classes become overrides of the model's policy. They act in the models, under every spelling.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.fx import Graph, Node

from fxprec.amp.functions import decorated, is_decorated
from fxprec.amp.state import Kind, Registration, state
from fxprec.errors import UnusedSettingWarning
from fxprec.passes.graph.annotations import Rule, notes
from fxprec.passes.ops.names import canonical_op
from fxprec.passes.ops.table import rule_of
from fxprec.passes.policy.policy import Policy

_RULES: Final = {"half": Rule.LOW, "float": Rule.FULL, "promote": Rule.PROMOTE}


def register_half_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``half_function``, from the next ``initialize`` on.

    Raises:
        ValueError: the module has no such function. TypeError: it is none.
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``float_function``; as ``register_half_function``."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Make ``module.name`` a ``promote_function``; as ``register_half_function``."""
    _register(module, name, "promote")


@dataclass(frozen=True)
class IsOp:
    """Predicate of a policy: the rule for nodes of one canonical op."""

    op: str
    rule: Rule

    def __call__(self, node: Node) -> Rule | None:
        return self.rule if notes(node).op.name == self.op else None


def with_registered(policy: Policy, model: nn.Module) -> Policy:
    """Return the policy with an override for each registered function or module class of torch."""
    classes = {type(module) for module in model.modules()}
    for entry in state.registered:
        value, rule = getattr(entry.module, entry.name), _RULES[entry.kind]
        # An op of the table is overridden by its canonical name, so that every spelling follows.
        if entry.op is not None:
            policy = policy.override(where=IsOp(entry.op, rule))
        elif _is_module_class(value) and any(issubclass(each, value) for each in classes):
            policy = policy.override(modules={value: rule})
    return policy


def patch_registered(undo: contextlib.ExitStack) -> None:
    """Replace the other registered functions in their modules, each once; ``undo`` gets what takes it back."""
    for entry in state.registered:
        function = getattr(entry.module, entry.name)
        if entry.op is None and not _is_module_class(function) and not is_decorated(function):
            setattr(entry.module, entry.name, decorated(function, entry.kind))
            undo.callback(setattr, entry.module, entry.name, function)


def _register(module: Any, name: str, kind: Kind) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    value = getattr(module, name)
    if not callable(value) or (isinstance(value, type) and not _is_module_class(value)):
        raise TypeError(f"{name} of {module} is {value!r}: register functions, or classes of nn.Module")
    # torch is never patched: what has no row cannot be reached by a policy.
    op = _op_of(module, name, value)
    if op is None and _is_torchs(module) and not _is_module_class(value):
        raise ValueError(
            f"{name} of {module} is a function of torch without a row in the op table, and torch is not patched: "
            "wrap it in a function of your own, decorated with one of amp's"
        )
    if state.low is not None:
        warnings.warn(
            f"amp.register_{kind}_function({name!r}) after amp.initialize: it takes effect at the next initialize. "
            "Register functions first",
            category=UnusedSettingWarning,
            stacklevel=3,
        )
    state.registered.append(Registration(module, name, kind, op))


def _op_of(module: Any, name: str, value: Any) -> str | None:
    """Return the canonical name of a function or Tensor method of torch that the op table knows."""
    if _is_module_class(value) or not _is_torchs(module):
        return None
    graph = Graph()
    argument = graph.placeholder("x")
    method = module is torch.Tensor
    op = canonical_op(graph.call_method(name, (argument,)) if method else graph.call_function(value, (argument,)))
    return op.name if op is not None and rule_of(op.name) is not None else None


def _is_torchs(owner: Any) -> bool:
    """Return whether a module or class is one of torch's own."""
    owner_module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    return owner_module.partition(".")[0] == "torch"


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
