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


@pytest.mark.parametrize("when", ["before", "within"])
def test_what_is_to_run_before_a_call_runs_once_and_may_stop_that_very_call(when: str) -> None:
    log: list[str] = []
    function, opaque = made(log), OpaqueCode(decline)
    code = function.__code__

    def look() -> None:
        log.append("looked")
        opaque.stop_at(code, second_constant(code), "enough")

    def twice() -> None:
        with pytest.raises(CaptureDeclined, match="enough"):
            function()

    if when == "before":
        opaque.before_call(code, look)
    with opaque:
        if when == "within":
            opaque.before_call(code, look)
        twice()
    # Once: the next context knows the place.
    with opaque:
        twice()
    assert log == ["looked", "first", "first"]
    with opaque:
        opaque.before_call(code, lambda: opaque.stop_at(code, (), "not at all"))
        with pytest.raises(CaptureDeclined, match="not at all"):
            function()
    assert log == ["looked", "first", "first"]


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


class Calls(nn.Module):
    """A layer, and behind it a function of the user's."""

    def __init__(self, first: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.first = nn.Linear(2, 2), first

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.fc(x))


def chain(count: int, last: str) -> dict[str, Any]:
    """Functions of which each calls the next: f0 to f399, say, and ``last`` as the body of the one behind them."""
    scope: dict[str, Any] = {"torch": torch, "COUNTS": [3], "SCALE": 2.0}
    source = "".join(f"def f{i}(x): return f{i + 1}(x)\n" for i in range(count)) + f"def f{count}(x):\n    {last}\n"
    exec(compile(source, "user.py", "exec"), scope)
    return scope


@pytest.mark.parametrize("count", [3, 60, 400])
def test_functions_far_away_are_guarded_stopped_at_and_put_back_as_near_ones_are(count):
    """Beyond what is read at once, code is read when it is called."""
    x = torch.randn(1, 2)
    scope = chain(count, "return torch.relu(x) * SCALE")
    model, _ = fxprec.convert(Calls(scope["f0"]), level="O0", capture="symbolic")
    for scale in (2.0, 3.0):
        scope["SCALE"] = scale
        torch.testing.assert_close(model(x), model.fc(x).relu() * scale)
    assert not model._fxprec.declined

    opaque = Calls(chain(count, "COUNTS.append(len(COUNTS)); import time; return x * time.time()")["f0"])
    with pytest.raises(fxprec.CaptureError, match="time"):
        fxprec.convert(opaque, level="O0", capture="symbolic")(x)
    assert opaque.first.__globals__["COUNTS"] == [3]


def test_code_that_is_far_away_and_never_called_is_not_read():
    """Packages are large: what their functions read cannot matter to a graph that never called them."""
    scope = chain(400, "return torch.relu(x) * SCALE")
    exec("def either(x): return torch.relu(x) if FAR is None else f0(x)", scope)
    scope["FAR"] = None
    model, _ = fxprec.convert(Calls(scope["either"]), level="O0", capture="symbolic")
    x = torch.randn(1, 2)
    for scale, graphs in ((2.0, 1), (5.0, 1)):
        scope["SCALE"] = scale
        torch.testing.assert_close(model(x), model.fc(x).relu())
        assert len(fxprec.graphs(model)) == graphs
    scope["FAR"] = 1
    torch.testing.assert_close(model(x), model.fc(x).relu() * 5)


def test_a_walk_through_nested_objects_ends_with_a_reason():
    """The trace declines where the model goes on, and no line of its is blamed for Python's recursion limit."""
    x = torch.randn(1, 2)
    for depth in (10, 60):
        table: Any = 2.0
        for _ in range(depth):
            table = {"in": table, "by": []}
        scope = chain(1, "return torch.relu(x) * len(TABLE)")
        scope["TABLE"] = table
        model = Calls(scope["f0"])
        if depth == 10:
            torch.testing.assert_close(fxprec.convert(model, level="O0").module(x), 2 * model.fc(x).relu())
            assert not model._fxprec.declined
        else:
            with pytest.raises(fxprec.CaptureError, match="through more objects"):
                fxprec.convert(model, level="O0", capture="symbolic")(x)
