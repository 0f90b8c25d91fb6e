"""Keep what apex's interface needs between calls, since ``state_dict()`` and ``scale_loss`` take no object for it.

All of it is in ``state``, and nowhere else: the options of the last ``initialize`` (``Properties``), a loss scaler
for each loss (``AmpLossScaler``), and what was registered and initialized. Names, defaults, accepted types and the
types of the refusals are those of NVIDIA apex (``apex.amp._amp_state``), as far as scripts read and set them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxprec.errors import NoGradientsError
from fxprec.passes.graph.annotations import CASTABLE
from fxprec.passes.policy.policy import Level
from fxprec.scaling.gradients import parameters_of
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.scaling.scale import SMALLEST_SCALE, TORCH_KEYS, checked_bounds, checked_count, checked_scale
from fxprec.torch_internals import growth_tracker

#: Precision of a decorated or registered function: the low dtype, FP32, or the widest of its arguments.
Kind = Literal["half", "float", "promote"]

# -- options -----------------------------------------------------------------------------------------------------------

#: Options of each level that differ from the defaults of ``Properties``; ``cast_model_type`` of O2 and O3 is the low
#: dtype of the device (float16 on CUDA, bfloat16 elsewhere), which no table can hold.
_LEVELS: Final[dict[str, dict[str, Any]]] = {
    "O0": {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0},
    "O1": {"patch_torch_functions": True, "loss_scale": "dynamic"},
    "O2": {"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}


@dataclass(frozen=True, slots=True)
class Properties:
    """Options of a run, apex's ``opt_properties``; ``enabled=False`` turns every call of the package into a no-op.

    The level only sets defaults; these options decide which conversion is made.

    Attributes:
        cast_model_type: dtype of the lowering; None at O1, where it is ``low``; False and float32: nothing is lowered.
        low: the low dtype of this device.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    low: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return "\n".join(f"{name:22} : {value}" for name, value in self.options.items())

    @property
    def options(self) -> Mapping[str, Any]:
        """Options as apex keeps them, to read."""
        return MappingProxyType({each.name: getattr(self, each.name) for each in fields(self) if each.name != "low"})

    @property
    def dynamic(self) -> bool:
        """Flag of loss scales that move."""
        return self.loss_scale == "dynamic"

    @property
    def level(self) -> Level:
        """Level of ``fxprec.convert`` that these properties ask for."""
        # The properties decide, not the level by name: an O2 with cast_model_type=torch.float32 lowers nothing.
        if self.opt_level == "O1":
            return "O1" if self.patch_torch_functions else "O0"
        if not self.cast_model_type or self.cast_model_type is torch.float32:
            return "O0"
        return "O2" if self.master_weights else "O3"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the conversion lowers to, where it lowers something."""
        # At O1 there is no cast_model_type, and False and float32 lower nothing: then the device's dtype serves.
        chosen = self.cast_model_type
        return chosen if isinstance(chosen, torch.dtype) and chosen in CASTABLE - {torch.float32} else self.low

    @property
    def has_functions(self) -> bool:
        """Flag of casts by decorated and registered functions: where something is lowered and parameters are FP32."""
        return self.level in ("O1", "O2")


def properties_of(opt_level: Any, low: torch.dtype, overrides: dict[str, Any]) -> Properties:
    """Return the defaults of a level with the overrides that are not None.

    Raises:
        RuntimeError: an unknown level; an override that the level cannot have.
        AssertionError: ``keep_batchnorm_fp32`` is neither a bool nor "True" or "False".
        TypeError: ``cast_model_type`` is no dtype. ValueError: a dtype or a loss scale that cannot serve.
    """
    if not isinstance(opt_level, str) or opt_level not in _LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are 'O0', 'O1', 'O2', 'O3': the letter O, not the "
            "number zero"
        )
    options: dict[str, Any] = {"cast_model_type": low} if opt_level in ("O2", "O3") else {}
    options |= _LEVELS[opt_level]
    options |= {name: _checked_option(name, value, opt_level) for name, value in overrides.items() if value is not None}
    return Properties(enabled=True, opt_level=opt_level, low=low, **options)


def _checked_option(name: str, value: Any, opt_level: str) -> Any:
    """Return an override as ``Properties`` holds it; raise as ``properties_of`` says."""
    # apex's texts and types of error: scripts catch these.
    known = {"True": True, "False": False, True: True, False: False}
    match name:
        # apex takes False for "cast nothing", beside None for "as the level says".
        case "cast_model_type" if value is not False:
            if not isinstance(value, torch.dtype):
                raise TypeError(f"cast_model_type must be a torch.dtype, False or None, not {value!r}")
            if value not in CASTABLE:
                raise ValueError(
                    f"cast_model_type={value}: models are lowered to torch.float16 or torch.bfloat16; torch.float32 "
                    "lowers nothing. For another dtype, model.to(dtype) and train without amp"
                )
        case "patch_torch_functions":
            if opt_level != "O1" and value:
                raise RuntimeError(
                    "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1': "
                    f"at {opt_level} the model is lowered by cast_model_type"
                )
            return bool(value)
        case "keep_batchnorm_fp32":
            if opt_level == "O1":
                raise RuntimeError(
                    "With opt_level O1 batch norms compute in FP32 and their parameters are FP32, so "
                    f"keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {value!r}"
                )
            # Scripts pass a command line's text through. A number is neither, though 1 == True.
            if not isinstance(value, bool | str) or value not in known:
                raise AssertionError(
                    "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
                    f"keep_batchnorm_fp32={value!r}"
                )
            return known[value]
        case "master_weights":
            if opt_level == "O1":
                raise RuntimeError(
                    "It doesn't make sense to use master_weights with O1: there the parameters are FP32, and are the "
                    f"masters. master_weights was {value!r}"
                )
            return bool(value)
        case "loss_scale" if value != "dynamic":
            # A number may come as its text, from a command line.
            try:
                scale = float(value)
            except (TypeError, ValueError):
                scale = math.nan
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"loss_scale must be 'dynamic' or finite and greater than 0, not {value!r}")
            return scale
    return value


# -- the loss scale of one loss ----------------------------------------------------------------------------------------

#: The attributes of apex's object that scripts set, and our own.
_APEX: Final = ("_loss_scale", "_unskipped", "dynamic", "_scale_seq_len", "_min_loss_scale", "_max_loss_scale")
_OWN: Final = ("_overflowed", "_static_unskipped", "scaler")
#: The first scale of apex's dynamic ones, and the number of good steps after which they double.
INIT_SCALE, WINDOW = 2.0**16, 2000


def _of_rule(name: str) -> property:
    """Return a property of apex's that is a field of the scaler's ``UpdateRule``."""
    return property(
        lambda self: getattr(self.scaler._scales.rule, name),
        lambda self, value: self._set(self.loss_scale(), self._unskipped, **{name: value}),
    )


class AmpLossScaler:
    """Loss scale of one loss, as apex counts it: a ``fxprec.LossScaler`` that moves when a ``scale_loss`` ends.

    A dynamic one starts at 2**16, halves after an overflow and doubles after 2000 good steps, within the bounds. A
    static one stays, and never makes a step be skipped.

    What scripts set of apex's object acts here as it does there, from the next ``scale_loss`` on: ``_loss_scale``,
    ``_unskipped``, ``dynamic``, ``_scale_seq_len``, ``_min_loss_scale`` and ``_max_loss_scale``. Any other attribute is
    refused.

    Attributes:
        scaler: what scales, unscales and checks.
    """

    def __init__(
        self, properties: Properties, device: str, min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:  # fmt: skip
        dynamic = properties.dynamic
        # Bounds are those of a scale that moves; a static one may be anything. apex takes a minimum of 0 for none.
        low, high = (min_loss_scale or None, max_loss_scale) if dynamic else (None, None)
        first = INIT_SCALE if dynamic else float(properties.loss_scale)
        self._static_unskipped, self._overflowed = 0, False
        self.scaler = LossScaler(
            device,
            max(low or SMALLEST_SCALE, min(first, math.inf if high is None else high)),
            growth_interval=WINDOW,
            dynamic=dynamic,
            fp16_gradients=properties.level == "O3",
            min_scale=low,
            max_scale=high,
            on_floor=_on_floor(low),
        )

    # A misspelt attribute that did nothing would go unnoticed.
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*_OWN, *_APEX):
            raise AttributeError(f"{_lacks(name)}. What else can be set is an argument of amp.initialize")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{_lacks(name)}, loss_scale() and _has_overflow. amp.scale_loss unscales, checks and moves the scale; for "
            "a loop of your own fxprec.LossScaler has unscale_, step and update"
        )

    def loss_scale(self) -> float:
        """Return the present scale."""
        return self.scaler.get_scale()

    _min_loss_scale = _of_rule("min_scale")
    _max_loss_scale = _of_rule("max_scale")
    _scale_seq_len = _of_rule("growth_interval")

    # The names by which scripts set apex's two numbers, which each keep the other one.
    _loss_scale = property(loss_scale, lambda self, value: self._set(value, self._unskipped))

    @property
    def _unskipped(self) -> int:
        """Number of good steps since the scale last moved."""
        # torch's tracker counts for a dynamic scale alone; apex counts for static ones too.
        return int(growth_tracker(self.scaler)) if self.dynamic else self._static_unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._set(self.loss_scale(), value)

    @property
    def dynamic(self) -> bool:
        """Flag of a scale that moves; a static one stays."""
        return self.scaler._scales.rule.backoff_factor < 1

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        growth, backoff = (2.0, 0.5) if value else (1.0, 1.0)
        self._set(self.loss_scale(), self._unskipped, growth_factor=growth, backoff_factor=backoff)

    @property
    def _has_overflow(self) -> bool:
        """Flag of an overflow in the last ``scale_loss``; the next step is skipped, or was."""
        return self._overflowed

    def _set(self, scale: float, unskipped: int, **rule: Any) -> None:
        """Go on with other numbers, from the next ``scale_loss`` on.

        Raises:
            RuntimeError: gradients are scaled by it now. LossScaleError: (a ValueError) numbers out of range.
        """
        if any(each.holds_scaled for each in self.scaler._records.states.values()):
            raise RuntimeError(
                "a loss scale was set while gradients are scaled by it: set it after the scale_loss that unscales them"
            )
        scale, unskipped = checked_entry("the loss scaler", {"loss_scale": scale, "unskipped": unskipped})
        changed = replace(self.scaler._scales.rule, **rule)
        low, high = checked_bounds(changed.min_scale, scale, changed.max_scale)
        checked_count("growth_interval", changed.growth_interval, 1)
        # All is checked: from here on nothing is refused.
        self.scaler._scales.rule = replace(changed, min_scale=low, max_scale=high)
        self.scaler._records.on_floor = _on_floor(low)
        self.load(scale, unskipped)

    def found_inf(self) -> bool:
        """Return whether the gradients unscaled last overflowed; never with a static scale. Reads the device."""
        self._overflowed = self.dynamic and self.scaler.found_inf()
        return self._overflowed

    def update(self) -> None:
        """Move the scale by what was found. A block that made no gradients (``autograd.grad``) moves nothing.

        Raises:
            LossScaleFloorError: there is no ``min_loss_scale``, and no smaller scale could be taken out again.
        """
        try:
            # apex lets such a block pass, where our scaler and torch's say that a check is missing.
            self.scaler.update()
        except NoGradientsError:
            return
        if not self.dynamic:
            self._static_unskipped += 1

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Continue from these numbers."""
        saved = self.scaler.state_dict()
        count = int(unskipped) if self.dynamic else 0
        # Without our own part of the state: it would bring back what was known of gradients and skips.
        own = {key: saved[key] for key in TORCH_KEYS} | {"scale": float(loss_scale), "_growth_tracker": count}
        self.scaler.load_state_dict(own)
        self._static_unskipped = int(unskipped)


