import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

import fxprec
from fxprec.errors import PolicyError
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.table import OP_TABLE, row_of
from fxprec.passes.policy.policy import LEVELS, Policy


def node(name: str = "linear", stack: dict[str, object] | None = None) -> Node:
    made = Graph().create_node("call_function", torch.relu, name=name)
    if stack is not None:
        made.meta["nn_module_stack"] = stack
    return made


def resolved(policy: Policy, op: str = "linear", path: str = "", name: str = "n", **more) -> Rule | torch.dtype:
    return policy.resolve(op, node(name, more.pop("stack", None)), path, row_of(op), **more)[0]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("policytest", "FRAGMENT")
    made.define("silent(Tensor x) -> Tensor")
    made.define("cast(Tensor x) -> Tensor")
    torch.library.register_autocast("policytest::cast", "cpu", torch.float32, lib=made)
    yield made
    made._destroy()


# levels


def test_the_levels_are_views_of_the_table():
    views = {
        level: [resolved(Policy.preset(level), op) for op in ("linear", "softmax", "relu", "add", "randn")]
        for level in LEVELS
    }
    as_table = [Rule.LOW, Rule.FULL, Rule.FOLLOW, Rule.PROMOTE, Rule.KEEP]
    assert views == {
        "O0": [Rule.KEEP] * 5,
        "O1": as_table,
        "O2": as_table,
        "O3": [Rule.LOW, Rule.LOW, Rule.FOLLOW, Rule.PROMOTE, Rule.KEEP],
    }
    assert [level for level in LEVELS if Policy.preset(level).lowers_sources] == ["O2", "O3"]
    assert [level for level in LEVELS if Policy.preset(level).lowers_parameters] == ["O3"]


@pytest.mark.parametrize(("wrong", "meant"), [("01", "O1"), ("o1", "O1"), ("2", "O2"), (3, "O3"), ("00", "O0")])
def test_an_unknown_level_suggests_the_one_that_was_meant(wrong, meant):
    with pytest.raises(ValueError, match=rf"unknown level .*O0, O1, O2, O3.*did you mean '{meant}'"):
        Policy.preset(wrong)
    with pytest.raises(PolicyError, match="unknown level"):
        Policy(wrong)


@pytest.mark.parametrize("wrong", ["O4", "fast", None, "", 7])
def test_a_level_far_from_any_suggests_nothing(wrong):
    with pytest.raises(PolicyError) as caught:
        Policy.preset(wrong)
    assert "did you mean" not in str(caught.value)


def test_the_reason_is_the_tables_or_the_overrides():
    policy = Policy.preset("O1").override(modules={"encoder.*": torch.float32})
    assert policy.resolve("linear", node(), "head", row_of("linear"))[1] == OP_TABLE["linear"].why
    reason = policy.resolve("linear", node(), "encoder.fc", row_of("linear"))[1]
    assert reason == "override modules 'encoder.*' = float32"
    assert "level O3" in Policy.preset("O3").resolve("softmax", node(), "", row_of("softmax"))[1]
    assert "level O0" in Policy.preset("O0").resolve("softmax", node(), "", row_of("softmax"))[1]


def test_an_op_without_a_row_keeps_its_dtypes_at_every_level():
    for level in LEVELS:
        rule, why, _ = Policy.preset(level).resolve("mylib::gate", node(), "", None)
        assert rule is Rule.KEEP
        assert level == "O0" or "with_rule" in why


# overrides


def test_ops_modules_and_nodes_match_by_name_and_glob():
    policy = Policy().override(
        ops={"softmax": torch.bfloat16, "*_norm": "low"},
        modules={"encoder.*.attn": torch.float32},
        nodes={"add_*": "keep"},
    )
    assert resolved(policy, "softmax") is torch.bfloat16
    assert resolved(policy, "layer_norm") is Rule.LOW
    assert resolved(policy, "linear") is Rule.LOW
    assert resolved(policy, "linear", path="encoder.layers.0.attn") is torch.float32
    assert resolved(policy, "linear", path="encoder.layers.0.mlp") is Rule.LOW
    assert resolved(policy, "add", name="add_3") is Rule.KEEP
    assert resolved(policy, "add", name="add") is Rule.PROMOTE


