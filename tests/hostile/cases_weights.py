"""What happens to weights after conversion: replaced, tied, frozen, cast, parametrized, loaded, swapped."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again

CASES = case = Cases("weights")


def inside(function):
    """A change without gradients."""

    def change(m):
        with torch.no_grad():
            function(m)

    return change


@case
def written_in_place(t: Run):
    t.changes(Two(), inside(lambda m: m.l.weight.mul_(3)), inside(lambda m: m.l.bias.zero_()))


@case
def written_through_data(t: Run):
    t.changes(Two(), lambda m: m.l.weight.data.mul_(3))


@case
def data_replaced(t: Run):
    t.changes(Two(), lambda m: setattr(m.l.weight, "data", m.l.weight.data * 3))


@case
def data_replaced_under_no_grad(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        m.l.weight.data = m.l.weight.data * 3
        t(m, x)
        m.l.weight.copy_(m.r.weight)
        t(m, x)


@case
def parameter_replaced(t: Run):
    t.changes(Two(), lambda m: setattr(m.l, "weight", nn.Parameter(m.l.weight.detach() * 3)))


@case
def parameter_replaced_under_no_grad(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        m.l.weight = nn.Parameter(m.l.weight * 3)
        t(m, x)


@case
def bias_removed(t: Run):
    t.changes(
        Two(), lambda m: setattr(m.l, "bias", None), lambda m: m.l.register_parameter("bias", nn.Parameter(t.randn(8)))
    )


@case
def parameter_becomes_a_buffer(t: Run):
    def change(m):
        weight = m.l.weight.detach()
        del m.l.weight
        m.l.register_buffer("weight", weight)

    t.changes(Two(), change)


@case
def parameter_becomes_a_plain_tensor(t: Run):
    def change(m):
        weight = m.l.weight
        del m.l.weight
        m.l.weight = weight * 2

    m, x = t.convert(Two()), t.randn(4, 8)
    t.backward(t(m, x))
    change(m)
    t.backward(t(m, x))


@case
def wider_weight(t: Run):
    m = t.convert(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4)))
    ids = torch.tensor([0, 3, 1])
    t.backward(t(m, ids))
    m[0].weight = nn.Parameter(torch.cat([m[0].weight.detach(), t.randn(2, 8)]))
    m[1].weight, m[1].bias = nn.Parameter(t.randn(6, 8)), nn.Parameter(t.randn(6))
    t.backward(t(m, torch.tensor([5, 4])))


@case
def frozen_and_thawed(t: Run):
    t.changes(
        Two(), lambda m: m.l.weight.requires_grad_(False), lambda m: m.l.weight.requires_grad_(True), lambda m: m.eval()
    )


@case
def loaded(t: Run):
    other = t.wide(Two())
    t.changes(Two(), lambda m: m.load_state_dict(other.state_dict()))


@case
def loaded_with_assign(t: Run):
    other = t.wide(Two())
    t.changes(Two(), lambda m: m.load_state_dict(copy.deepcopy(other.state_dict()), assign=True), again)


@case
def loaded_with_assign_under_no_grad(t: Run):
    other, m, x = t.wide(Two()), t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        m.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        t(m, x)


@case
def loaded_in_parts(t: Run):
    other = t.wide(Two())
    t.changes(
        Two(),
        lambda m: m.l.load_state_dict(other.r.state_dict()),
        lambda m: m.load_state_dict({"l.bias": other.l.bias}, strict=False),
    )


@case
def loaded_in_parts_under_no_grad(t: Run):
    other, m, x = t.wide(Two()), t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        m.l.load_state_dict(other.r.state_dict())
        t(m, x)


@case
def loaded_by_swapping(t: Run):
    def load(m):
        torch.__future__.set_swap_module_params_on_conversion(True)
        t.defer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
        m.load_state_dict(other.state_dict())

    other = t.wide(Two())
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        load(m)
        t(m, x)


@case
def swapped(t: Run):
    other, m, x = nn.Parameter(t.randn(8, 8)), t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        torch.utils.swap_tensors(m.l.weight, other)
        t(m, x)


@case
def parametrized(t: Run):
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    t.changes(
        Two(),
        lambda m: parametrize.register_parametrization(m.l, "weight", Symmetric()),
        again,
        lambda m: parametrize.remove_parametrizations(m.l, "weight"),
    )


@case
def weight_norm(t: Run):
    m = Two()
    parametrizations.weight_norm(m.l)
    t.changes(m, again, lambda m: parametrize.remove_parametrizations(m.l, "weight"))


@case
def old_weight_norm(t: Run):
    m = Two()
    nn.utils.weight_norm(m.l)
    t.changes(m, again, lambda m: nn.utils.remove_weight_norm(m.l))


@case
def spectral_norm(t: Run):
    m = Two()
    parametrizations.spectral_norm(m.l)
    t.changes(m, again, lambda m: m.eval())


@case
def old_spectral_norm(t: Run):
    m = Two()
    nn.utils.spectral_norm(m.l)
    t.changes(m, again, lambda m: m.eval())


@case
def orthogonal(t: Run):
    m = Two()
    parametrizations.orthogonal(m.l)
    t.changes(m, again)


@case
def cached_parametrization(t: Run):
    m = Two()
    parametrizations.weight_norm(m.l)
    m, x = t.convert(m), t.randn(4, 8)
    with parametrize.cached():
        t.backward(t(lambda x: m(m(x)), x))


@case
def pruned(t: Run):
    t.changes(
        Two(),
        lambda m: prune.l1_unstructured(m.l, "weight", amount=0.5),
        again,
        lambda m: prune.remove(m.l, "weight"),
    )


@case
def pruned_before(t: Run):
    m = Two()
    prune.random_unstructured(m.l, "weight", amount=0.5)
    t.changes(m, again, inside(lambda m: m.l.weight_orig.mul_(3)))


@case
def vector_to_parameters(t: Run):
    def change(m):
        flat = nn.utils.parameters_to_vector(m.parameters())
        nn.utils.vector_to_parameters(flat.detach() * 2, m.parameters())

    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        change(m)
        t(m, x)


@case
def fused_optimizer(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        t.backward(t(m, x))
        optimizer.step()
    with torch.no_grad():
        t(m, x)
        optimizer.step()
        t(m, x)


@case
def step_between_forward_and_backward(t: Run):
    """An optimizer steps the parameters of one branch; the other's backward is pending."""
    a, b, x = t.convert(Two()), t.convert(Two()), t.randn(4, 8)
    of_a, of_b = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
    out = t(b, t(a, x))
    of_b.step()
    of_a.step()
    t.backward(out)
    of_a.step()
    t(a, x)
