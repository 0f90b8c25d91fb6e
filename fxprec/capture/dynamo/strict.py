"""dynamo, for the time of a compilation, held to what the interpreter does where it takes liberties.

Left to the interpreter, with a graph break whose reason the report has:

- calls of ``functools.lru_cache`` and ``cache`` that give or take other than plain values: dynamo traces through them
  as though nothing had been kept. Those of plain values are called, and the result is a constant;
- ``torch.autograd.Function`` where gradients are recorded: in a graph its backward has no gradients of its own, and
  what it saves is seen neither by version counters nor by hooks;
- numbers drawn from a ``random.Random`` of the user's, whose state dynamo bakes in;
- ``torch.set_autocast_enabled`` and its kind, by which a graph would run otherwise than it was traced;
- ``torch.inference_mode``: tensors of a graph's are cast outside of it, and are no inference tensors then;
- calls of classes whose metaclass has a ``__call__`` of its own, which dynamo leaves out;
- generators that a function returns, which dynamo runs to their end and gives as an iterator over the values;
- questions for the type or the methods of a NumPy scalar, which dynamo takes for an array;
- ``isinstance(x, nn.Buffer)``, which an attribute of the tensor tells, and -0.0 as a NumPy scalar, whose sign it drops;
- ``x.retains_grad``, hooks and the like of a tensor, which dynamo asks a fake tensor;
- ``str()`` of errors that have a text of their own, such as KeyError: dynamo gives that of their argument.

And guarded: constants by type and sign (see ``guards``), a key that a dict did not have when it was asked, the order of
its keys where all of them are read; constants of classes (before torch 2.13); what autograd knows of an argument, such
as ``x.is_leaf``; a float that is a zero, of which dynamo's symbols do not know the sign; values of numpy as tensors
outside of inference mode, as they were when the guard was made; and what a size or a counter tells a region of torch's,
such as ``torch.autocast(..., enabled=x.shape[0] > 2)``: dynamo cannot take a symbol there.

``torch.compiler.is_compiling()`` is False in the user's code, as in eager mode. In installed packages it is True: they
ask it to leave out what would break a graph and changes no result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.capture.dynamo.encoders import encoder_forward
from fxprec.capture.dynamo.extra_guards import ExtraGuards
from fxprec.capture.dynamo.guards import (
    also,
    exact,
    exact_closure,
    exact_contents,
    exact_fact,
    exact_keys,
    exact_zero,
    has_sign,
    is_zero_of_numpy,
)
from fxprec.capture.dynamo.objects import guarding_objects
from fxprec.capture.guard_values import is_container, is_plain
from fxprec.capture.tripwires import replaced
from fxprec.capture.trusted import is_library, is_torchs
from fxprec.capture.user_code import is_installed
from fxprec.torch_internals import (
    GUARDS_CLASSES,
    dynamo_classes,
    function_behind,
    guard_argument,
    guard_class_attribute,
    guard_identity,
    guard_order,
    guard_source,
    outlives_call,
    torch_dynamo,
    type_of_error,
    unwrapped,
    value_behind,
    with_function,
)

#: Functions that say whether dynamo traces the code that asks.
_IS_COMPILING: Final = ("is_compiling", "is_dynamo_compiling")
#: Types of results that a graph can have as constants.
_LITERALS: Final = frozenset({type(None), bool, int, float, complex, str})
#: Attributes of a tensor that the fake tensor in whose place dynamo has does not take over.
_NOT_OF_FAKES: Final = frozenset("retains_grad output_nr name _backward_hooks _post_accumulate_grad_hooks".split())
#: Functions that change autocast's state, beside ``torch.autocast``.
_SETS_AUTOCAST: Final = frozenset({"set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled"})


@contextlib.contextmanager
def strict(extra_guards: ExtraGuards) -> Iterator[None]:
    """Within the block what dynamo compiles keeps to the interpreter. Under the lock of captures.

    Args:
        extra_guards: gets what dynamo inlines.
    """
    classes = dynamo_classes()
    breaks = classes.graph_break

    call_cached = classes.cached_function.call_function

    def call_of_cached(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        cached = variable.wrapper_obj
        if not hasattr(cached, "cache_info") or is_torchs(cached):
            return call_cached(variable, frame, args, kwargs)
        arguments: list[Any] = []
        named: dict[str, Any] = {}
        try:
            arguments = [each.as_python_constant() for each in args]
            named = {name: each.as_python_constant() for name, each in kwargs.items()}
            plain = all(map(is_plain, (*arguments, *named.values())))
            value = cached(*arguments, **named) if plain else object()
        except Exception:  # no constants, or an error that the interpreter raises again
            value = object()
        if type(value) not in _LITERALS or not guard_identity(variable.source):
            raise breaks(f"a call of {cached.__qualname__}, which keeps its results (functools.lru_cache)")
        extra_guards.result(functools.partial(cached, *arguments, **named), cached.__qualname__, value)
        return classes.constant.create(value)

    applying: Any = None

    def apply(variable: Any, *_args: Any, **_kwargs: Any) -> None:
        nonlocal applying
        applying = variable.fn_cls

    def recorded_apply(*_args: Any, **_kwargs: Any) -> None:
        if not is_torchs(applying):
            raise breaks(f"a call of {applying.__qualname__}, a torch.autograd.Function, which autograd runs itself")

    def call_of_class(variable: Any, *_args: Any, **_kwargs: Any) -> None:
        meta = type(variable.value)
        if meta.__call__ is not type.__call__ and not is_library(meta):
            raise breaks(f"a call of {variable.value.__qualname__}, whose metaclass has a __call__")

    returning = False

    def end_of_frame(original: Callable[..., Any]) -> Callable[..., Any]:
        def end(frame: Any, *args: Any) -> None:
            nonlocal returning
            returning = True
            try:
                original(frame, *args)
            finally:
                returning = False

        return end

    def no_generator(variable: Any, _codegen: Any) -> None:
        if returning:  # else one that the frame is in the middle of, at a graph break
            raise breaks(f"the generator {variable.get_name()}, which runs later")

    def missing_key(variable: Any, frame: Any, key: Any) -> None:
        if key not in variable:
            variable.install_dict_contains_guard(frame, [key])

    def hands_on_keys(variable: Any, _frame: Any, name: str, *_: Any) -> None:
        # what is left goes back in the order that dynamo saw; torch 2.10 and 2.11 copy for "|" without a guard
        if name in ("pop", "popitem", "clear", "__or__"):
            variable.install_dict_keys_match_guard()

    def extends(_list: Any, _frame: Any, _name: str, arguments: Any, *_: Any) -> None:
        for each in map(unwrapped, arguments):
            if isinstance(each, classes.dictionary):
                each.install_dict_keys_match_guard()

    def asked(builtin: Any, frame: Any, arguments: Any, *_: Any) -> None:
        variable: Any = unwrapped(arguments[0]) if arguments else None
        of_users = not is_installed(frame.f_code.co_filename)
        if (
            builtin.fn is isinstance
            and of_users
            and isinstance(variable, classes.tensor)
            and _asks_itself(arguments[1])
        ):
            raise breaks("isinstance() of a tensor and a class that looks at more than its type")
        if builtin.fn in (isinstance, type) and isinstance(variable, classes.array) and variable.ndim == 0:
            raise breaks("a question for the type of a NumPy scalar (make it a Python number where it is set)")
        kind = type_of_error(variable) if builtin.fn is str else None
        if kind is not None and kind.__str__ is not BaseException.__str__:
            raise breaks(f"str() of a {kind.__name__}, which has a text of its own")

    def attribute_of_scalar(variable: Any, _frame: Any, name: str, *_: Any) -> None:
        if variable.ndim == 0 and not hasattr(sys.modules["numpy"].ndarray, name):
            raise breaks(f"{name} of a NumPy scalar (make it a Python number where it is set)")

    def scalar_of_numpy(maker: Any, value: Any) -> None:
        if not is_zero_of_numpy(value):
            return
        if has_sign(value):
            raise breaks("-0.0 as a NumPy scalar (make it a Python number where it is set)")
        guard_source(maker.source, exact_zero)

    def fact_of_tensor(variable: Any, frame: Any, name: str, *_: Any) -> None:
        if name in _NOT_OF_FAKES:
            raise breaks(f"{name} of a tensor")
        if (guard_on := exact_fact(name)) is not None:
            guard_argument(variable, frame, guard_on)

    def no_inference_mode(*_: Any, **__: Any) -> None:
        raise breaks("torch.inference_mode")

    def inlines(function: Any, args: Any) -> None:
        first = getattr(function, "obj", None)
        first = next(iter(args), None) if first is None else first
        value, owners = (None, []) if first is None else value_behind(first)
        lasts = outlives_call(first, extra_guards.kept)
        extra_guards.inlined(
            function_behind(function), function.get_code(), function.get_globals(), value, owners, lasts
        )

    trace = classes.inliner.build_inline_tracer

    def build_inline_tracer(parent: Any, function: Any, args: Any, *rest: Any, **more: Any) -> Any:
        inlines(function, args)
        code = getattr(function_behind(function), "__code__", None)
        if code == nn.TransformerEncoder.forward.__code__ and parent.f_code is not encoder_forward.__code__:
            function = with_function(function, encoder_forward)
        return trace(parent, function, args, *rest, **more)

    numpy = classes.guard_module
    # one after the other: what comes before a call comes before the guards of objects too
    with (
        replaced(guarding_objects()),
        replaced(
            [
                (classes.guards, "EQUALS_MATCH", also(classes.guards.EQUALS_MATCH, exact)),
                (classes.guards, "TYPE_MATCH", also(classes.guards.TYPE_MATCH, exact_keys)),
                (classes.guards, "CLOSURE_MATCH", also(classes.guards.CLOSURE_MATCH, exact_closure)),
                (numpy, "from_numpy", torch.inference_mode(False)(numpy.from_numpy)),
                _before(classes.dictionary, "getitem_const_raise_exception_if_absent", missing_key),
                _before(classes.dictionary, "install_dict_keys_match_guard", guard_order),
                _before(classes.dictionary, "call_method", hands_on_keys),
                _before(classes.list, "call_method", extends),
                (classes.cached_function, "call_function", call_of_cached),
                _before(classes.user_class, "call_function", call_of_class),
                _before(classes.autograd_function, "call_apply", apply),
                _before(classes.applied_function, "call_function", recorded_apply),
                *([] if GUARDS_CLASSES else [_guarding_attributes(classes.user_class)]),
                (classes.inference_mode, "create", staticmethod(no_inference_mode)),
                (classes.inliner, "build_inline_tracer", staticmethod(build_inline_tracer)),
                _before(classes.builtin, "call_function", asked),
                _before(classes.array, classes.attribute, attribute_of_scalar),
                _before(classes.tensor, classes.attribute, fact_of_tensor),
                _zeros_as_constants(classes.argument),
                _before(classes.argument, "wrap_numpy_ndarray", scalar_of_numpy),
                _integers_of_torchs_modules_as_constants(classes.arguments),
                _functions_of_torch(classes),
                _arguments_of_regions_as_constants(classes),
                (classes.random, "is_supported_random_obj", staticmethod(lambda value: False)),
                (classes.frame, "replace_tos_if_return_is_generator", lambda frame: None),
                (classes.frame, classes.end, end_of_frame(getattr(classes.frame, classes.end))),
                _before(classes.generator, "reconstruct", no_generator),
            ]
        ),
    ):
        yield


def _before(owner: Any, name: str, first: Callable[..., None]) -> tuple[Any, str, Any]:
    """The method of that name, before which ``first`` is called as it is."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    return owner, name, staticmethod(both) if isinstance(inspect.getattr_static(owner, name), staticmethod) else both