def test_a_module_covers_everything_below_it():
    policy = Policy().override(modules={"encoder.*.attn": torch.float32})
    assert resolved(policy, path="encoder.layers.0.attn.q_proj") is torch.float32
    assert resolved(policy, path="encoder.layers.0.attn2.q_proj") is Rule.LOW
    root = Policy().override(modules={"*": torch.float32})
    assert resolved(root, path="") is torch.float32 and resolved(root, path="a.b") is torch.float32


def test_modules_match_by_the_stack_that_capture_recorded():
    symbolic = {"block": ("block", nn.Sequential), "block.norm": ("block.norm", nn.LayerNorm)}
    dynamo = {"L__self__": ("", nn.Module), "x": ("L['self']._modules['block']._modules['norm']", nn.LayerNorm)}
    exported = {"y": ("block.norm", "torch.nn.modules.normalization.LayerNorm")}
    for pattern in ("block", "block.norm", "*.norm", "LayerNorm", nn.LayerNorm):
        policy = Policy().override(modules={pattern: torch.float32})
        for stack in (symbolic, dynamo, exported):
            assert resolved(policy, stack=stack) is torch.float32, (pattern, stack)
    for pattern in ("norm", "bloc", "GroupNorm", nn.GroupNorm):
        policy = Policy().override(modules={pattern: torch.float32})
        for stack in (symbolic, dynamo, exported):
            assert resolved(policy, stack=stack) is Rule.LOW, (pattern, stack)


def test_a_class_matches_its_subclasses():
    class Mine(nn.LayerNorm):
        pass

    for pattern in (nn.LayerNorm, "LayerNorm", Mine, "Mine"):
        policy = Policy().override(modules={pattern: torch.float32})
        assert resolved(policy, stack={"a": ("a", Mine)}) is torch.float32
    policy = Policy().override(modules={Mine: torch.float32})
    assert resolved(policy, stack={"a": ("a", nn.LayerNorm)}) is Rule.LOW


def test_the_last_match_wins_across_kinds_and_calls():
    policy = Policy().override(nodes={"n": torch.bfloat16}).override(ops={"linear": torch.float16})
    assert resolved(policy) is torch.float16
    assert resolved(policy.override(modules={"a": "full"}), path="a") is Rule.FULL
    in_one_call = Policy().override(nodes={"n": "low"}, modules={"*": "full"}, ops={"linear": "keep"})
    assert resolved(in_one_call) is Rule.LOW
    in_one_table = Policy().override(modules={"a.b": "keep", "a": torch.float32})
    assert resolved(in_one_table, path="a.b") is torch.float32


def test_where_decides_node_by_node():
    policy = Policy().override(ops={"linear": "keep"}, where=lambda n: torch.float32 if n.name == "head" else None)
    assert resolved(policy, name="head") is torch.float32
    assert resolved(policy, name="body") is Rule.KEEP
    assert "float32" in policy.resolve("linear", node("head"), "", row_of("linear"))[1]
    with pytest.raises(PolicyError, match="node 'head': 'int8' is no precision"):
        resolved(Policy().override(where=lambda n: torch.int8), name="head")


@pytest.mark.parametrize("inputs", [(torch.randn(2, 4),), None], ids=["with inputs", "at the first call"])
def test_a_predicate_that_raises_is_told_as_the_users(inputs):
    """It is no fault of the pass that asks it."""
    policy = Policy().override(where=lambda n: {}["mine"])
    with pytest.raises(
        PolicyError, match="override where '<lambda>': the predicate raised KeyError for node"
    ) as caught:
        fxprec.convert(torch.nn.Linear(4, 4), inputs, policy=policy).module(torch.randn(2, 4))
    assert isinstance(caught.value.__cause__, KeyError)


