"""``python -m benchmarks attention``: each way with its errors beside torch's kernel, and what it keeps."""

from __future__ import annotations

import pytest

from benchmarks import attention
from benchmarks.attention import Size, measure


def test_what_is_kept_and_how_exact_it_is() -> None:
    found = measure(Size(2, 4, 2, 64, 16), ["torch", "products", "recomputed"], 0.0)
    norms, probabilities = 4 * 2 * 4 * 64, 2 * 2 * 4 * 64 * 64
    assert found["torch"].kept == norms and found["recomputed"].kept == 0
    assert found["products"].kept == probabilities
    for way in found.values():
        assert 0 < way.output < 0.02 and 0 < way.gradients < 0.02
        assert way.forward > 0 and way.backward > 0


def test_each_way_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--check"]) == 0
    printed = capsys.readouterr().out
    assert "2 x 2 (1) x 9 x 8 causal" in printed
    assert all(name in printed for name in ("torch", "products", "recomputed"))


def test_without_a_kernel_of_torchs_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "serves", lambda *_: False)
    assert attention.main(["--check"]) == 1
    assert "no fused attention" in capsys.readouterr().out


def test_without_a_compiler_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "why_not", lambda: "no compiler")
    assert attention.main(["--check"]) == 0
    printed = capsys.readouterr().out
    assert "nothing is compiled: no compiler" in printed and "compiled  " not in printed