def _asks_itself(kinds: Any) -> bool:
    """Return whether one of these tensor classes decides by an attribute what is an instance, as nn.Buffer does."""
    try:
        kinds = kinds.as_python_constant()
    except NotImplementedError:
        return False
    return any(
        issubclass(kind, Tensor)
        and not issubclass(kind, nn.Parameter)  # whose instances have its type, but for wrappers, which dynamo asks
        and isinstance(type(kind).__instancecheck__, FunctionType)
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
        if isinstance(kind, type)
    )


def _zeros_as_constants(builder: Any) -> tuple[Any, str, Any]:
    """Have a zero be a constant, which is guarded by its sign: a symbol that is 0.0 may stand for -0.0."""
    wrap = builder.wrap_symfloat

    def wrap_symfloat(maker: Any, value: float) -> Any:
        with torch_dynamo().config.patch(specialize_float=True) if value == 0 else contextlib.nullcontext():
            return wrap(maker, value)

    return builder, "wrap_symfloat", wrap_symfloat


def _integers_of_torchs_modules_as_constants(builders: Any) -> tuple[Any, str, Any]:
    """Have the integers of torch's own modules be constants: its ops refuse a symbol as a flag.

    dynamo makes symbols of those that differ between two models of a class, such as an encoder's activation.
    """
    is_constant = builders.is_int_specialization_case

    def is_int_specialization_case(value: Any, source: Any) -> bool:
        return source.guard_source.is_unspecialized_builtin_nn_module() or is_constant(value, source)

    return builders, "is_int_specialization_case", is_int_specialization_case