def _on_floor(min_scale: float | None) -> Literal["raise"] | None:
    """Return what happens at the floor: with one the scale stays there, as in apex; without, it would reach 0."""
    return "raise" if min_scale is None else None


def _lacks(name: str) -> str:
    return f"a loss scaler of fxprec.amp has no {name!r}; of apex's internals it has {', '.join(_APEX)}"


def checked_entry(name: str, entry: Any) -> tuple[float, int]:
    """Return scale and count of one entry of a saved state, checked.

    Raises:
        RuntimeError: keys are missing. ValueError: numbers out of range.
    """
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
        raise RuntimeError(f"{name} of the amp state must hold 'loss_scale' and 'unskipped', not {entry!r}")
    scale = checked_scale(f"{name}: loss_scale", entry["loss_scale"])
    return scale, checked_count(f"{name}: unskipped", entry["unskipped"])


# -- the state ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registration:
    """Call of a ``register_*`` function; ``op``: the canonical name, for what becomes an override."""

    module: Any
    name: str
    kind: Kind
    op: str | None = None


@dataclass(frozen=True)
class Handle:
    """Handle as apex's ``_amp_state.handle``, as far as there is something to handle: torch is not patched."""

    _owner: AmpState
    # apex keeps casts of weights from one forward to the next, and scripts ask for that.
    has_cache = False

    def is_active(self) -> bool:
        """Return whether decorated and registered functions cast now."""
        return self._owner.low is not None and not self._owner.disabled

    def _clear_cache(self) -> None:
        """Do nothing: no cast outlives a forward but the shadows of weights, which are kept up to date."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"fxprec.amp's handle has no {name!r}: the API before amp.initialize is not there. amp.scale_loss and "
            "amp.disable_casts take its place"
        )


@dataclass(eq=False)
class AmpState:
    """State of ``fxprec.amp`` in this process.

    What scripts set or read of apex's is here too. Anything else cannot be set, for nothing would come of it.

    Attributes:
        opt_properties: those of the last ``initialize``; None before the first.
        loss_scalers: one a loss; the last ``initialize`` made them.
        verbosity: 0: nothing is printed.
        allow_incoming_model_not_fp32: set by scripts: ``initialize`` takes models with low parameters.
        min_loss_scale, max_loss_scale: what the last ``initialize`` was told.
        models: every model that went through ``initialize``.
        device: device type of the last models.
        low: what decorated functions lower to; None: they do nothing.
        disabled: how many ``disable_casts`` blocks are open.
        registered: the functions named by ``register_*``, in order.
    """

    opt_properties: Properties | None = None
    loss_scalers: list[AmpLossScaler] = field(default_factory=list)
    verbosity: int = 1
    allow_incoming_model_not_fp32: bool = False
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    device: str = "cpu"
    low: torch.dtype | None = None
    disabled: int = 0
    registered: list[Registration] = field(default_factory=list)

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt or unknown option that did nothing would go unnoticed.
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"fxprec.amp._amp_state has no {name!r}, so setting it would do nothing. There are "
                f"{', '.join(self.__dataclass_fields__)}; what else there is to set is an argument of amp.initialize"
            )
        object.__setattr__(self, name, value)

    @property
    def handle(self) -> Handle:
        """Handle for scripts that ask for apex's."""
        return Handle(self)

    def properties(self, call: str) -> Properties:
        """Return the properties of the last ``initialize``.

        Raises:
            RuntimeError: there was none.
        """
        if self.opt_properties is None:
            raise RuntimeError(
                f"{call} was called, but amp has not been initialized: model, optimizer = amp.initialize(model, "
                "optimizer, opt_level=...) must come first"
            )
        return self.opt_properties


state = _amp_state = AmpState()  # apex's name, for scripts


def maybe_print(message: Any, rank0: bool = False) -> None:
    """Print, unless ``verbosity`` is 0; with ``rank0`` on the first rank only."""
    if state.verbosity <= 0:
        return
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not rank0 or not distributed or torch.distributed.get_rank() == 0:
        print(message)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters that the optimizer updates, the model's own FP32 masters. To clip, for instance."""
    return parameters_of(optimizer)
