"""Which methods can be named, and what is said of those that cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.checks import named_methods
from fxprec.model.method import MethodName


class Coder(nn.Module):
    size = 3

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.table = {"a": 1}
        self.of_instance = lambda x: self.down(x)

    def encode(self, x):
        return self.down(x)

    def forward(self, x):
        return self.up(self.encode(x))

    @staticmethod
    def scale(x):
        return x

    @classmethod
    def make(cls):
        return cls()

    @property
    def first(self):
        return self.down


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = Coder()
        self.blocks = nn.ModuleList([Coder()])
        self.scripted = torch.jit.script(nn.Linear(2, 2))
        self.traced = torch.fx.symbolic_trace(nn.Linear(2, 2))
        self.strangers = [nn.Linear(2, 2)]

    @property
    def main(self):
        return self.vae

    @property
    def stranger(self):
        return self.strangers[0]

    def forward(self, x):
        return self.vae(x)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((), ()),
        (("vae.encode",), ("vae.encode",)),
        (["vae"], ("vae.forward",)),
        (("vae.forward", "vae.down"), ("vae.forward", "vae.down.forward")),
        (("blocks.0.encode",), ("blocks.0.encode",)),
        (("main.encode", "vae.first"), ("vae.encode", "vae.down.forward")),  # properties that give submodules
        (("vae.of_instance",), ("vae.of_instance",)),
    ],
)
def test_each_method_has_one_spelling(given, names):
    assert named_methods(Outer(), given) == names
    assert [str(MethodName.parse(name)) for name in names] == list(names)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("encode", TypeError, r"methods='encode': give a tuple of names, such as methods=\('encode', 'vae.decode'\)"),
        ((len,), TypeError, "give a tuple of names"),
        (("vae.encoed",), ValueError, r"'vae.encoed': Outer.vae has no method 'encoed' \(did you mean 'encode'\?\)"),
        (("vea.encode",), ValueError, r"'vea.encode': Outer has no submodule 'vea' \(did you mean 'vae'\?\)"),
        (("forward",), ValueError, "forward itself is always converted; leave it out"),
        (("vae.scale",), ValueError, "Outer.vae.scale is a static method, which does not run on the module"),
        (("vae.make",), ValueError, "Outer.vae.make is a class method"),
        (("vae.size",), ValueError, r"Outer.vae.size is no method but an object \(int\)"),
        (("vae.table",), ValueError, r"Outer.vae.table is no method but an object \(dict\)"),
        (("vae.parameters",), ValueError, "parameters is a method of every nn.Module"),
        (("vae", "vae"), ValueError, "'vae' twice, vae.forward: name it once"),
        (("vae", "vae.forward"), ValueError, "'vae' and 'vae.forward' are the same method, vae.forward"),
        (("stranger",), ValueError, "'stranger' is a module, but no submodule of Outer"),
        (("scripted",), fxprec.ConversionError, "is a TorchScript module: name a method of the model that calls it"),
        (("traced",), fxprec.ConversionError, "is a GraphModule, whose class fx writes to"),
    ],
)
def test_what_cannot_be_named_is_refused_before_anything_changes(given, kind, message):
    model = Outer()
    before = dict(vars(model)), dict(vars(model.vae)), type(model.vae)
    with pytest.raises(kind, match=message):
        fxprec.convert(model, methods=given)
    assert (dict(vars(model)), dict(vars(model.vae)), type(model.vae)) == before and type(model) is Outer


def test_a_property_that_is_no_module_is_refused():
    class Sized(Coder):
        @property
        def width(self):
            return 8

    with pytest.raises(ValueError, match=r"Sized\.width is a property"):
        named_methods(Sized(), ("width",))


def test_a_module_of_another_conversion_is_refused():
    model = fxprec.convert(Outer(), methods=("vae.encode",)).module
    for part in (model.vae, nn.Sequential(model.vae)):
        with pytest.raises(fxprec.ConversionError, match=r"part of a converted model.*revert that model first"):
            fxprec.convert(part)
    fxprec.revert(model)
    fxprec.convert(model.vae)
    with pytest.raises(fxprec.ConversionError, match="'vae' is converted already"):
        fxprec.convert(model, methods=("vae.encode",))
