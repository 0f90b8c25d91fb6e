"""The text of a lock: what has a line, that it can be read back, and what a review of a change says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxprec
from fxprec.inspection.lock import Locked, Name, file_text, parse_file, review

BF16 = "bfloat16 -> bfloat16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.parts = nn.ModuleDict({"a": nn.Linear(6, 6), "7": nn.LayerNorm(6)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)).view(-1, 3, 2).flatten(1)
        x = self.parts["7"](x + self.parts["a"](x) + 1)
        values, positions = x.max(1, keepdim=True)
        return (values * positions.sum()).softmax(-1)


def locked(model: type[nn.Module] = Net, policy: fxprec.Policy | None = None, **options: Any) -> Locked:
    options.setdefault("dtype", torch.bfloat16)
    converted = fxprec.convert(model(), (torch.randn(2, 6),), policy=policy, **options)[0]
    return Locked.of(converted)


def name(module: str, node: str) -> Name:
    return Name("forward(x)", module, node)


def test_what_has_a_line() -> None:
    found = locked()
    assert found.settings == "O1, bfloat16, mincut"
    assert [found.dtypes[name(f"layers.{n}", "linear")] for n in range(4)] == [BF16] * 4
    assert {name("-", "gelu"), name("-", "gelu_2"), name("-", "gelu_4"), name("-", "add"), name("-", "add_2")} <= {
        *found.dtypes
    }
    assert found.dtypes[name("-", "cast of x")] == "float32 -> bfloat16"
    assert found.dtypes[name("parts.7", "layer_norm")].startswith("float32 -> ")
    assert found.why[name("-", "softmax")].startswith("full: exponentials")
    words = {each.node for each in found.dtypes}
    assert not words & {"view", "flatten", "getitem", "sum"}, "no views, no integers"
    assert not any("weight" in each.node for each in found.dtypes), "no shadows"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_it_can_be_read_back(level: str) -> None:
    found = {
        "a": locked(level=level),
        "b c": locked(level=level, fuse=False if level == "O0" else "aten"),
        "bare": Locked("", {}, {}),
    }
    text = file_text(found, "2.0")
    assert text.count("\n  " + ("float32 -> float32  " if level == "O0" else BF16) + "  layers.0-3  linear\n") == 2
    read = parse_file(text)
    assert file_text(read, "2.0") == text and not any(line != line.rstrip() for line in text.splitlines())
    for each, before in found.items():
        assert (read[each].settings, read[each].dtypes) == (before.settings, before.dtypes)
        assert not review(read[each], before) and not review(before, read[each])


def test_the_nodes_of_regions_have_lines() -> None:
    plain, fused = locked(fuse=False), locked(fuse="aten")
    assert {each for each in plain.dtypes if "cast" not in each.node} == {
        each for each in fused.dtypes if "cast" not in each.node
    }


def test_a_review() -> None:
    policy = fxprec.Policy.preset("O1").override(modules={"layers.[013]": torch.float32})
    before, after = locked(), locked(policy=policy)
    found = review(before, after)
    assert found[0] == "forward(x)"
    position = found.index("  layers.0-1,3  linear: bfloat16 -> bfloat16, now float32 -> float32")
    assert found[position + 1] == "      full: override modules 'layers.[013]' = float32"
    assert "  - -  cast of x: float32 -> bfloat16" in found
    back = review(after, before)
    assert "  layers.0-1,3  linear: float32 -> float32, now bfloat16 -> bfloat16" in back
    assert "  + -  cast of x: float32 -> bfloat16" in back
    assert review(before, locked(level="O2"))[0] == "settings: O1, bfloat16, mincut became O2, bfloat16, mincut"


def test_a_layer_more() -> None:
    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers.append(nn.Linear(6, 6))

    found = review(locked(), locked(More))
    assert "  + layers.4  linear: bfloat16 -> bfloat16" in found and "  + -  gelu_5: bfloat16 -> bfloat16" in found
    assert not any("layers.0" in line for line in found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("  a -> b  c  d\n", 1),
        ("[x] O1\n<<<<<<< ours\n", 2),
        ("[x] O1\nforward(x)\n\n  bfloat16\n", 4),
        ("# a comment\nnonsense\n", 2),
    ],
)
def test_what_is_no_lock(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"line {line}, .*is none of a precision lock"):
        parse_file(text)


def test_what_is_not_converted() -> None:
    with pytest.raises(fxprec.ConversionError):
        Locked.of(nn.Linear(2, 2))
    with pytest.raises(fxprec.NotCapturedError):
        Locked.of(fxprec.convert(nn.Linear(2, 2), capture="dynamo")[0])
