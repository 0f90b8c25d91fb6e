"""Makes a kernel a torch op that torch.compile, torch.export and dispatch modes see, and that is cheap without them.

A kernel file writes the launcher of its forward, what the result looks like (fake), the backward, and the forward in
torch's ops (reference), and makes one ``KernelOp`` of them. Calling it takes one of three ways::

    a tracer, a dispatch mode, a transform or a tensor subclass   torch.ops.fxprec.<name>      (about 25 us a call)
    otherwise, where a gradient will be wanted                    torch.autograd.Function      (about 12 us)
    otherwise                                                     the launcher itself

The backward launches its own ``KernelOp``, which has no autograd: with ``create_graph=True`` gradients are enabled
there, and the gradients of the reference are taken instead (``eager_gradients``), which autograd can differentiate
again. Where gradients come in a batch it runs once for each (``one_by_one``).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.launch.observers import ANY_MODE, COMPILER, TRANSFORM, watcher
from fxprec.kernels.launch.operands import PLAIN
from fxprec.kernels.torch_internals import add_batch_dim, is_batched, remove_batch_dim

#: Level of the legacy vmap, which is never nested.
_LEVEL: Final = 1
_KERNELS: Final[dict[str, KernelOp]] = {}


class KernelOp:
    """Kernel with autograd: ``op(*inputs)`` is ``torch.ops.fxprec.<name>``, or a shorter call if no tracer is active.

    Args:
        name: of the op, unique in the namespace ``fxprec``.
        forward: the launcher. Its annotations are the op's schema (Tensor, Tensor | None, int, float, bool, ...;
            returns Tensor or a tuple of them); it returns no input and no view of one, and writes to none but those
            named.
        fake: the same arguments to empty tensors of the results' shapes, dtypes and strides.
        backward: ``backward(ctx, *grads)``, as of torch.autograd.Function: a gradient (or None) for each of the first
            inputs; the others have none. It never sees gradients in a batch, which come one by one, nor none at all.
        setup_context: ``setup_context(ctx, inputs, output)``, as of torch.library.register_autograd. By default all
            results but the first are statistics, which nobody differentiates. These are saved behind the tensors among
            the inputs, which come first, and ``ctx.settings`` has the other inputs.
        reference: the first result in torch's ops, of the first arguments of ``forward``. Where ``setup_context`` is
            the default it serves a backward that is recorded itself; elsewhere ``backward`` sees to that.
        mutates_args: names of the arguments that ``forward`` writes to; such an op has no backward.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        reference: Callable[..., Tensor] | None = None,
        mutates_args: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.launch = forward
        _KERNELS[name] = self
        self.op = torch.library.custom_op(f"fxprec::{name}", forward, mutates_args=tuple(mutates_args))
        self.op.register_fake(fake)
        self._apply: Any = None
        self._transformed: Any = None
        if backward is not None:
            parameters = inspect.signature(forward).parameters.values()
            tensors = sum("Tensor" in str(each.annotation) for each in parameters)
            setup_context = setup_context or functools.partial(_save, tensors)
            backward = one_by_one(_completed(backward, reference, tensors, len(parameters)))
            self.op.register_autograd(backward, setup_context=setup_context)
            function: Any = _function(name, forward, backward, setup_context)
            # Function.apply first looks for torch.func transforms, none of which are active where this is called.
            self._apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
            self._transformed = _transformed(name, self.op, backward, setup_context)

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel. All inputs positionally, defaults included."""
        # One loop over the inputs for both questions: this runs at every call of a kernel.
        wanted, seen = False, watcher(COMPILER, ANY_MODE, TRANSFORM) is not None
        for x in inputs:
            if isinstance(x, Tensor):
                wanted |= x.requires_grad
                seen |= type(x) not in PLAIN
        if seen:
            # torch.func refuses a custom op with autograd registered.
            if self._transformed is not None and watcher(TRANSFORM):
                return self._transformed.apply(*inputs)
            return self.op(*inputs)
        if wanted and self._apply is not None and torch.is_grad_enabled():
            return self._apply(*inputs)
        return self.launch(*inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a reference by name: copies and pickles of a module share its ops."""
        return _by_name, (self.name, self.launch.__module__)


