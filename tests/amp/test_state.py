"""What amp keeps between calls, and prints."""

from __future__ import annotations

import pytest
import torch

from fxprec.amp._amp_state import AmpState, Properties, maybe_print, state


def test_calls_before_initialize_are_refused_by_name():
    fresh = AmpState()
    with pytest.raises(RuntimeError, match=r"amp\.scale_loss was called, but amp has not been initialized"):
        fresh.properties("amp.scale_loss")
    fresh.opt_properties = Properties()
    assert fresh.properties("amp.scale_loss") is fresh.opt_properties


@pytest.mark.parametrize("verbosity, printed", [(0, ""), (1, "here\n"), (2, "here\n")])
def test_verbosity_0_prints_nothing(verbosity, printed, monkeypatch, capsys):
    monkeypatch.setattr(state, "verbosity", verbosity)
    maybe_print("here")
    assert capsys.readouterr().out == printed


def test_what_concerns_all_ranks_is_printed_by_the_first(monkeypatch, capsys):
    monkeypatch.setattr(state, "verbosity", 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    maybe_print("an overflow here")
    maybe_print("the options", rank0=True)
    assert capsys.readouterr().out == "an overflow here\n"
