"""What the top floor relies on of private names of torch, a test a name."""

from __future__ import annotations

import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from fxprec import torch_internals as of_fxprec
from private_names import contract


@contract("fxprec", "BatchNorm", "NormBase", "input_check_of", "checks_of_input")
def test_norms_are_known_by_their_class_and_check_their_input() -> None:
    kinds = {nn.BatchNorm1d: True, nn.BatchNorm2d: True, nn.BatchNorm3d: True, nn.SyncBatchNorm: True}
    assert {kind: issubclass(kind, of_fxprec.BatchNorm) for kind in kinds} == kinds
    assert not issubclass(nn.InstanceNorm2d, of_fxprec.BatchNorm) and issubclass(nn.InstanceNorm2d, of_fxprec.NormBase)
    for norm in (nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3)):
        low, high, words = of_fxprec.checks_of_input[of_fxprec.input_check_of(norm)]
        for rank in range(1, 7):
            x = (
                torch.ones(2, 3, 2, 2, 2, 2).reshape(2, 3, *[1] * (rank - 3), -1)
                if rank > 2
                else torch.ones([3] * rank)
            )
            if low <= rank <= high:
                norm(x)
            else:
                with pytest.raises(ValueError, match=f"expected {words} input"):
                    norm(x)


@contract("fxprec", "OpMode", "aten_to_copy", "aten_foreach_copy_", "dispatch_mode_stack")
def test_a_mode_of_our_own_sees_casts() -> None:
    seen: list[object] = []

    class Mode(of_fxprec.OpMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode() as mode:
        assert of_fxprec.dispatch_mode_stack() == [mode]
        x.to(torch.bfloat16)
        of_fxprec.foreach_copy_([x], [x])
    assert seen == [of_fxprec.aten_to_copy, of_fxprec.aten_foreach_copy_]
    assert of_fxprec.dispatch_mode_stack() == []


@contract("fxprec", "aten_flash_attention_for_cpu")
def test_attention_on_a_cpu_gives_its_norms_too() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    out, norms = of_fxprec.aten_flash_attention_for_cpu(q, k, k, 0.0, False, scale=0.5)
    torch.testing.assert_close(norms, (q @ k.mT * 0.5).logsumexp(-1))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k, scale=0.5))


@contract("fxprec", "amp_unscale_")
def test_gradients_are_unscaled_and_looked_at() -> None:
    found, gradient = torch.zeros(1), torch.tensor([2.0, 4.0])
    of_fxprec.amp_unscale_([gradient], found, torch.tensor(0.5))
    assert gradient.tolist() == [1.0, 2.0] and found.item() == 0
    of_fxprec.amp_unscale_([gradient, torch.tensor([float("inf")])], found, torch.tensor(0.5))
    assert found.item() == 1


@contract("fxprec", "amp_update_scale_")
def test_a_scale_moves() -> None:
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    of_fxprec.amp_update_scale_(scale, tracker, torch.zeros(1), 2.0, 0.5, 1)
    assert (scale.item(), tracker.item()) == (16.0, 0)
    of_fxprec.amp_update_scale_(scale, tracker, torch.ones(1), 2.0, 0.5, 1)
    assert scale.item() == 8.0


@contract("fxprec", "foreach_add_", "foreach_sub_", "foreach_copy_", "foreach_norm")
def test_lists_of_tensors_are_computed_at_once() -> None:
    x, y = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    of_fxprec.foreach_add_([x], 2)
    of_fxprec.foreach_sub_([x], [torch.ones(2)])
    of_fxprec.foreach_copy_([y], [x])
    assert x.tolist() == y.tolist() == [2.0, 2.0]
    assert of_fxprec.foreach_norm([y], 2, torch.float32)[0].dtype is torch.float32