def test_module_overrides_leave_kept_and_unknown_ops_alone_but_names_are_obeyed():
    of_module = Policy().override(modules={"a": "low"})
    assert resolved(of_module, "randn", path="a") is Rule.KEEP
    assert of_module.resolve("mylib::gate", node(), "a", None)[0] is Rule.KEEP
    assert resolved(of_module, "softmax", path="a") is Rule.LOW
    assert resolved(Policy().override(ops={"randn": "low"}), "randn") is Rule.LOW
    assert resolved(Policy().override(nodes={"n": "low"}), "randn") is Rule.LOW
    assert resolved(Policy().override(where=lambda n: "low"), "randn") is Rule.LOW


def test_level_o0_is_bit_for_bit_whatever_the_overrides():
    policy = Policy.preset("O0").override(ops={"linear": "low"}).with_rule("mylib::gate", "low", "")
    assert resolved(policy) is Rule.KEEP
    assert policy.resolve("mylib::gate", node(), "", None)[0] is Rule.KEEP


def test_an_override_outlives_level_o3():
    assert resolved(Policy.preset("O3").override(ops={"softmax": "full"}), "softmax") is Rule.FULL


def test_policies_are_values():
    base = Policy()
    changed = base.override(ops={"softmax": "keep"}).with_rule("mylib::gate", "low", "why")
    assert base == Policy() and changed != base
    assert copy.deepcopy(changed) == changed and pickle.loads(pickle.dumps(changed)) == changed
    assert hash(changed) == hash(copy.copy(changed))


@pytest.mark.parametrize("value", [torch.float32, "float32", "torch.float32"])
def test_precisions_are_dtypes_or_their_names(value):
    assert resolved(Policy().override(ops={"linear": value})) is torch.float32


@pytest.mark.parametrize("value", [torch.int8, torch.float64, torch.bool, "int8", "fp32", None, 1.0, True, nn.Linear])
def test_other_precisions_are_refused(value):
    with pytest.raises(PolicyError, match=r"override modules 'head'.* is no precision: use one of bfloat16, float16,"):
        Policy().override(modules={"head": value})


def test_a_precision_suggests_its_neighbour():
    with pytest.raises(PolicyError, match="did you mean 'bfloat16'"):
        Policy().override(nodes={"n": "bfloat61"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ops": {torch.softmax: "low"}}, "not the canonical name of an op"),
        ({"nodes": {3: "low"}}, "not the name of a graph node"),
        ({"nodes": {nn.Linear: "low"}}, "not the name of a graph node"),
        ({"modules": {nn.Linear(1, 1): "low"}}, "not a dotted module path, a class name or a module class"),
        ({"modules": {"": "low"}}, "not a dotted module path"),
        ({"where": "float32"}, "not a function of a node"),
    ],
)
def test_patterns_of_the_wrong_type_are_refused(wrong, message):
    with pytest.raises(PolicyError, match=message):
        Policy().override(**wrong)


# ops that nobody knows, and custom ops


@pytest.mark.parametrize(
    ("wrong", "meant"), [("sofmax", "softmax"), ("conv_2d", "conv2d"), ("layernorm", "layer_norm")]
)
def test_an_unknown_op_suggests_its_neighbours(wrong, meant):
    with pytest.raises(PolicyError, match=rf"ops '{wrong}' = low: no op has this name .*'{meant}'"):
        Policy().override(ops={wrong: "low"})


def test_a_glob_that_matches_no_op_is_refused():
    with pytest.raises(PolicyError, match=r"conv4d\*"):
        Policy().override(ops={"conv4d*": "low"})


def test_a_custom_op_is_known_by_its_row_or_its_registration(library):
    policy = Policy().with_rule("mylib::gate", "low", "accumulates in FP32")
    assert policy.resolve("mylib::gate", node(), "", None)[:2] == (Rule.LOW, "accumulates in FP32")
    assert policy.with_rule("mylib::gate", Rule.FULL, "").resolve("mylib::gate", node(), "", None)[0] is Rule.FULL
    for name in ("mylib::gate", "mylib::*", "policytest::silent"):
        policy = policy.override(ops={name: "full"})
    assert policy.resolve("policytest::silent", node(), "", None)[0] is Rule.FULL
    with pytest.raises(PolicyError, match="import what registers it"):
        policy.override(ops={"yourlib::gate": "low"})