def _save(tensors: int, ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    """Save the tensors among the inputs, which come first, and all results but the first."""
    statistics = output[1:] if isinstance(output, tuple) else ()
    ctx.settings = inputs[tensors:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(*inputs[:tensors], *statistics)


def _completed(
    backward: Callable[..., Any], reference: Callable[..., Tensor] | None, tensors: int, count: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the backward with what all have in common: None for other inputs, and double backward by a reference."""
    taken = 0 if reference is None else len(inspect.signature(reference).parameters)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: Any = ()
        # Without a gradient nothing is looked at: what was saved may have been overwritten since.
        if all(grad is None for grad in grads):
            pass
        elif reference is not None and torch.is_grad_enabled():
            given = (*ctx.saved_tensors[:tensors], *ctx.settings)
            found = eager_gradients(reference, given[:taken], grads[:1])
        else:
            found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return (*found, *[None] * (count - len(found)))

    return run


def eager_gradients(
    reference: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients of ``reference(*inputs)``, an eager form of the kernel, that can be differentiated again.

    Args:
        inputs: those of the forward, tensors as autograd knows them (``ctx.saved_tensors``).
        grads: of the results; None where a result had no gradient.

    Returns:
        for each input its gradient; None where it wants none.
    """
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(inputs)
    cotangents = tuple(g for g in grads if g is not None)
    if not wanted or not cotangents:
        return tuple(gradients)

    def run(*own: Tensor) -> tuple[Tensor, ...]:
        given = list(inputs)
        for i, x in zip(wanted, own, strict=True):
            given[i] = x
        results = reference(*given)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(r for r, g in zip(results, grads, strict=True) if g is not None)

    # vjp counts inputs by position, so one tensor may be two of them; and within torch.func's transforms it finds
    # gradients of saved tensors whose level is over (jacrev, vjp), where torch.autograd.grad finds none.
    with torch.enable_grad():
        found = torch.func.vjp(run, *(inputs[i] for i in wanted))[1](cotangents)
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return tuple(gradients)


def one_by_one(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of a torch.autograd.Function that runs once for each gradient where they come in a batch.

    ``torch.autograd.grad(is_grads_batched=True)`` passes batches, and so do ``torch.autograd.functional``'s
    ``jacobian`` and ``hessian`` with ``vectorize=True``. Their vmap is the legacy one: batched tensors have no memory
    that a kernel could read, and no torch.func transform is active that would tell.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if isinstance(grad, Tensor) and is_batched(grad):
                return _each(backward, ctx, grads)
        return backward(ctx, *grads)

    return run


def _each(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
    batches = {
        place: remove_batch_dim(grad, _LEVEL, 1, 0).unbind()
        for place, grad in enumerate(grads)
        if isinstance(grad, Tensor) and is_batched(grad)
    }
    saved = ctx.saved_tensors  # held: no backward may think itself the last reader and overwrite them
    results: list[tuple[Any, ...]] = []
    for number in range(len(next(iter(batches.values())))):
        given = [batches[place][number] if place in batches else grad for place, grad in enumerate(grads)]
        found = backward(ctx, *given)
        results.append(found if isinstance(found, tuple) else (found,))
    del saved
    return tuple(
        None if any(gradient is None for gradient in gradients) else add_batch_dim(torch.stack(gradients), 0, _LEVEL)
        for gradients in zip(*results, strict=True)
    )


def _by_name(name: str, module: str) -> KernelOp:
    if name not in _KERNELS:
        importlib.import_module(module)  # unpickled in a process that has not come to it yet
    return _KERNELS[name]


def _function(name: str, forward: Any, backward: Any, setup_context: Any) -> Any:
    def run(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


def _transformed(name: str, op: Any, backward: Any, setup_context: Any) -> Any:
    """Build the autograd function for torch.func.grad and the like, which refuse a custom op with autograd."""
    members = {"forward": op.__call__, "setup_context": setup_context, "backward": backward}
    return type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in members.items()})