@contract("fxprec", "fused_adam_", "fused_adamw_", "fused_sgd_")
def test_fused_optimizers_unscale_and_skip_by_themselves() -> None:
    def lists(n: int) -> list[list[Tensor]]:
        return [[torch.ones(2)], [torch.full((2,), 4.0)], *([torch.zeros(2)] for _ in range(n))]

    common = {"weight_decay": 0.0, "lr": 0.5, "maximize": False, "grad_scale": torch.tensor(2.0)}
    for update in (of_fxprec.fused_adam_, of_fxprec.fused_adamw_):
        for found in (0.0, 1.0):
            params, grads, m, v = lists(2)
            update(params, grads, m, v, [], [torch.tensor(1.0)], amsgrad=False, beta1=0.0, beta2=0.0, eps=0.0,
                   found_inf=torch.tensor(found), **common)  # fmt: skip
            assert params[0].tolist() == [1.0 if found else 0.5] * 2 and m[0].tolist() == [0.0 if found else 2.0] * 2
    for found in (0.0, 1.0):
        params, grads, momentum = lists(1)
        of_fxprec.fused_sgd_(params, grads, momentum, momentum=0.5, dampening=0.0, nesterov=False, is_first_step=True,
                             found_inf=torch.tensor(found), **common)  # fmt: skip
        assert params[0].tolist() == [1.0 if found else 0.0] * 2


@contract("fxprec", "flatten_dense_tensors", "unflatten_dense_tensors")
def test_tensors_go_into_one_and_out_of_it() -> None:
    parts = [torch.ones(2, 2), torch.zeros(3)]
    flat = of_fxprec.flatten_dense_tensors(parts)
    assert flat.shape == (7,)
    assert all(map(torch.equal, of_fxprec.unflatten_dense_tensors(flat, parts), parts))


@contract(
    "fxprec", "tree_flatten", "tree_unflatten", "tree_leaves", "tree_map_only", "treespec_dumps", "treespec_loads"
)
def test_trees_are_flattened() -> None:
    tree = {"a": [1, (2.0,)], "b": None}
    leaves, spec = of_fxprec.tree_flatten(tree)
    assert of_fxprec.treespec_loads(of_fxprec.treespec_dumps(spec)) == spec
    assert of_fxprec.tree_leaves(tree) == leaves and of_fxprec.tree_unflatten(leaves, spec) == tree
    assert of_fxprec.tree_map_only(float, lambda x: x + 1, tree) == {"a": [1, (3.0,)], "b": None}


@contract("fxprec", "view_base", "sparse_values")
def test_tensors_tell_what_they_are_made_of() -> None:
    x = torch.ones(2, requires_grad=True)
    assert of_fxprec.view_base(x[:1]) is x and of_fxprec.view_base(x) is None
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True)
    of_fxprec.sparse_values(sparse).mul_(2)
    assert not sparse.is_coalesced() and sparse.to_dense().tolist() == [6.0, 0.0]


@contract("fxprec", "current_autograd_node")
def test_the_node_of_a_backward_is_known() -> None:
    nodes: list[object] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_hook(lambda _: nodes.append(of_fxprec.current_autograd_node()))
    y.backward()
    assert nodes[0] is not None and of_fxprec.current_autograd_node() is None


@contract("fxprec", "run_before")
def test_the_highest_number_runs_first() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    early, late = x * 2, x * 3
    for name, y in (("early", early), ("late", late)):
        y.grad_fn.register_hook(lambda *_, name=name: order.append(name))  # type: ignore[union-attr]
    total = early + late
    total.backward(retain_graph=True)
    of_fxprec.run_before(early.grad_fn, 2**64 - 2)
    total.backward()
    assert order == ["late", "early", "early", "late"]


@contract("fxprec", "preserve_version_counter")
def test_writes_that_a_pending_backward_does_not_hear_of() -> None:
    x = torch.ones(2, requires_grad=True)
    read = torch.full((2,), 3.0)
    y = (x * read).sum()
    with of_fxprec.preserve_version_counter((read,)):
        read.add_(1).sub_(1)
    y.backward()
    assert read._version == 0 and x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    with of_fxprec.preserve_version_counter(()):
        pass


@contract("fxprec", "backward_hooks_of", "late_hooks_of")
def test_hooks_on_gradients_are_seen() -> None:
    x = torch.ones(1, requires_grad=True)
    assert not of_fxprec.backward_hooks_of(x) and not of_fxprec.late_hooks_of(x)
    x.register_hook(print)
    x.register_post_accumulate_grad_hook(print)
    assert [*of_fxprec.backward_hooks_of(x).values()] == [*of_fxprec.late_hooks_of(x).values()] == [print]


@contract("fxprec", "fx_tracer_file")
def test_the_functions_that_fx_puts_in_the_places_of_others_are_from_its_file_and_name_them() -> None:
    import math

    seen: list[Any] = []
    torch.fx.symbolic_trace(lambda x: (seen.append(math.sqrt), x)[1])
    assert seen[0].__code__.co_filename == of_fxprec.fx_tracer_file
    assert seen[0].__wrapped__ is math.sqrt


