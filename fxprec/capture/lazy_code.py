"""Makes graph modules of captured graphs: with the model's tensors, and without Python source until it is needed.

Writing and compiling a source costs about as much as tracing. A captured graph is rewritten, and what runs is the
program lifted from it: its own source is of use only to one who asks for the graph. ``torch.fx`` calls such a module
lazy: it writes its source when it is called or printed.

Weights stand at their paths in the model, but for names that a graph module cannot have: ``code``, ``graph`` and
``meta`` are attributes of every graph module; ``class``, or a name with a quote in it, is none in its source::

    code.weight        ->    code_.weight            heads.class.bias    ->    heads.class_.bias

The node carries the path in the model as ``meta["path"]``, and the graph module's state goes by the model's keys.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxprec.passes.graph.annotations import graph_notes, notes
from fxprec.passes.graph.exact_graph import LazyGraphModule, make_exact
from fxprec.passes.graph.subgraphs import every_graph

#: Attributes of any module, and of graph modules.
_OF_MODULES: Final = frozenset(dir(nn.Module()))
_OF_GRAPHS: Final = frozenset(dir(LazyGraphModule({}, Graph())))
#: What torch.fx would print into its source unescaped; and an underscore before what looks as if it had been escaped
#: here (``_x1f_``), so that no two names become one.
_UNPRINTABLE: Final = re.compile(r'["\\\x00-\x1f\x7f]|_(?=x[0-9a-f]{2}_)')


def attribute_path(path: str) -> str:
    """Return the path in a graph module of a tensor of the model: no two have the same."""
    first, dot, rest = path.partition(".")
    return _free_name(first, _OF_GRAPHS) + dot + (".".join(map(_free_name, rest.split("."))) if rest else "")


# The same few names stand in layer after layer.
@functools.lru_cache(4096)
def _free_name(name: str, reserved: frozenset[str] = _OF_MODULES) -> str:
    """Return a name that a graph module can have: ``code`` -> ``code_``, and so ``code_`` -> ``code__``."""
    bare = name.rstrip("_")
    if name in reserved or bare in reserved or keyword.iskeyword(bare):
        name += "_"
    return _UNPRINTABLE.sub(lambda match: f"_x{ord(match[0]):02x}_", name)


def keep_model_keys(gm: GraphModule, renamed: Mapping[str, str]) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of a graph module go by the keys of the model.

    Args:
        renamed: path in the graph module -> path in the model, of the tensors where they differ.
    """
    if renamed:
        gm.register_state_dict_post_hook(_Renaming(dict(renamed)))
        gm.register_load_state_dict_pre_hook(_Renaming({path: target for target, path in renamed.items()}))


class _Renaming:
    """Gives keys of a state dict other names, in place. Hooks of two kinds call it."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        items = [*state.items()]
        state.clear()
        for key, value in items:
            path = key.removeprefix(prefix) if key.startswith(prefix) else ""
            state[prefix + self._names[path] if path in self._names else key] = value


def graph_module_with(tensors: Mapping[str, Tensor], graph: Graph, name: str) -> GraphModule:
    """Return a graph module of this name that reads these tensors, and writes its source when it is needed.

    Parameters and modules are in the order of the mapping, at paths that a graph module can have.
    """
    gm = LazyGraphModule({}, Graph(), name)
    targets = {path: attribute_path(path) for path in tensors}
    for path, tensor in tensors.items():
        attach(gm, targets[path], tensor)
    for node in graph.find_nodes(op="get_attr", sort=False):
        path = str(node.target)
        if targets[path] != path:
            node.target, notes(node).path = targets[path], path
    gm.graph = graph
    return gm


def attach(root: nn.Module, path: str, value: Tensor) -> None:
    """Make ``root.a.b.weight`` be ``value`` itself, with bare modules on the way."""
    *parts, leaf = path.split(".")
    for part in parts:
        if part not in root._modules:
            root._modules[part] = nn.Module()
        root = root._modules[part]  # type: ignore[assignment]
    # Into the dict itself: register_parameter refuses the name of an attribute, and calls hooks of the user's.
    kind = root._parameters if isinstance(value, nn.Parameter) else root._buffers
    kind[leaf] = value  # type: ignore[assignment]


def with_code(gm: GraphModule) -> None:
    """Write the source of a graph module, and of the bodies that it calls, now and whenever one is recompiled.

    They become exact graph modules (``make_exact``), in place. Ops of fused regions stay lazy: mostly a kernel runs.
    """
    for each in (*every_graph(gm),):
        if not graph_notes(each).region:
            make_exact(each)