def test_rows_are_checked():
    with pytest.raises(PolicyError, match="has a row in the op table: use override"):
        Policy().with_rule("softmax", "low", "")
    with pytest.raises(PolicyError, match="is float32, but must be one of low, full, follow, promote, keep"):
        Policy().with_rule("mylib::gate", "float32", "")
    with pytest.raises(PolicyError, match="is not the name of an op"):
        Policy().with_rule(torch.relu, "low", "")  # type: ignore[arg-type]


def test_register_autocast_is_honoured(library):
    rule, why, _ = Policy().resolve("policytest::cast", node(), "", None, "cpu")
    assert rule is torch.float32 and "register_autocast" in why
    assert resolved(Policy(), "policytest::cast", device="cuda") is Rule.KEEP
    assert resolved(Policy().with_rule("policytest::cast", "low", ""), "policytest::cast", device="cpu") is Rule.LOW
    assert resolved(Policy().override(modules={"a": "full"}), "policytest::cast", path="a", device="cpu") is Rule.FULL


# what matches nothing


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.head = nn.Linear(2, 2)


def check(policy: Policy) -> None:
    modules = dict(Model().named_modules())
    policy.check_matches({"linear", "layer_norm", "add"}, modules, {"linear", "linear_1", "layer_norm", "add"})


def test_overrides_that_match_pass():
    check(
        Policy().override(
            ops={"linear": "keep", "*norm": "keep"},
            modules={"encoder.*": "keep", "head": "keep", "LayerNorm": "keep", nn.Linear: "keep", "*": "keep"},
            nodes={"linear_*": "keep", "add": "keep"},
            where=lambda n: None,
        )
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"ops": {"layer_norm": "low", "linalg_norm": "low"}},
            r"ops 'linalg_norm' = low: .* no such op \(.*'layer_norm'",
        ),
        ({"modules": {"encode.*": "low"}}, r"modules 'encode\.\*' = low: no module has this path or class .*'encoder"),
        ({"modules": {"Layernorm": "low"}}, r"modules 'Layernorm' .*did you mean 'LayerNorm'"),
        ({"modules": {nn.GroupNorm: "low"}}, r"modules 'GroupNorm' .*'LayerNorm'"),
        ({"modules": {"norm": "low"}}, "modules 'norm' = low"),
        ({"nodes": {"linear_2": "low"}}, r"nodes 'linear_2' = low: .* no such node .*'linear_1'"),
    ],
)
def test_an_override_that_matches_nothing_names_itself_and_its_neighbours(override, message):
    with pytest.raises(PolicyError, match=message) as caught:
        check(Policy().override(**override))
    assert "Correct or remove them" in str(caught.value)
    assert "'layer_norm' = low" not in str(caught.value)  # only what failed is named


def test_all_that_matches_nothing_is_said_at_once():
    with pytest.raises(PolicyError) as caught:
        check(Policy().override(modules={"body": "low"}, nodes={"mul": "low"}).with_rule("mylib::gate", "low", ""))
    assert all(name in str(caught.value) for name in ("'body'", "'mul'", "'mylib::gate'"))


def test_a_row_for_a_registered_op_that_the_model_does_not_use_is_fine(library):
    check(Policy().with_rule("policytest::silent", "low", ""))


def test_bare_paths_serve_where_no_class_is_known():
    Policy().override(modules={"encoder.*": "low"}).check_matches((), ["encoder.0", "head"], ())
    with pytest.raises(PolicyError, match="'LayerNorm'"):
        Policy().override(modules={"LayerNorm": "low"}).check_matches((), ["encoder.0", "head"], ())
