"""The interface of NVIDIA apex's ``amp``: ``from apex import amp`` becomes ``from fxprec import amp``.

::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

# Scripts read ``amp._amp_state.loss_scalers[0].loss_scale()``: the object hides the module of this name.
from fxprec.amp._amp_state import _amp_state, master_params
from fxprec.amp.fp16_optimizer import FP16_Optimizer
from fxprec.amp.functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from fxprec.amp.initialize import initialize
from fxprec.amp.scaling import load_state_dict, scale_loss, state_dict

__all__ = [
    "FP16_Optimizer", "_amp_state", "disable_casts", "float_function", "half_function", "initialize", "load_state_dict",
    "master_params", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "state_dict",
]  # fmt: skip