@contract("fxprec", "global_hooks")
def test_hooks_of_all_modules_are_seen() -> None:
    from torch.nn.modules import module

    registers = (
        module.register_module_forward_hook,
        module.register_module_forward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_full_backward_pre_hook,
    )
    for (name, hooks), register in zip(of_fxprec.global_hooks.items(), registers, strict=True):
        handle = register(print)
        assert [*hooks.values()] == [print], name
        handle.remove()
        assert not any(of_fxprec.global_hooks.values())


@contract("fxprec", "grad_modes")
def test_a_grad_mode_is_set_through_these() -> None:
    called: list[str] = []
    patches = [(owner, name, getattr(owner, name)) for owner, name in of_fxprec.grad_modes]
    for owner, name, original in patches:
        setattr(owner, name, lambda *args, original=original, name=name: (called.append(name), original(*args))[1])
    try:
        with torch.no_grad():
            pass
        with torch.inference_mode():
            pass
    finally:
        for owner, name, original in patches:
            setattr(owner, name, original)
    assert called == ["_set_grad_enabled"] * 2 + ["_InferenceMode"]


@contract("fxprec", "for_fx")
def test_what_torch_fx_asks_about_is_a_pair_of_classes() -> None:
    assert isinstance(torch.ops.higher_order.cond, of_fxprec.for_fx)
    assert not isinstance(torch.add, of_fxprec.for_fx) and not isinstance(F.relu, of_fxprec.for_fx)


@contract("fxprec", "wrapped_functions")
def test_wrapped_functions_are_leaves_of_a_trace() -> None:
    owner, attribute, wrapped = of_fxprec.wrapped_functions()
    scope = {"leaf": lambda x: x + 1}
    exec("import torch\ntorch.fx.wrap('leaf')\ndef f(x): return leaf(x)", scope)
    try:
        assert wrapped[id(scope), "leaf"] is scope and getattr(owner, attribute) is wrapped
        assert [node.target for node in torch.fx.symbolic_trace(scope["f"]).graph.nodes][1] is scope["leaf"]
    finally:
        del wrapped[id(scope), "leaf"]


@contract("fxprec", "node_name_of")
def test_nodes_are_named_after_what_they_call() -> None:
    graph = torch.fx.Graph()
    assert of_fxprec.node_name_of(graph, "addCMul") == "add_cmul"
    assert graph.call_function(torch.add).name == of_fxprec.node_name_of(graph, "add")


@contract("fxprec", "forget_tracer")
def test_a_graph_says_who_traces_it_again() -> None:
    class Tracer(torch.fx.Tracer):
        pass

    graph = Tracer().trace(lambda x: x + 1)
    assert graph._tracer_cls is Tracer
    of_fxprec.forget_tracer(graph)
    assert type(pickle.loads(pickle.dumps(graph))) is torch.fx.Graph  # a local class could not be pickled


