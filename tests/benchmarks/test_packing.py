"""``python -m benchmarks packing``: from which read of a weight on packing it has paid, and what a step gains."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import packing
from fxprec.kernels.cpu.packed import can_pack


def test_packing_pays_after_as_many_reads_as_make_up_for_it() -> None:
    product = packing.Product(plain=5.0, packed=3.0, pack=4.0)
    assert product.pays_after == 2.0
    assert [product.of(reads) for reads in (1, 2, 3, 4)] == [5.0, 10.0, 15.0, 5.0 + 4.0 + 3 * 3.0]
    assert packing.Product(5.0, 5.0, 1.0).pays_after == math.inf


def test_a_step_takes_all_products_and_packs_what_gains() -> None:
    gains, loses = packing.Product(5.0, 3.0, 4.0), packing.Product(5.0, 6.0, 1.0)
    assert packing.over_plain([(gains, loses, 10.0)], 1) == 1.0
    assert packing.over_plain([(gains, loses, 10.0)], 4) == pytest.approx((18 + 20 + 40) / (20 + 20 + 40))


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no oneDNN with bfloat16 here")
def test_a_run_prints_both_products_and_what_steps_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert packing.main(["--check"]) == 0
    told = capsys.readouterr().out
    assert "8 x 32, 16" in told and " 4 micro-batches: " in told and "pays after" in told


def test_where_nothing_can_be_packed_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing, "can_pack", lambda dtype: False)
    assert packing.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("no packed weights here: ")
