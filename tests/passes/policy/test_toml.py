import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph

from fxprec.errors import PolicyError
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.ops.table import row_of
from fxprec.passes.policy.policy import CustomRule, Override, Policy

EXAMPLE = Path(__file__).parents[3] / "examples" / "policy.toml"


def resolved(policy: Policy, op: str, path: str, module_class: type = nn.Module) -> Rule | torch.dtype:
    node = Graph().create_node("call_function", torch.relu)
    node.meta["nn_module_stack"] = {path: (path, module_class)}
    return policy.resolve(op, node, path, row_of(op))[0]


FILE = """\
# comment
[policy]
level = "O2"

[modules]
"encoder.*.attn" = "float32"
LayerNorm = "low"

[ops]
softmax = "bfloat16"
"mylib::gate" = "keep"

[nodes]
'add_*' = "keep"

[[rules]]
op = "mylib::gate"
rule = "low"
why = "accumulates in \\"FP32\\""

[[rules]]
op = "mylib::other"
rule = "full"
why = "sums"
"""


@pytest.fixture
def toml(tmp_path):
    def read(text: str) -> Policy:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return Policy.from_toml(path)

    return read


def without_sources(policy: Policy) -> Policy:
    return Policy(
        policy.level,
        tuple(Override(each.kind, each.pattern, each.precision) for each in policy.overrides),
        tuple(CustomRule(row.op, row.rule, row.why) for row in policy.rules),
    )


def test_a_file_says_what_code_says(toml):
    expected = (
        Policy.preset("O2")
        .with_rule("mylib::gate", "low", 'accumulates in "FP32"')
        .with_rule("mylib::other", "full", "sums")
        .override(modules={"encoder.*.attn": torch.float32, "LayerNorm": "low"})
        .override(ops={"softmax": torch.bfloat16, "mylib::gate": "keep"}, nodes={"add_*": "keep"})
    )
    assert without_sources(toml(FILE)) == expected
    assert toml("") == Policy()


def test_files_round_trip(toml):
    policy = toml(FILE)
    assert without_sources(toml(policy.to_toml())) == without_sources(policy)
    awkward = Policy().override(modules={'a"b\\c.é': "low", nn.LayerNorm: torch.float32})
    assert resolved(toml(awkward.to_toml()), "linear", "x", nn.LayerNorm) is torch.float32
    assert toml(awkward.to_toml()).overrides[0].pattern == 'a"b\\c.é'


def test_a_pattern_given_twice_keeps_its_last_place(toml):
    policy = Policy().override(modules={"a": "low", "*": "full"}).override(modules={"a": "keep"})
    assert resolved(policy, "linear", "a") is resolved(toml(policy.to_toml()), "linear", "a") is Rule.KEEP
    policy = Policy().override(modules={"a": "low"}).override(modules={"*": "full"})
    assert resolved(toml(policy.to_toml()), "linear", "a") is Rule.FULL