def _arguments_of_regions_as_constants(classes: Any) -> tuple[Any, str, Any]:
    """Have what is given to ``torch.autocast`` and its kind be a constant, and guard what it came from."""
    call = classes.torch_context.call_function

    def known(variable: Any) -> Any:
        symbol = variable.realize()
        return classes.constant.create(symbol.evaluate_expr()) if isinstance(symbol, classes.symbol) else variable

    def call_function(variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        return call(variable, frame, [*map(known, args)], {name: known(each) for name, each in kwargs.items()})

    return classes.torch_context, "call_function", call_function


def _functions_of_torch(classes: Any) -> tuple[Any, str, Any]:
    """Have ``torch.compiler.is_compiling()`` be False where the user's own code asks; break where autocast is set."""
    call = classes.torch_function.call_function

    def call_function(variable: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(variable.value, "__name__", "")
        if name in _IS_COMPILING and is_torchs(variable.value) and not is_installed(frame.f_code.co_filename):
            return classes.constant.create(False)
        if name in _SETS_AUTOCAST and is_torchs(variable.value):
            raise classes.graph_break(f"a call of torch.{name}: what follows runs under it, in the interpreter")
        return call(variable, frame, *args, **kwargs)

    return classes.torch_function, "call_function", call_function


def _guarding_attributes(variables: Any) -> tuple[Any, str, Any]:
    read = variables.var_getattr

    def var_getattr(variable: Any, frame: Any, name: str) -> Any:
        found = read(variable, frame, name)
        value = getattr(variable.value, name, None)
        contents = is_container(value) or type(value) is torch.Size
        guard_class_attribute(variable, found, name, exact_contents if contents else None)
        return found

    return variables, "var_getattr", var_getattr
