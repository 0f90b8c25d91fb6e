"""Give scripts ``_amp_state`` where apex has it: ``from fxprec.amp._amp_state import _amp_state``."""

from fxprec.amp.scaling import master_params
from fxprec.amp.state import AmpState
from fxprec.amp.state import say as maybe_print
from fxprec.amp.state import state as _amp_state

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print"]
