"""Loss scaling: torch's ``GradScaler``, call for call, and what it lacks."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxprec.errors import (
    ClosureError,
    ConversionError,
    GradientsWarning,
    LossScaleError,
    LossScaleFloorError,
    NoGradientsError,
    UnusedSettingWarning,
)
from fxprec.host_reads import capturing
from fxprec.scaling.gradients import ParameterNames, parameters_of
from fxprec.scaling.optimizer_state import (
    OptimizerState,
    Records,
    add_back,
    checked_blocks,
    gradients_aside,
    owners_of,
    refuse_loss,
)
from fxprec.scaling.scale import (
    Scales,
    UpdateRule,
    checked_bounds,
    checked_count,
    checked_factors,
    checked_new_scale,
    checked_state,
    scaled,
)
from fxprec.scaling.skips import (
    Skips,
    can_skip_on_device,
    combined_flag,
    floor_message,
    no_gradients,
    scaling_attributes,
    wants_scaler,
)
from fxprec.scaling.unscale import GradientChecks

if TYPE_CHECKING:
    from fxprec.passes.policy.policy import Level


class Observer(Protocol):
    """Observer of each ``update`` of a scaler that is enabled."""

    def before_update(self) -> None:
        """Look at what was found in this iteration: the scales are about to move."""

    def after_update(self, fallen: bool) -> str:
        """Look at the moved scales. ``fallen``: what is known of overflows that took one to its floor."""
        ...


def _of_first_loss(name: str) -> Any:
    def get(self: LossScaler) -> Tensor | None:
        return getattr(self._scales.losses[0], name)

    def set_(self: LossScaler, value: Tensor | None) -> None:
        if value is not None and not self._scales.placed:
            self._scales.place(value.device)
        setattr(self._scales.losses[0], name, value)

    return property(get, set_)


def _of_rule(name: str) -> Any:
    return property(lambda self: getattr(self._scales.rule, name))


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with the same calls, stages and state, and more to see and to set.

    A low-precision loss is cast to FP32 before it is scaled. From ``scale`` to ``update`` nothing waits for the device
    where the optimizer can skip a step by itself (torch's fused ones after their first step, and fxprec's).

    Args:
        device: device type of the losses; None: "cuda" where there is one, else "cpu".
        init_scale: the first scale, or with ``dynamic=False`` the only one.
        growth_factor, backoff_factor, growth_interval: as torch's.
        enabled: False: every call is a no-op, ``step`` is the optimizer's.
        dynamic: grow after ``growth_interval`` good steps and back off after a bad one. False: the scale stays, and a
            step whose gradients hold inf or nan is skipped all the same.
        fp16_gradients: accept float16 gradients, which torch refuses to unscale: their parameters are float16 (O3).
        min_scale, max_scale: bounds of every scale.
        hysteresis: the overflow that backs the scale off, counted since the scale last grew: 1 is torch's behaviour, 2
            tolerates one. The step is skipped either way.
        consecutive_hysteresis: count overflows in a row instead: a good step starts anew.
        num_losses: losses with scales of their own, see ``scale_loss``.
        process_group: ranks that skip together. None: those of the meshes where the optimizer's DTensors live (FSDP2,
            tensor parallelism), else this one alone; DDP needs none. Pipeline stages do; those without a loss need not
            call ``scale``.
        on_floor: "raise" or "warn" when an overflow takes the scale to ``min_scale`` (without one: to 2**-126, the
            smallest normal number), or finds it there; None: go on. On CUDA it is noticed an update or two later.
        recheck: look for inf and nan again in ``step`` after ``unscale_``: the gradients were changed in between.
        skip_without_gradients: pass over an optimizer none of whose parameters has a gradient, as where several take
            turns, or a batch reaches a part of the model only. ``step`` returns None then and counts as skipped; scales
            stay where nothing else was checked. False: ``step`` raises NoGradientsError.

    Raises:
        LossScaleError: (a ValueError) a number out of range.

    Sources: torch.amp.GradScaler; Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        fp16_gradients: bool = False,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        num_losses: int = 1,
        process_group: Any = None,
        on_floor: Literal["raise", "warn"] | None = "raise",
        recheck: bool = False,
        skip_without_gradients: bool = False,
    ) -> None:
        factors = growth_factor, backoff_factor
        rule = UpdateRule(*factors, growth_interval, hysteresis, consecutive_hysteresis, min_scale, max_scale)
        self._scales = Scales(init_scale, rule, dynamic, num_losses)  # which checks all of them
        # Numbers are checked where the scales are made; the rest is words.
        if on_floor not in ("raise", "warn", None):
            raise LossScaleError(f"on_floor must be one of 'raise', 'warn', None, not {on_floor!r}")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
        self._enabled = torch.amp.GradScaler(self._device, enabled=enabled).is_enabled()  # it warns without CUDA
        self._recheck, self._skip_without_gradients = recheck, bool(skip_without_gradients)
        self._compose(fp16_gradients, process_group, Skips(), on_floor)

    def _compose(self, fp16_gradients: bool, process_group: Any, skips: Skips, on_floor: Any) -> None:
        """Make the parts of the scaler, which know of no other objects yet."""
        self._names = ParameterNames()
        self._known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._records = Records(self._scales, self._known, skips=skips, on_floor=on_floor)
        self._checks = GradientChecks(self._scales, fp16_gradients, process_group, self._names)
        self._observers: list[Observer] = []

    # torch's private names, which Lightning, Accelerate and optimizers that take the scaler read.
    _scale: Any = _of_first_loss("scale")
    _growth_tracker: Any = _of_first_loss("growth_tracker")
    _growth_factor: Any = _of_rule("growth_factor")
    _backoff_factor: Any = _of_rule("backoff_factor")
    _growth_interval: Any = _of_rule("growth_interval")
    _init_scale: Any = property(lambda self: self._scales.losses[0].start[0])
    _init_growth_tracker: Any = property(lambda self: self._scales.losses[0].start[1])
    _per_optimizer_states: Any = property(lambda self: self._records.states)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scales.place(dev)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._checks.unscale(self._records.spoiled, optimizer, inv_scale, found_inf, allow_fp16)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if not self._scales.placed and self._checks.process_group is not None:
            # A pipeline stage without a loss: its gradients come from other ranks, scaled.
            self._scales.place(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def scale(self, outputs: Any) -> Any:
        """Return the loss, or each tensor of a list, tuple or other iterable, times the scale, in FP32 or wider.

        Raises:
            TypeError: anything else.
        """
        if not self._enabled:
            return outputs
        result = self._scaled(0, outputs)
        self._records.scaled_outside = True
        return result

    def scale_loss(
        self, loss: Any, optimizers: Optimizer | Iterable[Optimizer], loss_id: int = 0, *, delay_unscale: bool = False
    ) -> AbstractContextManager[Any]:
        """Open a block: ``with scaler.scale_loss(loss, optimizer) as scaled: scaled.backward()``; unscales on exit.

        For several losses, each with its own scale (``num_losses``): gradients of earlier losses are put aside on
        entry, and the new ones, once unscaled and checked, are added to them. Then ``step`` and ``update`` as ever.

        Args:
            loss: as for ``scale``.
            optimizers: those whose parameters get gradients of it.
            loss_id: which scale.
            delay_unscale: leave the gradients scaled; another ``scale_loss`` of the same loss will follow before
                ``step`` (accumulation).

        Raises:
            IndexError: no such loss. TypeError: no optimizer. RuntimeError: gradients of another loss, or of ``scale``,
                are there, still scaled; the optimizer has stepped, or is in a block already. What ``unscale_`` refuses
                is raised on exit. After an exception the gradients are those of before.
        """
        if not self._enabled:
            return nullcontext(loss)
        return self._scale_loss(loss, optimizers, loss_id, delay_unscale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place (sparse ones may be replaced), and check them.

        Raises:
            RuntimeError: a second time, or after ``step``; nothing was scaled since the last ``update``; a parameter
                that another optimizer unscaled already; gradients that are sums over two scales.
            ValueError, TypeError: gradients that cannot be unscaled.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        records = self._records
        # The stage alone tells a second unscale, which would divide by the scale twice.
        state = records.state_of(optimizer, "unscale_")
        if state.stage is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once a step, "
                "before clipping; scale_loss and clip_grad_norm_ unscale by themselves"
            )
        if state.stage is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step(). Call it between backward() and step()")
        self._require_scaled("unscale_")
        # Gradients that a block left scaled have that loss's scale; those of ``scale`` the first one's.
        loss_id = state.delayed or 0
        scale = self._scales.of(loss_id)
        # As torch: FP32 division can be imprecise for certain compile options.
        inverse = scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()
        found = self._checks.unscale(records.spoiled, optimizer, inverse, torch.zeros_like(scale), allow_fp16=False)
        state.stage, state.delayed = OptState.UNSCALED, None
        state.record([loss_id], found)
        # Gradients of earlier losses are unscaled, too: now they may be added.
        kept, state.aside = state.aside, []
        add_back(kept)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        """Clip the optimizer's gradients by ``torch.nn.utils.clip_grad_norm_``, unscaled first where they are not.

        Args:
            optimizer: whose gradients.
            max_norm: of all of them together.
            **kwargs: ``norm_type``, ``error_if_nonfinite`` and ``foreach``, as torch's.

        Returns:
            The norm before clipping; inf or nan where the step will be skipped.
        """
        if self._enabled and self._records.state_of(optimizer, "clip_grad_norm_").stage is OptState.READY:
            self.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm, **kwargs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale where that was not done, then ``optimizer.step(*args, **kwargs)`` unless a gradient is inf or nan.

        A skip leaves parameters, optimizer state, step counts and random state as they were.

        Raises:
            ClosureError: (TypeError and RuntimeError) a closure. NoGradientsError: no parameter has a gradient, and the
                scaler was made without ``skip_without_gradients``.
            TypeError: no optimizer. RuntimeError: as ``unscale_``; or a second step since the last ``update``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        records, checks = self._records, self._checks
        state = records.state_of(optimizer, "step")
        if state.stage is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call scaler.update() once at the end of every "
                "iteration"
            )
        # A block with ``delay_unscale`` left this to the step.
        self._require_scaled("step")
        if state.delayed is not None:
            self.unscale_(optimizer)
        # An optimizer that takes the scaler unscales and checks by itself: torch's scaler calls it.
        if wants_scaler(optimizer):
            if self._skip_without_gradients and all(p.grad is None for p in parameters_of(optimizer)):
                return self._pass_over(state)
            result = super().step(optimizer, *args, **kwargs)
            if state.found_inf_per_device:
                records.skips.note_on_device(optimizer, state.found_inf_per_device)
            return result
        # Check the gradients, unless ``unscale_`` did; the optimizer unscales them in its step where it can.
        on_device = can_skip_on_device(optimizer)
        unscales = state.stage is OptState.READY and (on_device or hasattr(optimizer, "check_gradients"))
        if state.stage is OptState.UNSCALED:
            if self._recheck:
                state.record(state.found_inf_by_loss or [0], checks.check(records.spoiled, optimizer))
        elif unscales:
            state.check, found = checks.check_for_step(records.spoiled, optimizer)
            state.record([0], found)
        else:
            self.unscale_(optimizer)
        found = state.found_inf_per_device
        if not found:
            if self._skip_without_gradients:
                return self._pass_over(state)
            raise no_gradients(optimizer, self._names.known_model)
        # The host decides on a skip, and waits for the flags, where the optimizer cannot.
        result = None
        if not on_device and any(flag.item() for flag in found.values()):
            records.skips.note_skip(optimizer, self.parameter_names(optimizer))
        else:
            # What the optimizer still has to divide by: nothing, where ``unscale_`` was called.
            scale = self._scales.first
            left = None if state.stage is OptState.UNSCALED else scale
            flag = combined_flag(found.values(), scale.device)
            with scaling_attributes(optimizer, left, flag, state.check) if on_device or unscales else nullcontext():
                result = optimizer.step(*args, **kwargs)
            if on_device:
                records.skips.note_on_device(optimizer, found)
            else:
                records.skips.note_step()
        state.stage = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scales by what was found in this iteration, or set all of them.

        Args:
            new_scale: finite and above 0; a number, or a tensor of one element (which is read: a host sync).

        Raises:
            LossScaleError: another ``new_scale``. LossScaleFloorError: overflows took the scale to its floor; the
                scaler is ready for the next iteration all the same. RuntimeError: a ``scale_loss`` with
                ``delay_unscale`` is open.
        """
        if not self._enabled:
            return
        records = self._records
        self._check_scale_growth_tracker("update")
        # Gradients that are there would be unscaled by another scale than they have.
        if any(state.holds_scaled for state in records.states.values()):
            raise RuntimeError(
                "update() within scale_loss, or gradients of scale_loss(..., delay_unscale=True) are still scaled, and "
                "an update may change the scale: close the accumulation with a scale_loss that unscales"
            )
        for observer in self._observers:
            observer.before_update()
        # All that may refuse comes before ``before_update``: a refused update changes nothing.
        if new_scale is not None:
            value = checked_new_scale(new_scale, self._device)
            checked_bounds(self._scales.rule.min_scale, value, self._scales.rule.max_scale)
            records.before_update()
            self._scales.fill(value)
            records.floor.reset()
        else:
            updated = [*records.found()]
            if not updated and not any(state.stage is OptState.STEPPED for state in records.states.values()):
                raise NoGradientsError(
                    "No inf checks were recorded prior to update: no optimizer was stepped or unscaled through the "
                    "scaler since the last update. Call scaler.step(optimizer) before, or update(new_scale)"
                )
            records.before_update()
            # Each loss moves by its own flags; one that was not checked stays where it is.
            rule = self._scales.rule_now(records.floor.near)
            for loss, found in updated:
                loss.update(found, rule)
            if updated:  # else all optimizers were passed over, and no scale moves
                records.floor.note(updated, self._scales.losses, rule)
        self._end_iteration()

    def _pass_over(self, state: OptimizerState) -> None:
        """Count the step of an optimizer without gradients as skipped."""
        state.stage = OptState.STEPPED
        self._records.skips.note_without_gradients()

    def _end_iteration(self) -> None:
        records = self._records
        self._drop_iteration()
        # After the iteration is dropped: an error leaves the scaler ready for the next one.
        fallen = records.floor.fallen(self._scales.rule.backoff_factor)
        known = [observer.after_update(fallen) for observer in self._observers]
        if fallen and records.on_floor is not None:
            message = floor_message(
                [loss.number() for loss in self._scales.losses], self.skipped_steps, self.overflow_parameters(), known
            )
            if records.on_floor == "raise":
                raise LossScaleFloorError(message)
            warnings.warn(message, GradientsWarning, stacklevel=3)

    def _before_replay(self, optimizer: Optimizer) -> None:
        """Prepare for the replay of a captured iteration, with its ``step`` and ``update``."""
        self._known[id(optimizer)] = optimizer
        self._records.before_update({id(optimizer)})

    def _after_replay(self, optimizer: Optimizer, found: Tensor) -> None:
        """Note what ``step`` and ``update`` would have, of a launched graph. ``found``: its flag, 0-dim FP32.

        Raises:
            LossScaleFloorError: as ``update``.
        """
        records, losses = self._records, self._scales.losses
        records.skips.note_on_device(optimizer, {found.device: found})
        records.floor.note([(losses[0], found)], losses, self._scales.rule_now(records.floor.near))
        self._end_iteration()

    def _found_in(self) -> Iterator[tuple[Optimizer, list[Tensor]]]:
        """Yield each optimizer whose gradients were checked since the last update, with its flags."""
        for key, state in self._records.states.items():
            if key in self._known:
                yield self._known[key], [*state.found_inf_per_device.values()]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Keep of iterations in the block nothing but the numbers of the scales: a graph is captured."""
        kept, self._records = self._records, Records(self._scales, self._known)
        try:
            yield
        finally:
            self._records = kept

    def _drop_iteration(self) -> None:
        """Begin the next iteration: after an update, or after an error, whose gradients are gone."""
        self._records.forget_iteration()
        self._records.skips.begin()

    @property
    def process_group(self) -> Any:
        """Ranks that skip together, where the constructor was given any."""
        return self._checks.process_group

    @property
    def step_was_skipped(self) -> bool:
        """Return whether a step of the last iteration, or of this one once it stepped, was skipped.

        Reads the device.
        """
        return self._records.skips.last

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps that were skipped so far; saved with the state. Reads the device."""
        return self._records.skips.total

    @property
    def steps_without_gradients(self) -> int:
        """Number of skipped steps that had no gradients (``skip_without_gradients``); saved with the state."""
        return self._records.skips.without_gradients

    def found_inf(self, loss_id: int = 0) -> bool:
        """Return whether gradients that were checked since the last ``update`` hold inf or nan. Reads the device."""
        wanted = self._scales.losses[loss_id]
        return self._enabled and any(bool(found > 0) for loss, found in self._records.found() if loss is wanted)

    def overflow_parameters(self) -> list[str]:
        """Return the parameters whose gradients held inf or nan in the last skipped step. Reads the device.

        The optimizers' parameters from the last to the first, as a backward pass comes to them: an overflow begins at
        the first name, and spreads to the layers before it.

        After a step that was skipped on the device, ask before ``zero_grad``: the gradients themselves are looked at.
        ``fxprec.numerics.locate`` names the op that made them, and what cures it.
        """
        return self._records.skips.parameters(self.parameter_names)

    def parameter_names(self, optimizer: Optimizer) -> dict[int, str]:
        """Return id -> name, as messages have them: of named groups, of the converted model, else place and shape."""
        return self._names(optimizer)

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Take names from this model (held weakly); ``convert`` does."""
        self._names.model = weakref.ref(model)

    def get_scale(self, loss_id: int = 0) -> float:
        """Return the scale of a loss; 1.0 if scaling is disabled. Reads the device."""
        return self._scales.losses[loss_id].number() if self._enabled else 1.0

    def set_growth_factor(self, new_factor: float) -> None:
        """Set it; raise LossScaleError unless it is above 1."""
        self._scales.rule = replace(self._scales.rule, growth_factor=checked_factors(new_factor, 0.5)[0])

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set it; raise LossScaleError unless it is between 0 and 1."""
        self._scales.rule = replace(self._scales.rule, backoff_factor=checked_factors(2.0, new_factor)[1])
        self._records.floor.reset()

    def set_growth_interval(self, new_interval: int) -> None:
        """Set it; raise LossScaleError unless it is a whole number of at least 1."""
        interval = checked_count("growth_interval", new_interval, 1)
        self._scales.rule = replace(self._scales.rule, growth_interval=interval)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five keys, and "fxprec": each loss's scale and trackers, skips, how gradients stand.

        Loads into ``torch.amp.GradScaler`` too. Save between two iterations; or within an accumulation, with the
        gradients, after any ``backward`` or ``scale_loss``.

        Raises:
            RuntimeError: ``scale_loss`` keeps gradients of earlier losses aside, which you cannot save.
        """
        if not self._enabled:
            return {}
        # Under a key of its own, which torch's scaler does not read.
        extra = {
            "losses": self._scales.saved(),
            "skipped_steps": self.skipped_steps,
            "scaled": self._records.scaled,
            "blocks": self._records.saved_blocks(),
        }
        # Left out where there are none, so that most states are the same with and without the option.
        if self.steps_without_gradients:
            extra["steps_without_gradients"] = self.steps_without_gradients
        return {**super().state_dict(), "fxprec": extra}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of ours or of ``torch.amp.GradScaler``. Nothing changes if it is refused.

        A disabled scaler has no use for a state that is not empty, and warns.

        Raises:
            TypeError: no dict. RuntimeError: empty, or keys are missing. LossScaleError: (a ValueError) numbers out of
                range, or another number of losses.
        """
        if not self._enabled:
            if state_dict:
                warnings.warn(
                    "a state of a loss scaler has no effect on one that is disabled, as bfloat16's is: was the "
                    "checkpoint trained in float16?",
                    category=UnusedSettingWarning,
                    stacklevel=2,
                )
            return
        # All that may refuse comes first, so that a refusal changes nothing.
        losses = checked_state(state_dict, len(self._scales.losses))
        extra = state_dict.get("fxprec", {})
        blocks = checked_blocks(extra.get("blocks", []), len(losses))
        self._scales.load(state_dict, losses)
        # What was known of gradients and skips is of another run; graphs that were captured are still there.
        old, skips = self._records, Skips(extra.get("skipped_steps", 0), extra.get("steps_without_gradients", 0))
        self._records = Records(self._scales, self._known, skips=skips, on_floor=old.on_floor)
        self._records.captured = old.captured
        # Saved within an accumulation: its gradients come from a file, not from a backward.
        if extra.get("scaled"):
            self._records.scaled, self._records.blocks = True, blocks
            if not self._scales.placed:
                self._scales.place(torch.device(self._device))

    def __repr__(self) -> str:
        """Return a text without the scale, which may lie on a device: ``get_scale`` reads it."""
        if not self._enabled:
            return "LossScaler(disabled)"
        moves = "static" if self._scales.rule.backoff_factor == self._scales.rule.growth_factor == 1.0 else "dynamic"
        losses = f", {len(self._scales.losses)} losses" if len(self._scales.losses) > 1 else ""
        return f"LossScaler({moves}{losses}, on {self._device})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, copy and deepcopy, between two iterations, as torch's.

        Raises:
            AssertionError: within one. TypeError: a process group, which only this process knows.
        """
        # A group is a handle of this process; between two iterations no state of an optimizer is kept.
        if self._checks.process_group is not None:
            raise TypeError("a LossScaler with a process_group cannot be pickled or copied: save its state_dict()")
        if self._records.states:
            raise AssertionError(
                "A LossScaler may only be pickled at the beginning of an iteration, or at the end after scaler.update()"
            )
        # What the parts are made of in their place: they hold tensors, weak references and optimizers.
        skips = Skips(self.skipped_steps, self.steps_without_gradients)
        parts = {"composed": (self._checks.fp16_gradients, None, skips, self._records.on_floor)}
        own = {name: value for name, value in self.__dict__.items() if name not in _COMPOSED}
        return own | parts | {"_scales": copy.copy(self._scales)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        composed = state.pop("composed")
        self.__dict__.update(state)
        self._compose(*composed)

    def _scaled(self, loss_id: int, outputs: Any) -> Any:
        records = self._records

        def times_scale(tensor: Tensor) -> Tensor:
            if not self._scales.placed:
                self._scales.place(tensor.device)
            scale = self._scales.of(loss_id)
            if capturing(tensor.device):
                records.captured = True
            result = tensor * scale.to(tensor.device, non_blocking=True)
            records.spoiled.watch(result, scale)
            return result

        # New gradients may come, also of parameters whose last ones another optimizer unscaled.
        records.spoiled.claimed.clear()
        result = scaled(outputs, times_scale)
        records.scaled = True
        return result

    @contextmanager
    def _scale_loss(
        self, loss: Any, optimizers: Optimizer | Iterable[Optimizer], loss_id: int, delay_unscale: bool
    ) -> Iterator[Any]:
        # All refusals come before the loss is scaled, whose graph would be spent.
        owners = owners_of(optimizers)
        refuse_loss(self._records, owners, loss_id)
        result = self._scaled(loss_id, loss)
        with gradients_aside(self._records, self._checks, owners, loss_id, delay_unscale):
            yield result
        for owner in () if delay_unscale else owners:
            self.unscale_(owner)

    def _require_scaled(self, call: str) -> None:
        records = self._records
        if not (records.scaled or records.captured) and self._checks.process_group is None:
            raise RuntimeError(
                f"{call}() would divide gradients by a scale of {self.get_scale():g}, but nothing was scaled since the "
                "last update(): call scaler.scale(loss).backward(), or optimizer.step() for gradients without a scale"
            )


#: Made anew for a copy, or from a file.
_COMPOSED = frozenset({"_names", "_known", "_records", "_checks", "_observers"})


def make_scaler(argument: object, dtype: torch.dtype, level: Level, device: str) -> LossScaler:
    """Return the scaler for ``convert(scaler=argument)``, on parameters of this device type.

    None: dynamic for float16, disabled for bfloat16 and O0, static 1.0 for O3. False: disabled. A number: static.

    Raises:
        TypeError: none of these, nor a LossScaler. ConversionError: float16 on CUDA, and there is no CUDA: torch's
            scaler would switch itself off.
    """
    if isinstance(argument, LossScaler):
        return argument
    if device == "cuda" and dtype is torch.float16 and level != "O0" and not torch.cuda.is_available():
        raise ConversionError(
            "float16 on CUDA was asked for, and torch sees no CUDA device: the gradients would not be scaled. "
            "Check the driver and the build of torch, or convert on the CPU"
        )
    # At O3 parameters themselves are float16, and so are their gradients: a static scale of 1 is what apex has there.
    fp16_gradients = level == "O3" and dtype is torch.float16
    if argument is None and level == "O3":
        argument = 1.0
    if argument is None:
        return LossScaler(device, enabled=level != "O0" and dtype is torch.float16)
    if argument is False:
        return LossScaler(device, enabled=False)
    if isinstance(argument, Real) and not isinstance(argument, bool):
        return LossScaler(device, float(argument), dynamic=False, fp16_gradients=fp16_gradients)
    raise TypeError(
        f"scaler is {argument!r}: give None (chosen by dtype and level), False (no scaling), a number (a static scale) "
        "or an fxprec.LossScaler"
        + (", which takes the arguments of torch's" if isinstance(argument, torch.amp.GradScaler) else "")
    )


def _refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for a closure, which would run backward passes that nobody unscales; ``step(optimizer, None)`` is fine."""
    if callable(kwargs.get("closure", args[0] if args else None)):
        raise ClosureError(
            "Closure use is not currently supported if GradScaler is enabled: the closure's backward would leave "
            "scaled gradients to the optimizer. For one that evaluates once, call it first:\n"
            "    loss = closure()        # zero_grad, forward, scaler.scale(loss).backward()\n"
            "    scaler.step(optimizer)\n"
            "For one that evaluates several times a step (LBFGS), train in bfloat16, which needs no scaling: "
            "fxprec.convert(model, dtype=torch.bfloat16)"
        )
