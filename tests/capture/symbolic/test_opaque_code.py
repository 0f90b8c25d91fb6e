"""The trace is stopped before it executes what no graph can hold; who else watches the interpreter goes on watching."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.opaque_code import OpaqueCode

monitored = pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring came with Python 3.12")


def made(log: list[str]) -> Callable[[], None]:
    def function() -> None:
        log.append("first")
        log.append("second")

    return function


def second_constant(code: CodeType) -> tuple[int, ...]:
    """Where "second" is loaded: before the call that appends it."""
    return tuple(i.offset for i in dis.get_instructions(code) if i.argval == "second")


def decline(why: str) -> None:
    raise CaptureDeclined(why)


@pytest.mark.parametrize("when", ["before", "within"])
def test_it_stops_before_the_place(when: str) -> None:
    log: list[str] = []
    function, opaque = made(log), OpaqueCode(decline)
    places = second_constant(function.__code__)
    if when == "before":
        opaque.stop_at(function.__code__, places, "enough")
    with pytest.raises(CaptureDeclined, match="enough"), opaque:
        if when == "within":
            opaque.stop_at(function.__code__, places, "enough")
        function()
    assert log == ["first"]
    function()
    assert log == ["first", "first", "second"]


def test_it_stops_before_the_call() -> None:
    log: list[str] = []
    function, opaque = made(log), OpaqueCode(decline)
    opaque.stop_at(function.__code__, (), "not at all")
    with pytest.raises(CaptureDeclined, match="not at all"), opaque:
        function()
    assert log == []


def test_other_threads_go_on() -> None:
    log: list[str] = []
    function, opaque = made(log), OpaqueCode(decline)
    opaque.stop_at(function.__code__, (), "not here")
    with opaque:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert log == ["first", "second"]


def test_one_within_another() -> None:
    log: list[str] = []
    function, outer, inner = made(log), OpaqueCode(decline), OpaqueCode(decline)
    other = made([])
    outer.stop_at(function.__code__, second_constant(function.__code__), "outer")
    inner.stop_at(other.__code__.replace(), (), "inner")
    with pytest.raises(CaptureDeclined, match="outer"), outer:
        with inner:
            pass
        function()


@pytest.mark.slow
@pytest.mark.parametrize("set_function", [sys.settrace, sys.setprofile])
def test_a_debugger_goes_on_being_called(set_function: Callable[[Any], None]) -> None:
    """Coverage's function too, or a profiler's: the same one afterwards, and told of what ran within."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * float(torch.initial_seed() % 2 + 1)

    seen: list[str] = []

    def watches(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code is Reading.forward.__code__:
            seen.append(event)
        return watches

    get = {sys.settrace: sys.gettrace, sys.setprofile: sys.getprofile}[set_function]
    before = get()
    set_function(watches)
    try:
        model, _ = fxprec.convert(Reading(), dtype=torch.bfloat16, capture="auto", example_inputs=(torch.ones(1, 2),))
        now = get()
    finally:
        set_function(before)
    assert now is watches and "call" in seen
    assert "initial_seed" in str(fxprec.report(model))


@monitored
def test_tools_are_given_back_and_declined_where_all_are_taken() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    function, opaque = made([]), OpaqueCode(decline)
    opaque.stop_at(function.__code__, (), "not at all")
    free = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
    with opaque:
        assert len([tool for tool in range(6) if monitoring.get_tool(tool) is None]) == len(free) - 1
    assert [tool for tool in range(6) if monitoring.get_tool(tool) is None] == free
    for tool in free:
        monitoring.use_tool_id(tool, "a test")
    try:
        with pytest.raises(CaptureDeclined, match="all tools"), opaque:
            pass
    finally:
        for tool in free:
            monitoring.free_tool_id(tool)


def test_a_walk_through_very_many_functions_ends_with_a_reason():
    """The trace declines where the model goes on, and no line of its is blamed for Python's recursion limit."""
    scope: dict[str, Any] = {"torch": torch}
    source = "".join(f"def f{i}(x): return f{i + 1}(x)\n" for i in range(400)) + "def f400(x): return torch.relu(x)\n"
    exec(compile(source, "user.py", "exec"), scope)

    class Model(nn.Module):
        def __init__(self, first: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.fc, self.first = nn.Linear(2, 2), first

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.fc(x))

    shallow, deep = Model(scope["f390"]), Model(scope["f0"])
    x = torch.randn(1, 2)
    for model in (shallow, deep):
        expected = model.fc(x).relu()
        fxprec.convert(model, level="O0")
        if model is shallow:
            torch.testing.assert_close(model(x), expected)
            assert not model._fxprec.declined
        else:
            with pytest.raises(fxprec.CaptureError, match="through more functions and objects"):
                fxprec.convert(fxprec.revert(model), level="O0", capture="symbolic")(x)