@contract("fxprec", "was_called", "set_called", "is_wrapped_by_scheduler")
def test_schedulers_ask_whether_an_optimizer_has_stepped() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert of_fxprec.was_called(optimizer) is None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert of_fxprec.is_wrapped_by_scheduler(optimizer.step)
    of_fxprec.set_called(optimizer, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of torch, that the optimizer has not stepped
        schedule.step()
    of_fxprec.set_called(optimizer, None)
    assert of_fxprec.was_called(optimizer) is None
    optimizer.step()
    assert of_fxprec.was_called(optimizer) is True


@contract("fxprec", "step_hooks")
def test_hooks_of_an_optimizer_are_seen() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert of_fxprec.step_hooks(optimizer) == ({}, {})
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(repr)
    assert [[*hooks.values()] for hooks in of_fxprec.step_hooks(optimizer)] == [[print], [repr]]


@contract("fxprec", "has_scaled", "place_scale", "scale_names", "growth_tracker", "scaler_states", "set_scaler_states",
          "fresh_states")  # fmt: skip
def test_a_scaler_keeps_its_scale_and_what_it_knows_of_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert not of_fxprec.has_scaled(scaler)
    scaler.scale(torch.ones(()))
    assert of_fxprec.has_scaled(scaler)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    of_fxprec.place_scale(scaler, torch.device("cpu"))
    scale, tracker = (getattr(scaler, name) for name in of_fxprec.scale_names)
    assert scale.item() == 8.0 and tracker.item() == of_fxprec.growth_tracker(scaler) == 0
    of_fxprec.place_scale(scaler, torch.device("cpu"))
    assert getattr(scaler, of_fxprec.scale_names[0]) is scale
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    states = of_fxprec.scaler_states(scaler)
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED and [*states[id(optimizer)]["found_inf_per_device"]]
    of_fxprec.set_scaler_states(scaler, of_fxprec.fresh_states())
    assert of_fxprec.scaler_states(scaler)[id(optimizer)]["stage"] is OptState.READY
    scaler.unscale_(optimizer)  # allowed again


@contract("fxprec", "running_ddp", "root_mesh", "sharded_modules")
def test_data_parallel_wrappers_are_seen() -> None:
    assert of_fxprec.running_ddp() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seen: list[Any] = []
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model[1].register_forward_hook(lambda *_: seen.append(of_fxprec.running_ddp()))
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(torch.ones(1, 2))
        assert seen == [parallel] and of_fxprec.running_ddp() is None

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        assert of_fxprec.root_mesh(mesh["a"]) == mesh == of_fxprec.root_mesh(mesh)
        before = of_fxprec.sharded_modules()
        sharded = nn.Linear(2, 2)
        fully_shard(sharded, mesh=mesh["a"])
        assert [each for each in of_fxprec.sharded_modules() if each not in before] == [sharded]
        del sharded
        gc.collect()  # FSDP's states and their modules refer to each other
        assert of_fxprec.sharded_modules() == before
    finally:
        dist.destroy_process_group()


@contract("fxprec", "end_allocation")
def test_an_allocation_to_a_graph_is_ended_where_there_is_cuda() -> None:
    """What it does is seen by tests/whole_step/test_captured_step_on_cuda.py: here there is no graph to end one of."""
    given: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        if torch.version.cuda:
            assert of_fxprec._end_allocation is torch._C._cuda_endAllocateToPool
            patch.setattr(of_fxprec, "_end_allocation", lambda *args: given.append(args))
        of_fxprec.end_allocation(0, (0, 1))
    assert given == ([(0, (0, 1))] if torch.version.cuda else [])


@contract("fxprec", "CALLED_THROUGH")
def test_what_a_compiled_module_is_called_through() -> None:
    linear = nn.Linear(2, 2)
    assert getattr(linear, of_fxprec.CALLED_THROUGH) is None and of_fxprec.CALLED_THROUGH not in vars(linear)
    linear.compile(backend="eager")
    assert vars(linear)[of_fxprec.CALLED_THROUGH] is not None


@contract("fxprec", "negated", "storage_key", "decomposition_of")
def test_views_and_storages_are_told_apart() -> None:
    x = torch.ones(3)
    negative = of_fxprec.negated(x)
    assert negative.is_neg() and negative.data_ptr() == x.data_ptr() and negative.tolist() == [-1, -1, -1]
    empty, other = torch.empty(0), torch.empty(0)
    assert of_fxprec.storage_key(empty) == of_fxprec.storage_key(empty.view(0, 1)) != of_fxprec.storage_key(other)
    gelu = of_fxprec.decomposition_of(torch.ops.aten.gelu_backward.default)
    assert gelu is not None and torch.allclose(gelu(x, x), torch.ops.aten.gelu_backward(x, x))
    assert of_fxprec.decomposition_of(torch.ops.aten.mm.default) is None


@contract("fxprec", "sequence_number")
def test_nodes_of_autograd_are_numbered_as_they_are_made() -> None:
    x = torch.ones(3, requires_grad=True)
    first = of_fxprec.sequence_number()
    y, z = x * 2, x.exp()
    assert [of_fxprec.sequence_number(t.grad_fn) for t in (y, z)] == [first, first + 1]
    assert of_fxprec.sequence_number() == first + 2


@contract("fxprec", "function_apply")
def test_whoever_applies_a_function_calls_this_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    owner, name = of_fxprec.function_apply
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda fn: calls.append(fn) or original(fn))

    class Same(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, *gradients: gradients)

    bound = Same.apply
    Same.apply(torch.ones(1))
    bound(torch.ones(1))
    assert len(calls) == 2