def test_what_a_file_cannot_say_is_refused():
    with pytest.raises(PolicyError, match="where= has no TOML form"):
        Policy().override(where=lambda n: None).to_toml()
    with pytest.raises(PolicyError, match=r"one \[ops\] table"):
        Policy().override(ops={"add": "low"}).override(modules={"a": "low"}).override(ops={"mul": "low"}).to_toml()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[polcy]\n", r"mine\.toml:1: unknown table or key 'polcy' \(did you mean 'policy'"),
        ('\nlevel = "O1"\n', r"mine\.toml:2: 'level' stands in no table: the level belongs under \[policy\]"),
        ('levle = "O2"\n', r"mine\.toml:1: 'levle' stands in no table \(did you mean 'level'\?\): .* \[policy\]"),
        ('[policy]\n\nlevle = "O1"\n', r"mine\.toml:3: unknown key 'levle' in \[policy\] \(did you mean 'level'"),
        ('[policy]\nlevel = "01"\n', r"mine\.toml:2: unknown level '01'.*did you mean 'O1'"),
        ("[policy]\nlevel = 1\n", r"mine\.toml:2: unknown level 1.*did you mean 'O1'"),
        ('ops = "low"\n', r"mine\.toml:1: 'ops' must be a table"),
        ('[ops]\nadd = "low"\nsofmax = "low"\n', r"'sofmax' = low .*mine\.toml:3\): no op has this name.*'softmax'"),
        ('[ops]\nadd = "fp32"\n', r"override ops 'add' \(.*mine\.toml:2\): 'fp32' is no precision"),
        ("[ops]\nadd = 3\n", r"mine\.toml:2: 3 must be a string"),
        ('[modules]\nfeatures.0 = "low"\n', r"mine\.toml:2: .*quote names that contain dots"),
        ('[modules]\n"a" = "low"\n"a" = "low"\n', r"mine\.toml is not valid TOML: .*line 3"),
        ('[rules]\nop = "mylib::gate"\n', r"mine\.toml:1: .*write \[\[rules\]\]"),
        ("rules = [1]\n", r"mine\.toml:1: each of \[\[rules\]\] must be a table"),
        ('[[rules]]\nop = "a::b"\nrule = "low"\n', r"mine\.toml:2: \[\[rules\]\] lacks why"),
        ('[[rules]]\nop = "a::b"\nrule = "low"\nwhy = ""\nwy = ""\n', r"mine\.toml:2: unknown key 'wy' .*'why'"),
        (
            '[[rules]]\nop = "a::b"\nrule = "low"\nwhy = ""\n[[rules]]\nop = "a::c"\nrule = "lo"\nwhy = ""\n',
            r"rule of op 'a::c' \(.*mine\.toml:6\): 'lo' is no precision.*'low'",
        ),
        ('[[rules]]\nop = "add"\nrule = "low"\nwhy = ""\n', r"rule \(.*mine\.toml:2\): op 'add' has a row"),
        ('[[rules]]\nop = 3\nrule = "low"\nwhy = ""\n', r"rule \(.*mine\.toml:2\): 3 is not the name of an op"),
    ],
)
def test_mistakes_in_a_file_name_the_line(toml, text, message):
    with pytest.raises(PolicyError, match=message):
        toml(text)


def test_what_matches_nothing_names_the_line(toml):
    policy = toml('[modules]\nhead = "low"\n\n"encoder.5" = "low"\n')
    with pytest.raises(
        PolicyError, match=r"modules 'encoder\.5' = low \(.*mine\.toml:4\).*did you mean 'encoder\.[01]'"
    ):
        modules = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
        policy.check_matches((), dict(modules.named_modules()), ())


def test_a_missing_file_suggests_its_neighbours(tmp_path):
    (tmp_path / "policy.toml").write_text("")
    with pytest.raises(PolicyError, match=r"cannot read .*polcy\.toml.*No such file.*'policy\.toml'"):
        Policy.from_toml(tmp_path / "polcy.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="not UTF-8"):
        Policy.from_toml(tmp_path / "binary.toml")


def test_the_shipped_example_fits_the_digits_model():
    policy = Policy.from_toml(EXAMPLE)
    blocks = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)]
    classifier = [nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    model = nn.ModuleDict({"features": nn.Sequential(*blocks), "classifier": nn.Sequential(*classifier)})
    policy.check_matches({"conv2d", "max_pool2d", "linear"}, dict(model.named_modules()), {"conv2d"})
    assert policy.level == "O1"
    assert resolved(policy, "conv2d", "features.0") is torch.float32
    assert resolved(policy, "conv2d", "features.3") is Rule.LOW
    assert resolved(policy, "linear", "classifier.6") is torch.float32
    assert resolved(policy, "linear", "classifier.4") is Rule.LOW


def test_the_commented_out_examples_are_valid_too(toml):
    text = EXAMPLE.read_text(encoding="utf-8")
    policy = toml(re.sub(r"^#(?=[^\s#])", "", text, flags=re.M))
    assert {each.pattern for each in policy.overrides} >= {"softmax", "encoder.*.attention", "add_3"}
    assert [row.op for row in policy.rules] == ["mylib::fused_gate"]
