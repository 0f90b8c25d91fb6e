"""Forwards that run after they have returned: generators, coroutines, asynchronous generators, ``map`` and the like.

A call of such a forward runs none of its code; the caller's steps do, outside of any context that the call was in. So
what the call returned is wrapped in one of its own kind, each of whose steps runs the inner one's in the net, which is
our autocast::

    def forward(self, x):                       for y in model(x):    # each y is computed in the net, and FP32
        for layer in self.layers:
            x = layer(x)
            yield x
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Final

from fxprec.torch_internals import tree_flatten, tree_unflatten

_Context = Callable[[], contextlib.AbstractContextManager[Any]]
_Restore = Callable[[Any], Any]

_KINDS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
#: Iterators that call what they were given when they are asked for the next value (those of itertools do as well).
_LAZY: Final = (map, filter, zip, enumerate)


def steps_of(function: Callable[..., Any]) -> str | None:
    """Return what a call of this function makes in place of running it, such as "a generator", or None."""
    if inspect.isgeneratorfunction(function):
        return "a generator"
    if inspect.iscoroutinefunction(function):
        return "a coroutine"
    return "an asynchronous generator" if inspect.isasyncgenfunction(function) else None


def is_stepwise(output: object) -> bool:
    """Return whether code of the forward is still to run, step by step."""
    return isinstance(output, _KINDS) or type(output) in _LAZY or type(output).__module__ == "itertools"


def close_steps(output: object) -> None:
    """Let go of what is_stepwise before its first step: Python warns of a coroutine that nobody awaits."""
    if isinstance(output, types.CoroutineType):
        output.close()


def stepwise(output: Any, context: _Context, restore: _Restore) -> Any:
    """Return ``output`` with what is stepwise in it wrapped, so that each step runs in a context.

    Args:
        output: a generator, coroutine or iterator, or tuples, lists and dicts that hold some.
        context: makes the context.
        restore: is applied to what is yielded and returned.
    """
    # A forward may return several, beside tensors.
    leaves, spec = tree_flatten(output)
    if not any(map(is_stepwise, leaves)):
        return output
    return tree_unflatten([_wrapped(leaf, context, restore) for leaf in leaves], spec)


def _wrapped(output: Any, context: _Context, restore: _Restore) -> Any:
    if not is_stepwise(output):
        return output
    if isinstance(output, types.CoroutineType):
        wrapped: Any = _awaited(output, context, restore)
    elif isinstance(output, types.AsyncGeneratorType):
        wrapped = _asynchronous(output, context, restore)
    else:
        wrapped = _steps(output, context, restore)
    # Debuggers and ``inspect`` name a generator by its function.
    if isinstance(output, _KINDS):
        wrapped.__name__, wrapped.__qualname__ = output.__name__, output.__qualname__
    return wrapped


def _steps(inner: Any, context: _Context, restore: _Restore) -> Generator[Any, Any, Any]:
    """Do as ``yield from inner`` (PEP 380), but for the context and what is made of the values.

    Also of an iterator that is no generator: it has no ``send``, ``throw`` and ``close``.
    """
    try:
        # The context is open during a step alone: between two steps the caller's own code runs.
        with context():
            value = next(inner)
        while True:
            try:
                sent = yield restore(value)
            except GeneratorExit:
                if hasattr(inner, "close"):
                    with context():
                        inner.close()
                raise
            except BaseException as error:
                # An iterator that is no generator has nothing to throw into.
                if not hasattr(inner, "throw"):
                    raise
                with context():
                    value = inner.throw(error)
            else:
                with context():
                    value = next(inner) if sent is None else inner.send(sent)
    except StopIteration as stop:
        return restore(stop.value)


@types.coroutine
def _step_of(inner: Any, context: _Context) -> Generator[Any, Any, Any]:
    """Run the steps of something awaitable; what it yields is for the event loop, and passed on as it is."""
    return (yield from _steps(_Sendable(inner), context, lambda value: value))


class _Sendable:
    """A coroutine, or a step of an asynchronous generator, as a generator."""

    def __init__(self, inner: Any) -> None:
        self.send, self.throw, self.close = inner.send, inner.throw, inner.close

    def __next__(self) -> Any:
        return self.send(None)


async def _awaited(inner: Coroutine[Any, Any, Any], context: _Context, restore: _Restore) -> Any:
    return restore(await _step_of(inner, context))


async def _asynchronous(inner: AsyncGenerator[Any, Any], context: _Context, restore: _Restore) -> Any:
    try:
        value = await _step_of(inner.asend(None), context)
        while True:
            try:
                sent = yield restore(value)
            except GeneratorExit:
                await _step_of(inner.aclose(), context)
                raise
            except BaseException as error:
                value = await _step_of(inner.athrow(error), context)
            else:
                value = await _step_of(inner.asend(sent), context)
    except StopAsyncIteration:
        return
