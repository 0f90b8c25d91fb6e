"""The entry point of a method of a converted model: how its graphs are captured, and what is known of them.

dynamo's graphs have the hooks built in that a capture met. It guards those of single modules, and not those of all
modules (``register_module_forward_hook``): ``HooksSeen`` notices when one is removed or another is added.
``CallWatcher`` is the interface by which a conversion calls ``fxprec.numerics.watch``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.capture.originals import marked
from fxprec.capture.symbolic.guards import HOOKS
from fxprec.model.dynamic import DynamicGraphs, Resources
from fxprec.model.method import Method, MethodName
from fxprec.model.static import StaticGraphs
from fxprec.torch_internals import global_hooks


class HooksSeen:
    """The hooks that captures of one method met."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Any], Mapping[Any, Any]] | None = None

    def note(self, owner: nn.Module) -> None:
        """Note, after a capture of a method of ``owner``, the hooks of its submodules and those of all modules.

        dynamo's graphs have these built in. Hooks of ``owner`` itself run outside of the graphs.
        """
        submodules = (module for module in owner.modules() if module is not owner)
        dicts = (vars(module)[name] for module in submodules for name in HOOKS)
        self._seen = (self._seen or {}) | dict(_each((*dicts, *global_hooks.values())))

    @property
    def gone(self) -> bool:
        """Return whether one of the hooks was removed."""
        return bool(self._seen) and not all(key in hooks for (_, key), hooks in self._seen.items())

    @property
    def late(self) -> str | None:
        """Return the reason why its graphs must not run now, since they lack a hook of all modules; or None."""
        if self._seen is None or not any(global_hooks.values()):
            return None
        new = any(place not in self._seen for place, _ in _each(global_hooks.values()))
        return "hooks for all modules were registered after its capture" if new else None


def _each(dicts: Any) -> Iterator[tuple[tuple[int, Any], Mapping[Any, Any]]]:
    """Yield each hook by its place, and the dict that has it."""
    return (((id(hooks), key), hooks) for hooks in dicts for key in [*hooks])


#: Recaptures by dynamo that are allowed for one method. What changes after that, and dynamo does not guard, sends its
#: calls to autocast; of a removed hook dynamo's own guards tell then.
MOST_RESTARTS: Final = 8

#: Mark of our wrapper of a function that was set on an instance: its entry point.
ENTRY: Final = "_fxprec_entry"


class EntryPoint(Method):
    """Entry point of a converted model: what runs in the place of one of its methods.

    Args:
        resources: of the model.
        name: of the method.
        number: tells it from others of that name.

    Attributes:
        called: a call ran without a static graph: under dynamo, or as a generator.
        by_dynamo: the last call did not run a static graph, but what dynamo captures.
        hooks: of modules, that were there when dynamo captured.
        restarts: how often what dynamo captured was forgotten, since it was out of date.
        outside: 'where' of what its calls ran outside of graphs.
        declined: why static capture was declined.
        new: the function was just set on the instance, perhaps for one call only, which it has not had yet.
    """

    def __init__(self, resources: Resources, name: MethodName, number: int) -> None:
        super().__init__(name, number)
        self._resources = resources
        self.called = self.new = self.by_dynamo = False
        self.restarts = 0
        self.start_over()

    def adopt(self, owner: nn.Module, of_instance: Callable[..., Any] | None = None) -> None:
        super().adopt(owner, of_instance)
        self.start_over()

    def start_over(self) -> None:
        """Forget every capture: the code is another one now."""
        self.static = StaticGraphs(self._resources.settings.capture)
        self.declined: list[str] = []
        self.look_again()  # the code as it is now counts as unchanged
        self.start_dynamic_over()

    def start_dynamic_over(self) -> None:
        """Forget what dynamo captured."""
        self.hooks = HooksSeen()
        self.outside: set[str] = set()
        self.dynamic = DynamicGraphs(self._resources, self)

    @property
    def out_of_date(self) -> str | None:
        """Return the reason why what dynamo captured must not run any more, or None."""
        if self.hooks.gone and self.restarts < MOST_RESTARTS:  # after that dynamo's guards alone tell of hooks
            return "a hook was removed"
        return self.dynamic.changed()

    @property
    def active(self) -> EntryPoint | None:
        """Return the entry point that a call reaches: itself, or that of a function set on the instance; or None."""
        owner = self.owner()
        if owner is None:
            return None
        set_on_it = entry_of(owner.__dict__.get(self.name.name))
        return set_on_it or (self if hasattr(self.original_class, self.name.name) else None)


def entry_of(function: Any) -> EntryPoint | None:
    """Return the entry point of our wrapper of a function that a user set on an instance; None for other functions."""
    return marked(function, ENTRY)


class CallWatcher(Protocol):
    """Protocol of a model's watch.

    All but ``call`` is for ``capture_step``: a step is recorded once into a CUDA graph, which is replayed without
    Python. So the watch writes what it sees to buffers while the step is recorded, and reads them after each replay.
    """

    def call(self, entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run a call that records gradients, by ``run``."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Have the watch forget the steps in the block, which are no part of the training, and keep what it knew."""
        ...

    def recording(self) -> AbstractContextManager[object]:
        """Have a step in the block write what is watched to buffers; the block's value is what ``replayed`` takes."""
        ...

    def fixed(self) -> Hashable:
        """Return a key of what is built into a recording: where it differs, the step must be recorded again."""
        ...

    def begin(self) -> None:
        """Read what the buffers hold of the steps so far, before a recorded step overwrites them."""
        ...

    def written(self) -> Iterable[Tensor]:
        """Return the buffers that a call of the model may write."""
        ...

    def replayed(self, recording: object, optimizer: Optimizer, again: Callable[[float], None]) -> None:
        """Note that a captured step was launched.

        Args:
            recording: what ``recording`` gave while the step was captured.
            optimizer: that steps in it.
            again: run its forward and backward once more, without the graph, at a loss scale.
        """
        ...
