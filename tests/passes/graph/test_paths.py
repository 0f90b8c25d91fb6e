"""clean_path: a path as the user knows it, from any way in which a capture writes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.passes.graph.annotations import clean_path


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self']", ""),
        ("L['self'].fc", "fc"),
        ("L['self']._modules['encoder']._modules['layer-1']", "encoder.layer-1"),
        ("L['self'].__dict__['_modules']['encoder']._modules['layer']._modules['3']", "encoder.layer.3"),
        ("L['self'].__dict__['_modules']['encoder'].mid_block.resnets.1", "encoder.mid_block.resnets.1"),
        ("L['self'].layers[0]._parameters['weight']", "layers.0.weight"),
        ('L["self"]._buffers["mean"]', "mean"),
        ("L['self']._module()._parameters['weight']", "weight"),
        ("L['fn'].__closure__[0].cell_contents._modules['fc']", "fc"),
        ("L['method'].__self__._modules['fc']", "fc"),
        ("G['model']._modules['fc']", "model.fc"),
        ("_empty_nn_module_stack_from_metadata_hook", ""),
        ("encoder.layer.3", "encoder.layer.3"),
        ("self.encoder", "encoder"),
        ("", ""),
    ],
)
def test_a_path_is_what_the_user_wrote(written: str, path: str) -> None:
    assert clean_path(written) == path
    assert clean_path(clean_path(written)) == path


class Breaks(nn.Module):
    """Two linears with a graph break between, on (2, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class OwnLookup(Breaks):
    """As diffusers' modules do: dynamo then goes through ``__dict__``."""

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        return super().__getattr__(name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Breaks(), OwnLookup()])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnModel(Model):
    def __getattr__(self, name: str) -> Tensor | nn.Module:
        return super().__getattr__(name)


@pytest.mark.parametrize("make", [Model, OwnModel, lambda: nn.Sequential(OwnModel())])
def test_the_pieces_of_a_model_have_the_paths_of_the_model(make) -> None:
    """Also where a class has its own ``__getattr__`` and where a frame was captured by itself; a policy finds them."""
    torch._dynamo.reset()
    model = make()
    # The head is called in a frame that dynamo gives up, and is no frame of its own: it runs in the net.
    paths = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name}
    policy = fxprec.Policy.preset("O1").override(modules={"*blocks.1.second": torch.float32})
    model = fxprec.convert(model, dtype=torch.bfloat16, capture="dynamo", policy=policy).module
    model(torch.randn(2, 4))
    report = fxprec.report(model)
    linears = {row.module: row.compute for graph in report.graphs for row in graph.rows if row.op == "linear"}
    assert linears.keys() == paths
    assert {path for path, dtype in linears.items() if dtype == "float32"} == {
        path for path in paths if path.endswith("blocks.1.second")
    }
    assert "__dict__" not in str(report) + str(report.nodes)
    assert "blocks.1.second" in fxprec.explain(model, "*blocks.1.second")
