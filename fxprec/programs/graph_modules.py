"""What users get for a captured graph: a graph module that stands on its own, in every copy of it too.

It reads the model's own parameters and buffers, under the model's keys where a graph module can have them (see
``capture/lazy_code``), and casts explicitly. Regions that recompute their activations do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, dtype, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxprec.capture.lazy_code import attach, attribute_path, keep_model_keys, with_code
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.passes.graph.annotations import Op, Precision, Rule, notes, weight_path
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.insert_casts import actual_dtype
from fxprec.programs.call_form import Argument, CallForm, Made, Result, Step, Way, check_arguments, restored
from fxprec.programs.program import run_checkpoints


def made_presentable(
    gm: GraphModule, model: nn.Module, low: dtype | None = None, form: CallForm | None = None
) -> GraphModule:
    """Finish a graph of ``model`` in place for its users; returns it.

    Args:
        gm: the rewritten graph.
        model: whose graph it is.
        low: of its results, those of this dtype are to be FP32, as the model gives them.
        form: how it is to be called, and what it is to give; None: as it was captured.
    """
    _update_dtypes_of_values(gm)
    # Each step is marked in ``meta``: the model keeps the graph, and gives the same one again. First the form, then the
    # results: what restores them reads the placeholders, which the form replaces.
    if form is not None and "formed" not in gm.meta:
        gm.meta["formed"] = True
        _Writer(gm, model, form).write()
    if low is not None and "restored" not in gm.meta:
        gm.meta["restored"] = True
        _restore_results(gm, low)
    if "presented" not in gm.meta:
        gm.meta["presented"] = True
        for each in every_graph(gm):
            run_checkpoints(each.graph)
            # It repeats "val", and where it is there torch's split_module makes inputs of symbolic sizes.
            for node in each.graph.nodes:
                node.meta.pop("example_value", None)
        _take_over_state(gm, model)
        with_code(gm)
    else:
        _rebind_weights(gm, model)
    return gm


def _update_dtypes_of_values(gm: GraphModule) -> None:
    """Cast ``meta["val"]``, which has the dtypes before the rewrite, to those after it: printed graphs show them."""
    for node in gm.graph.nodes:
        precision, value = notes(node).precision, node.meta.get("val")
        if precision.output is None or not isinstance(value, Tensor):
            continue
        if value.dtype in (torch.float32, *LOW_DTYPES) and value.dtype != precision.output:
            with getattr(value, "fake_mode", contextlib.nullcontext()), torch.no_grad():
                node.meta["val"] = value.to(precision.output)


def _restore_results(gm: GraphModule, low: dtype) -> None:
    """Give results back as FP32, of graphs that were captured with low weights (O3, frozen models)."""
    end, inputs = gm.graph.output_node(), gm.graph.find_nodes(op="placeholder")
    done: dict[Node, Node] = {}

    def widened(node: Node) -> Node:
        if node not in done:
            with gm.graph.inserting_before(end):
                done[node] = gm.graph.call_function(restored, (node, low, *inputs))
        return done[node]

    end.args = map_arg(end.args, lambda node: widened(node) if actual_dtype(node) in (low, None) else node)
    gm.recompile()


#: Annotation of the nodes that this file adds, which take and give no floats.
_OF_CALL: Final = Precision.arriving(None, None, Rule.KEEP, "no floats")


class _Writer:
    """Changes a graph that takes and gives tensors into one that is called as the method is.

    ::

        %l_x_ = placeholder                                 %x = placeholder
        %l_batch_mask_ = placeholder                        %batch = placeholder
        %linear = linear(%l_x_, %w)                 ->      %batch_mask = getitem(%batch, 'mask')
        %mul = mul(%linear, %l_batch_mask_)                 %linear = linear(%x, %w)
        return (%linear, %mul)                              %mul = mul(%linear, %batch_mask)
                                                            return {'hidden': [%linear], 'logits': %mul}
    """

    def __init__(self, gm: GraphModule, model: nn.Module, form: CallForm) -> None:
        self._gm, self._model, self._form = gm, model, form
        self._reached: dict[tuple[str, tuple[Step, ...]], Node] = {}

    def write(self) -> None:
        """Write the graph in place."""
        gm, form = self._gm, self._form
        olds = gm.graph.find_nodes(op="placeholder")
        direct = {
            way.name: old for old, way in zip(olds, form.inputs, strict=True) if isinstance(way, Way) and not way.steps
        }
        # All that takes arguments apart stands before the first node: whatever reads it comes later.
        first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        with gm.graph.inserting_before(first):
            for argument in form.arguments:
                self._reached[argument.name, ()] = self._placeholder(argument, direct.get(argument.name), first)
            looked_at = [each for each in form.arguments if each.default or each.expected not in ("Tensor", None)]
            # What is no tensor, or must be of certain sizes, is checked by a node: copies and traces check it, too.
            if looked_at:
                given = {each.name: self._reached[each.name, ()] for each in looked_at}
                gm.graph.call_function(check_arguments, (given, {each.name: each.expected for each in looked_at}))
            # The graph's own inputs give way to what is reached from the method's arguments.
            for old, way in zip(olds, form.inputs, strict=True):
                if not isinstance(way, Way | Tensor):
                    way = _built_in(old, way)
                if not old.users and isinstance(way, Tensor):
                    gm.graph.erase_node(old)
                    continue
                new = self._at(way) if isinstance(way, Way) else self._constant(way)
                if new is not old:
                    new.meta = {**old.meta, **new.meta}
                    old.replace_all_uses_with(new)
                    gm.graph.erase_node(old)
        if form.output is not None:
            self._write_output(*form.output)
        for node in gm.graph.nodes:
            if node.op != "output":
                node.meta.setdefault("precision", _OF_CALL)
        gm.recompile()

    def _placeholder(self, argument: Argument, old: Node | None, first: Node) -> Node:
        if old is not None and old.target == argument.name:
            old.args = argument.default
            first.prepend(old)
            return old
        return self._gm.graph.create_node("placeholder", argument.name, argument.default)

    def _at(self, way: Way) -> Node:
        """Return the node of what is reached from an argument."""
        if (way.name, way.steps) not in self._reached:
            take, key = way.steps[-1]
            inner = self._at(Way(way.name, way.steps[:-1]))
            node = self._gm.graph.call_function(take, (inner, key))
            if take in (getitem, getattr):
                notes(node).op = Op(take.__name__)
            self._reached[way.name, way.steps] = node
        return self._reached[way.name, way.steps]

    def _constant(self, value: Tensor) -> Node:
        path = next(name for n in range(10**6) if not hasattr(self._gm, name := f"_tensor_constant{n}"))
        attach(self._gm, path, value)
        node = self._gm.graph.get_attr(path)
        node.meta.update(kind="constant", path=path)
        return node

    def _write_output(self, output: Any) -> None:
        end = self._gm.graph.output_node()
        results: Any = end.args[0]
        # A weight that the method returns is read from the model, like those that it computes with.
        paths = {id(tensor): path for path, tensor in (*self._model.named_buffers(), *self._model.named_parameters())}

        def built(part: Any) -> Any:
            if isinstance(part, Result):
                return results[part.number]
            if isinstance(part, Way):
                return self._at(part)
            if isinstance(part, Tensor):
                return weight(part)
            if isinstance(part, Made):
                args, kwargs = tuple(map(built, part.args)), {key: built(each) for key, each in part.kwargs.items()}
                return self._gm.graph.call_function(part.function, args, kwargs)
            if isinstance(part, Mapping):
                return {key: built(each) for key, each in part.items()}
            return type(part)(map(built, part)) if type(part) in (tuple, list) else part

        def weight(tensor: Tensor) -> Node:
            path = paths[id(tensor)]
            attach(self._gm, attribute_path(path), tensor)
            node = self._gm.graph.get_attr(attribute_path(path))
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            node.meta.update(kind=kind, path=path, dtype=tensor.dtype)
            return node

        with self._gm.graph.inserting_before(end):
            end.args = (built(output),)


def _built_in(node: Node, value: float) -> Tensor:
    """Put the number in the place of each ``input.item()``; return it as a tensor for what else reads the input.

    dynamo passes a float attribute of a module as a 0-dim tensor.
    """
    for item in [user for user in node.users if user.op == "call_method" and user.target == "item"]:
        for reader in [*item.users]:
            reader.args = map_arg(reader.args, lambda each, item=item: value if each is item else each)
            reader.kwargs = map_arg(reader.kwargs, lambda each, item=item: value if each is item else each)
        item.graph.erase_node(item)
    return torch.tensor(value, dtype=torch.float64)


def _rebind_weights(gm: GraphModule, model: nn.Module) -> None:
    """Have the graph read the tensors that are in the model now."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for node in gm.graph.find_nodes(op="get_attr"):
        path = weight_path(node)
        if notes(node).kind in ("parameter", "buffer") and path in tensors:
            attach(gm, attribute_path(path), tensors[path])


def _take_over_state(gm: GraphModule, model: nn.Module) -> None:
    """Give the graph the model's keys: both names of a tied weight, no buffer that the model does not save."""
    # Of tied weights a graph reads one name; a state dict of the model has both.
    held = {id(tensor) for tensor in (*gm.parameters(), *gm.buffers())}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    targets = {path: attribute_path(path) for path, tensor in named if id(tensor) in held}
    for path, tensor in named:
        if path in targets:
            attach(gm, targets[path], tensor)
    saved = {targets.get(path) for path in _saved(model)}
    for prefix, module in gm.named_modules():
        for name in module._buffers:
            if (f"{prefix}.{name}" if prefix else name) not in saved:
                module._non_persistent_buffers_set.add(name)
    keep_model_keys(gm, {target: path for path, target in targets.items() if target != path})


def _saved(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the buffers that are in the model's state."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name
