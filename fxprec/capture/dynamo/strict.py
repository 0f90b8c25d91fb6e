"""Holds dynamo, for the time of a compilation, to what the interpreter does where dynamo takes liberties.

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

Guarded beside what dynamo guards:

- constants by type and sign (see ``guards``), and constants of classes (before torch 2.13);
- a key that a dict did not have when it was asked, and the order of its keys where all of them are read;
- what autograd knows of an argument, such as ``x.is_leaf``;
- a float that is a zero, of which dynamo's symbols do not know the sign;
- values of NumPy, which become tensors outside of inference mode when a guard is asked, as when it was made;
- what a size or a counter tells a region of torch's, such as ``torch.autocast(..., enabled=x.shape[0] > 2)``: dynamo
  cannot take a symbol there.

``torch.compiler.is_compiling()`` is False in the user's code, as in eager mode. In installed packages it is True: they
ask it to leave out what would break a graph and changes no result.

To change it safely: each line of these lists is a row of ``_Refusals.replacements``, which puts a function of this file
in the place of a method of dynamo's, and a test in ``tests/capture/dynamo``. Without the row a model gives other values
than its original, silently. A refusal too many costs a graph break, which the report shows. The names of dynamo's
classes are those of ``dynamo_classes`` in ``fxprec/torch_internals.py``, where versions of torch differ.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.capture.capturing import Replacement, before, instead_of, replaced
from fxprec.capture.dynamo.encoders import encoder_forward
from fxprec.capture.dynamo.extra_guards import ExtraGuards
from fxprec.capture.dynamo.guards import (
    exact,
    exact_closure,
    exact_contents,
    exact_fact,
    exact_keys,
    exact_zero,
    guarding_objects,
    has_sign,
    is_zero_of_numpy,
)
from fxprec.capture.guard_values import is_container, is_plain
from fxprec.capture.user_code import is_installed, is_library, is_torchs
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
    # The second ones are put around the first: code that is refused gets no guards of objects.
    with replaced(guarding_objects()), replaced(_Refusals(extra_guards).replacements()):
        yield


def _refused(what: str) -> Exception:
    """Return the graph break that leaves this to the interpreter."""
    return dynamo_classes().graph_break(what)


def _also(owner: Any, name: str, further: Callable[[Any, Any], None]) -> Replacement:
    """Return the replacement of a method by which dynamo adds a guard: it adds a further one."""

    def guarded(guard_on: Callable[..., None], builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_on(builder, guard, *args, **kwargs)
        further(builder, guard)

    return instead_of(owner, name, guarded)


class _Refusals:
    """Stands in the places of dynamo's methods, or runs before them, during one compilation."""

    def __init__(self, extra_guards: ExtraGuards) -> None:
        self._extra_guards = extra_guards
        # The autograd.Function whose call dynamo is in.
        self._applying: Any = None
        # The code that returns a frame's values is made.
        self._returning = False

    def replacements(self) -> list[Replacement]:
        """Return all of them."""
        classes = dynamo_classes()
        numpy = classes.guard_module
        return [
            _also(classes.guards, "EQUALS_MATCH", exact),
            _also(classes.guards, "TYPE_MATCH", exact_keys),
            _also(classes.guards, "CLOSURE_MATCH", exact_closure),
            (numpy, "from_numpy", torch.inference_mode(False)(numpy.from_numpy)),
            before(classes.dictionary, "getitem_const_raise_exception_if_absent", _missing_key),
            before(classes.dictionary, "install_dict_keys_match_guard", guard_order),
            before(classes.dictionary, "call_method", _hands_on_keys),
            before(classes.list, "call_method", _extends),
            instead_of(classes.cached_function, "call_function", self.call_of_cached),
            before(classes.user_class, "call_function", _call_of_class),
            before(classes.autograd_function, "call_apply", self.note_function),
            before(classes.applied_function, "call_function", self.refuse_recorded_apply),
            # From torch 2.13 on dynamo guards the attributes of classes itself.
            *([] if GUARDS_CLASSES else [instead_of(classes.user_class, "var_getattr", _guarded_attribute)]),
            instead_of(classes.inference_mode, "create", _no_inference_mode),
            instead_of(classes.inliner, "build_inline_tracer", self.inlined),
            before(classes.builtin, "call_function", _refuse_questions),
            before(classes.array, classes.attribute, _attribute_of_scalar),
            before(classes.tensor, classes.attribute, _fact_of_tensor),
            instead_of(classes.argument, "wrap_symfloat", _zero_as_constant),
            before(classes.argument, "wrap_numpy_ndarray", _scalar_of_numpy),
            instead_of(classes.arguments, "is_int_specialization_case", _is_constant_integer),
            instead_of(classes.torch_function, "call_function", _function_of_torch),
            instead_of(classes.torch_context, "call_function", _with_constants),
            instead_of(classes.random, "is_supported_random_obj", lambda _original, _value: False),
            # Replaces a generator that a frame returns by an iterator over its values; ``no_generator`` refuses it.
            (classes.frame, "replace_tos_if_return_is_generator", lambda frame: None),
            instead_of(classes.frame, classes.end, self.end_of_frame),
            before(classes.generator, "reconstruct", self.no_generator),
        ]

    def call_of_cached(self, call: Callable[..., Any], variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that keeps its results, as the code would, where it takes and gives plain values."""
        cached = variable.wrapper_obj
        if not hasattr(cached, "cache_info") or is_torchs(cached):
            return call(variable, frame, args, kwargs)
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
            raise _refused(f"a call of {cached.__qualname__}, which keeps its results (functools.lru_cache)")
        self._extra_guards.result(functools.partial(cached, *arguments, **named), cached.__qualname__, value)
        return dynamo_classes().constant.create(value)

    # dynamo makes an ``applied_function`` where gradients are recorded, which does not tell of which Function it is.
    def note_function(self, variable: Any, *_args: Any, **_kwargs: Any) -> None:
        self._applying = variable.fn_cls

    def refuse_recorded_apply(self, *_args: Any, **_kwargs: Any) -> None:
        if not is_torchs(self._applying):
            name = self._applying.__qualname__
            raise _refused(f"a call of {name}, a torch.autograd.Function, which autograd runs itself")

    def end_of_frame(self, end: Callable[..., Any], frame: Any, *args: Any) -> None:
        self._returning = True
        try:
            end(frame, *args)
        finally:
            self._returning = False

    def no_generator(self, variable: Any, _codegen: Any) -> None:
        # Else one that the frame is in the middle of, at a graph break.
        if self._returning:
            raise _refused(f"the generator {variable.get_name()}, which runs later")

    def inlined(self, trace: Callable[..., Any], parent: Any, function: Any, args: Any, *rest: Any, **more: Any) -> Any:
        """Note a function that dynamo inlines; of an encoder inline what gives what torch's fused path would."""
        # The first argument tells in which class the function was found, whose other methods may come to hide it.
        first = getattr(function, "obj", None)
        first = next(iter(args), None) if first is None else first
        value, owners = (None, []) if first is None else value_behind(first)
        behind = function_behind(function)
        lasts = outlives_call(first, self._extra_guards.lasting_names)
        self._extra_guards.inlined(behind, function.get_code(), function.get_globals(), value, owners, lasts)
        code = getattr(behind, "__code__", None)
        if code == nn.TransformerEncoder.forward.__code__ and parent.f_code is not encoder_forward.__code__:
            function = with_function(function, encoder_forward)
        return trace(parent, function, args, *rest, **more)


def _call_of_class(variable: Any, *_args: Any, **_kwargs: Any) -> None:
    meta = type(variable.value)
    if meta.__call__ is not type.__call__ and not is_library(meta):
        raise _refused(f"a call of {variable.value.__qualname__}, whose metaclass has a __call__")


def _missing_key(variable: Any, frame: Any, key: Any) -> None:
    if key not in variable:
        variable.install_dict_contains_guard(frame, [key])


def _hands_on_keys(variable: Any, _frame: Any, name: str, *_: Any) -> None:
    # dynamo writes what is left in the order that it saw: guard that order. torch 2.10 and 2.11 copy for "|" without a
    # guard.
    if name in ("pop", "popitem", "clear", "__or__"):
        variable.install_dict_keys_match_guard()


def _extends(_list: Any, _frame: Any, _name: str, arguments: Any, *_: Any) -> None:
    # ``names.extend(table)`` reads all keys, in order.
    for each in map(unwrapped, arguments):
        if isinstance(each, dynamo_classes().dictionary):
            each.install_dict_keys_match_guard()


def _refuse_questions(builtin: Any, frame: Any, arguments: Any, *_: Any) -> None:
    """Leave questions to the interpreter that dynamo answers otherwise."""
    classes = dynamo_classes()
    variable: Any = unwrapped(arguments[0]) if arguments else None
    if builtin.fn is isinstance and isinstance(variable, classes.tensor):
        if not is_installed(frame.f_code.co_filename) and _asks_itself(arguments[1]):
            raise _refused("isinstance() of a tensor and a class that looks at more than its type")
    if builtin.fn in (isinstance, type) and isinstance(variable, classes.array) and variable.ndim == 0:
        raise _refused("a question for the type of a NumPy scalar (make it a Python number where it is set)")
    kind = type_of_error(variable) if builtin.fn is str else None
    if kind is not None and kind.__str__ is not BaseException.__str__:
        raise _refused(f"str() of a {kind.__name__}, which has a text of its own")


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


def _attribute_of_scalar(variable: Any, _frame: Any, name: str, *_: Any) -> None:
    if variable.ndim == 0 and not hasattr(sys.modules["numpy"].ndarray, name):
        raise _refused(f"{name} of a NumPy scalar (make it a Python number where it is set)")


def _scalar_of_numpy(maker: Any, value: Any) -> None:
    if not is_zero_of_numpy(value):
        return
    if has_sign(value):
        raise _refused("-0.0 as a NumPy scalar (make it a Python number where it is set)")
    guard_source(maker.source, exact_zero)


def _fact_of_tensor(variable: Any, frame: Any, name: str, *_: Any) -> None:
    if name in _NOT_OF_FAKES:
        raise _refused(f"{name} of a tensor")
    if (guard_on := exact_fact(name)) is not None:
        guard_argument(variable, frame, guard_on)


def _no_inference_mode(*_: Any, **__: Any) -> None:
    raise _refused("torch.inference_mode")


def _zero_as_constant(wrap: Callable[..., Any], maker: Any, value: float) -> Any:
    """Have a zero be a constant, which is guarded by its sign: a symbol that is 0.0 may stand for -0.0."""
    with torch_dynamo().config.patch(specialize_float=True) if value == 0 else contextlib.nullcontext():
        return wrap(maker, value)


def _is_constant_integer(is_constant: Callable[..., Any], value: Any, source: Any) -> bool:
    """Have the integers of torch's own modules be constants: its ops refuse a symbol as a flag.

    dynamo makes symbols of those that differ between two models of a class, such as an encoder's activation.
    """
    return source.guard_source.is_unspecialized_builtin_nn_module() or is_constant(value, source)


def _with_constants(call: Callable[..., Any], variable: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """Have what is given to ``torch.autocast`` and its kind be a constant, and guard what it came from."""
    classes = dynamo_classes()

    def known(variable: Any) -> Any:
        symbol = variable.realize()
        return classes.constant.create(symbol.evaluate_expr()) if isinstance(symbol, classes.symbol) else variable

    return call(variable, frame, [*map(known, args)], {name: known(each) for name, each in kwargs.items()})


def _function_of_torch(call: Callable[..., Any], variable: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    """Have ``torch.compiler.is_compiling()`` be False where the user's own code asks; break where autocast is set."""
    name = getattr(variable.value, "__name__", "")
    if name in _IS_COMPILING and is_torchs(variable.value) and not is_installed(frame.f_code.co_filename):
        return dynamo_classes().constant.create(False)
    if name in _SETS_AUTOCAST and is_torchs(variable.value):
        raise _refused(f"a call of torch.{name}: what follows runs under it, in the interpreter")
    return call(variable, frame, *args, **kwargs)


def _guarded_attribute(read: Callable[..., Any], variable: Any, frame: Any, name: str) -> Any:
    """Guard an attribute of a class that code reads."""
    found = read(variable, frame, name)
    value = getattr(variable.value, name, None)
    contents = is_container(value) or type(value) is torch.Size
    guard_class_attribute(variable, found, name, exact_contents if contents else None)
    return found
