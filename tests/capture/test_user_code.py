"""user_line: the line that a warning or a ledger points at is the user's, whoever started python."""

from __future__ import annotations

from fxprec.capture.user_code import user_line


def test_it_is_the_callers() -> None:
    file, line = user_line()
    assert file == __file__ and line == test_it_is_the_callers.__code__.co_firstlineno + 1


def test_no_frozen_module_is_a_users() -> None:
    names = {"user_line": user_line}
    exec(compile("found = user_line()", "<frozen runpy>", "exec"), names)
    assert names["found"][0] == __file__  # type: ignore[index]
