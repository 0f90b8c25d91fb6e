"""Errors of torch's in lines of a report: one plain clause, without advice for somebody else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.errors import few
from fxprec.inspection.text import clause_of, without_advice
from fxprec.model.conversion import conversion_of

FAKE = (
    "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor). If you're using torch.compile/export/fx,"
    " it is likely that we are erroneously tracing into a custom kernel.\nTo fix this, please wrap the custom kernel."
)


@pytest.mark.parametrize(
    ("error", "clause"),
    [
        (RuntimeError(FAKE), "RuntimeError: Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)"),
        (ValueError("sizes 3 and 4 do not match"), "ValueError: sizes 3 and 4 do not match"),
        (ValueError("sizes do not match: give 3.5. Or none"), "ValueError: sizes do not match: give 3.5"),
        (AssertionError(), "AssertionError"),
        (NotImplementedError("\n\n"), "NotImplementedError"),
        (RuntimeError("a " * 200), f"RuntimeError: {'a ' * 59}a ..."),
        (RuntimeError("x" * 200), f"RuntimeError: {'x' * 120} ..."),
    ],
)
def test_an_exception_is_one_clause(error: Exception, clause: str) -> None:
    assert clause_of(error) == clause


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"dynamo: {FAKE}", "dynamo: Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor)"),
        ("graph break: Unsupported call. Hint: rewrite it", "graph break: Unsupported call"),
        ("Dynamo failed\nfrom user code:\n  File x", "Dynamo failed"),
        ("its weights are low: it runs as it stands", "its weights are low: it runs as it stands"),
        ("2 graphs, and again other sizes", "2 graphs, and again other sizes"),
    ],
)
def test_a_reason_is_one_line_without_advice(text: str, line: str) -> None:
    assert without_advice(text) == line


def test_the_report_shows_no_raw_error() -> None:
    model = fxprec.convert(nn.Linear(4, 4), (torch.randn(2, 4),), dtype=torch.bfloat16).module
    conversion = conversion_of(model)
    conversion.in_net("the loop in generate", f"dynamo: {FAKE}")
    conversion.declined.append(FAKE)
    report = fxprec.report(model)
    text = str(report)
    assert "outside      the loop in generate: dynamo: Cannot access data pointer of Tensor" in text
    assert "If you" not in text and "To fix" not in text and "If you" not in str(report.to_dict())
    assert all(line[:1].strip() for line in text.split("\n")), "no line is the rest of another"


@pytest.mark.parametrize(("count", "text"), [(1, "0"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4 and 1 more")])
def test_few_names_are_listed(count: int, text: str) -> None:
    assert few([str(each) for each in range(count)]) == text
