"""The gradients of one optimizer: names, this rank's part, ranks that agree on them, and a loss scale taken out.

Refused before anything changes: gradients that no scale can be taken out of. Sparse ones are coalesced first, since
adding up duplicate indices may overflow; of a DTensor the local shard is taken, of a partial one the sum.

Sharded gradients (FSDP2, tensor parallelism) differ by rank, and so do pipeline stages: there one MAX all-reduce of one
number tells every rank that holds a part of the model what overflowed. With DDP nothing is needed: its all-reduce of
gradients carries an inf to every rank.

Refused are, beside dtypes, gradients that another optimizer unscaled already, and sums over two scales. Those come
about when the scale changes while scaled gradients that nobody unscaled are still there, as where an optimizer
accumulates while another one steps: new gradients are added to them at another scale.

    update     which optimizers have gradients and were not used; a usual loop has none, and nothing more is done
    backward   as it begins: are these gradients still there, untouched, and is the scale another one? Only such a
               case reads from the device
    unscale    refuse gradients that were

Gradients that an optimizer unscaled in an earlier iteration, and that just lie there until its ``zero_grad``, are told
apart by the identity and version of one of them. What is missed: gradients of an optimizer that the scaler never saw,
after the second iteration; a graph below a sum of scaled losses, in the second one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fxprec.host_reads import capturing
from fxprec.scaling.scale import Scales
from fxprec.torch_internals import amp_unscale_, late_hooks_of, root_mesh, sparse_values

#: (device, dtype) -> dense tensors that can be unscaled in place.
Grouped = dict[tuple[torch.device, torch.dtype], list[Tensor]]
#: device -> 0-dim FP32, above 0 where a gradient on it holds inf or nan.
Flags = dict[torch.device, Tensor]
#: Id of a parameter -> the optimizer that unscaled its gradient.
Claims = dict[int, weakref.ref[Optimizer]]
#: An optimizer -> id of each of its parameters -> its name.
NamesOf = Callable[[Optimizer], dict[int, str]]

#: Dtypes that a scaled gradient may have, whatever the settings.
_SCALED = {torch.float32, torch.float64, torch.bfloat16}


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of every group."""
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def late_hooks_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep hooks from hearing, in the block, of gradients that are accumulated: such hooks step optimizers."""
    with ExitStack() as undo:
        for parameter in parameters:
            if held := late_hooks_of(parameter):
                undo.callback(held.update, {**held})
                held.clear()
        yield


def grouped(optimizer: Optimizer, allow_fp16: bool, names_of: NamesOf) -> Grouped:
    """Return the gradients to unscale. May replace ``.grad`` of sparse and of partial ones.

    Raises:
        ValueError: float16 gradients, unless they are allowed. TypeError: complex or float8 ones. Both name the
            parameters.
    """
    # Plain dense gradients, the usual case, are grouped at once; the others may need work, even a collective.
    groups: Grouped = {}
    special: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and (type(gradient) is not Tensor or gradient.layout is not torch.strided):
                special.append(parameter)
            elif gradient is not None:
                groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # Asked by the few dtypes that there are; which parameter is at fault is looked up for the message only.
    dtypes = {dtype for _, dtype in groups} | {parameter.grad.dtype for parameter in special}  # type: ignore[union-attr]
    if not dtypes <= (_SCALED | {torch.float16} if allow_fp16 else _SCALED):
        refuse_dtypes(optimizer, allow_fp16, names_of)
    with torch.no_grad():
        for parameter in special:
            gradient = _dense(parameter, cast(Tensor, parameter.grad))
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups


def refuse_dtypes(optimizer: Optimizer, allow_fp16: bool, names_of: NamesOf) -> None:
    """Raise as ``grouped`` does, if it would."""
    odd = [(p, p.grad.dtype) for p in parameters_of(optimizer) if p.grad is not None and p.grad.dtype not in _SCALED]
    if not odd:
        return
    # Complex and float8 gradients can never be unscaled; float16 ones are refused as torch does, unless allowed.
    names = names_of(optimizer)
    half = [names[id(p)] for p, dtype in odd if dtype is torch.float16]
    strange = [f"{names[id(p)]} ({dtype})" for p, dtype in odd if dtype is not torch.float16]
    if strange:
        raise TypeError(
            f"gradients that cannot be unscaled and checked for inf: {few(strange)}. Keep such parameters in another "
            "optimizer, which steps without the scaler"
        )
    if half and not allow_fp16:
        cure = (
            "leave unscale_ and clip_grad_norm_ out: with low_gradients the optimizer unscales them in its step, and "
            "clips them by its own max_norm"
            if any(p.dtype is torch.float32 for p, _ in odd)
            else "keep the parameters in float32 as master weights, as fxprec.convert does at O0 to O2, or wrap the "
            "optimizer in fxprec.amp.FP16_Optimizer. LossScaler(fp16_gradients=True) accepts them"
        )
        raise ValueError(
            f"Attempting to unscale FP16 gradients. They belong to {few(half)}. Unscaled, most of them would vanish: "
            f"{cure}"
        )


def local(tensor: Tensor) -> Tensor:
    """Return the tensor, or the part of a DTensor that this rank holds, without a copy."""
    dtensor = dtensor_type()
    if dtensor is None or not isinstance(tensor, dtensor):
        return tensor
    held: Any = cast(Any, tensor).to_local()
    return held.wait() if hasattr(held, "wait") else held


def local_values(gradient: Tensor) -> Tensor:
    """Return what this rank holds of a gradient; of a sparse one the values, those of one index added up."""
    held = local(gradient)
    return stored_values(held.coalesce() if held.layout is torch.sparse_coo else held)


def stored_values(gradient: Tensor) -> Tensor:
    """Return the stored numbers of a gradient that are on this rank; of a sparse one as they are."""
    held = local(gradient)
    if held.layout is torch.sparse_coo:
        return sparse_values(held)
    return held if held.layout is torch.strided else held.values()


def summed(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient; a partial DTensor, whose true value is the sum over ranks, is placed as its parameter is.

    ``parameter.grad`` is replaced then. A collective: every rank of the mesh has to come here.
    """
    dtensor = dtensor_type()
    if dtensor is None or not isinstance(gradient, dtensor):
        return gradient
    sharded: Any = gradient
    if any(placement.is_partial() for placement in sharded.placements):
        parameter.grad = sharded = sharded.redistribute(placements=cast(Any, parameter).placements)
    return sharded


def dtensor_type() -> Any:
    """Return DTensor, where anything imported it: the import costs a third of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def group_of_parameters(parameters: Iterable[Tensor]) -> Any:
    """Return the process group of every mesh that a DTensor among them lives on; None: there is no DTensor.

    It depends on parameters, not on gradients: a rank without gradients has to join.

    Raises:
        RuntimeError: the meshes are parts of something that is neither one mesh of one dimension nor all ranks.
    """
    dtensor = dtensor_type()
    if dtensor is None:
        return None
    meshes: set[Any] = {p.device_mesh for p in parameters if isinstance(p, dtensor)}  # type: ignore[attr-defined]
    if not meshes:
        return None
    # Parts of one mesh (a dimension of it) belong to a root, whose ranks hold all of the model.
    roots = {root_mesh(mesh) for mesh in meshes}
    if len(set().union(*(root.mesh.flatten().tolist() for root in roots))) == dist.get_world_size():
        return dist.group.WORLD
    if len(roots) == 1 and (root := next(iter(roots))).ndim == 1:
        return root.get_group()
    raise RuntimeError(
        "the parameters of one optimizer live on meshes that cover neither one dimension nor all ranks: say which "
        "ranks have to agree on an overflow, LossScaler(process_group=torch.distributed.new_group(ranks))"
    )


def sum_over(number: Tensor, group: Any) -> Tensor:
    """Return the sum of a 0-dim tensor over the ranks of ``group``."""
    return _reduced(number.reshape(1), dist.ReduceOp.SUM, group).to(number.device)


def agree(found: dict[torch.device, Tensor], device: torch.device, group: Any) -> None:
    """Make every flag 1 where any rank of ``group`` has one above 0. A rank without flags gets one on ``device``."""
    if not found:
        found[device] = torch.zeros((), device=device)
    # Flags of all devices in one number, so that there is one all-reduce however many there are.
    flags = [*found.values()]
    packed = flags[0].view(1) if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).amax(0, True)
    highest = _reduced(packed, dist.ReduceOp.MAX, group)
    for flag in flags:
        flag.copy_(highest)


def _reduced(packed: Tensor, op: Any, group: Any) -> Tensor:
    if dist.get_backend(group) == "nccl" and packed.device.type == "cpu":
        packed = packed.to("cuda")  # NCCL reduces nothing on the host
    dist.all_reduce(packed, op, group=group)
    return packed.view(())


def leaves_below(outputs: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward of ``outputs`` would add gradients to."""
    # A stack, not recursion: graphs are as deep as models.
    nodes: list[Any] = [outputs.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf
            nodes.extend(following for following, _ in node.next_functions)


class ParameterNames:
    """Names of an optimizer's parameters by their ids: of named groups, else of ``model``, else by place."""

    def __init__(self) -> None:
        self.model: weakref.ref[nn.Module] | None = None

    @property
    def known_model(self) -> nn.Module | None:
        """The converted model, while it lives."""
        return None if self.model is None else self.model()

    def __call__(self, optimizer: Optimizer) -> dict[int, str]:
        model = self.known_model
        known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        # Names that the user gave to the optimizer come first.
        names: dict[int, str] = {}
        for i, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for j, parameter in enumerate(group["params"]):
                place = f"param_groups[{i}]['params'][{j}] of shape {tuple(parameter.shape)}"
                names[id(parameter)] = given[j] if given is not None else known.get(id(parameter), place)
        return names


def few(names: list[str], most: int = 5) -> str:
    """Return the first of the names, and how many more there are, as text."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _dense(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the part of a gradient that can be unscaled in place."""
    if gradient.layout is torch.sparse_coo:
        # Unscaled first, duplicates of an index could overflow when they are added up.
        if not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
    return stored_values(summed(parameter, gradient))


# -- a loss scale taken out of them ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """Snapshot of the first gradient of an optimizer, which stands for all of its gradients.

    No weak reference to tensors, which ``torch.utils.swap_tensors`` refuses, but to the memory of the gradient.
    """

    memory: StorageWeakRef
    version: int

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Seen | None:
        gradient = next((p.grad for p in parameters_of(optimizer) if p.grad is not None), None)
        if gradient is None:
            return None
        return cls(StorageWeakRef(stored_values(gradient).untyped_storage()), gradient._version)

    def untouched(self, optimizer: Optimizer) -> bool:
        return not self.memory.expired() and _Seen.of(optimizer) == self


class SpoiledGradients:
    """Gradients of one scaler's optimizers that must not be unscaled: unscaled already, or sums over two scales.

    Attributes:
        claimed: id of a parameter -> the optimizer that unscaled it, since the last ``scale``. (After another one there
            may be new gradients, as where two optimizers of a shared encoder take turns.)
    """

    def __init__(self) -> None:
        self.claimed: Claims = {}
        self._scale: Tensor | None = None
        self._settled: dict[int, _Seen] = {}
        self._left: list[tuple[weakref.ref[Optimizer], _Seen]] = []
        self._mixed: dict[int, weakref.ref[Tensor]] = {}
        self._owners: list[weakref.ref[Optimizer]] = []
        #: In the second iteration optimizers may own gradients that the scaler has not seen yet.
        self._first, self._search = True, False

    def before_update(self, scale: Tensor, known: Mapping[int, Optimizer], used: set[int]) -> None:
        """Remember gradients that are left, before the scale changes.

        Args:
            scale: of the gradients.
            known: id -> every optimizer that the scaler has seen.
            used: ids of those that were unscaled in this iteration.
        """
        self._left, self._search, self._first = [], self._first, False
        # An optimizer that was used has settled gradients; those of others are left, unless untouched since settled.
        for id_, optimizer in known.items():
            settled = self._settled.get(id_)
            if id_ in used:
                seen = _Seen.of(optimizer)
                if seen is not None:
                    self._settled[id_] = seen
            elif (settled is None or not settled.untouched(optimizer)) and (seen := _Seen.of(optimizer)) is not None:
                self._left.append((weakref.ref(optimizer), seen))
        if self._left or self._search:
            self._scale = scale.clone()
            self._owners = [weakref.ref(optimizer) for optimizer in known.values()]

    def watch(self, outputs: Tensor, scale: Tensor) -> None:
        """Look at what is left when the backward of ``outputs``, scaled by ``scale``, begins."""
        if not (self._left or self._search or self._mixed) or outputs.grad_fn is None:
            return
        if capturing(outputs.device):
            return
        # Weakly: the hook belongs to ``outputs``, which it would keep alive.
        root = weakref.ref(outputs)
        outputs.register_hook(lambda _gradient: self._look(root(), scale))

    def refuse(
        self, optimizer: Optimizer, names_of: NamesOf, claimed: Mapping[int, weakref.ref[Optimizer]] | None = None
    ) -> None:
        """Raise a RuntimeError that names a spoiled gradient of ``optimizer``; ``claimed``: in place of ours."""
        # A gradient that is unscaled twice is too small by the scale.
        owners = self.claimed if claimed is None else claimed
        for parameter in parameters_of(optimizer) if owners else ():
            other = owners[id(parameter)]() if id(parameter) in owners else None
            if other is None or other is optimizer or parameter.grad is None:
                continue
            if any(parameter is owned for owned in parameters_of(other)):  # and not a new one with an old id
                raise RuntimeError(
                    f"{names_of(optimizer)[id(parameter)]} belongs to two optimizers, {type(other).__name__} and "
                    f"{type(optimizer).__name__}: its gradient would be unscaled twice. Give each parameter to one"
                )
        # What was set to zero since is no sum any more: that costs a read, in the rare case that there are any.
        if self._mixed:
            self._forget_zeros()
        for parameter in parameters_of(optimizer) if self._mixed else ():
            mixed = self._mixed.get(id(parameter))
            if mixed is not None and parameter.grad is not None and mixed() is parameter.grad:
                raise RuntimeError(
                    f"the gradient of {names_of(optimizer)[id(parameter)]} is a sum over two scales: the scale changed "
                    "while scaled gradients were still there. Call update() only when every optimizer that has "
                    "gradients was stepped, or zero_grad() the others"
                )

    def _look(self, outputs: Tensor | None, scale: Tensor) -> None:
        self._forget_zeros()
        left, search, self._left, self._search = self._left, self._search, [], False
        owners = [owner for each, seen in left if (owner := each()) is not None and seen.untouched(owner)]
        kept = [p for owner in owners for p in parameters_of(owner) if p.grad is not None]
        # In the second iteration gradients may belong to an optimizer that the scaler has not seen.
        if search and outputs is not None:
            owned = {id(p) for reference in self._owners if (owner := reference()) for p in parameters_of(owner)}
            kept += [p for p in leaves_below(outputs) if p.grad is not None and id(p) not in owned]
        if not kept or self._scale is None or torch.equal(scale, self._scale):
            return
        for parameter in kept:
            gradient = parameter.grad
            if gradient is not None and holds_any(gradient):
                self._mixed[id(parameter)] = weakref.ref(gradient)

    def _forget_zeros(self) -> None:
        """Forget mixed gradients that are gone, or were set to zero in place."""
        held = ((id_, reference()) for id_, reference in self._mixed.items())
        self._mixed = {id_: weakref.ref(g) for id_, g in held if g is not None and holds_any(g)}


def claim(optimizer: Optimizer, claimed: Claims) -> None:
    """Note in ``claimed`` that the optimizer's gradients are unscaled."""
    reference = weakref.ref(optimizer)
    for group in optimizer.param_groups:
        claimed.update(dict.fromkeys(map(id, group["params"]), reference))


@dataclass(frozen=True, slots=True)
class GradientChecks:
    """Checks of gradients in ``unscale_`` and ``step``.

    Attributes:
        scales: of the losses.
        fp16_gradients: float16 gradients are accepted.
        process_group: ranks that skip together; None: those of the parameters' meshes.
        names_of: gives the names that messages have.
    """

    scales: Scales
    fp16_gradients: bool
    process_group: Any
    names_of: NamesOf

    def refuse(self, spoiled: SpoiledGradients, optimizer: Optimizer, claimed: Claims) -> None:
        """Raise all that ``unscale_`` would raise for the gradients. ``claimed``: by the optimizers before."""
        spoiled.refuse(optimizer, self.names_of, claimed)
        refuse_dtypes(optimizer, self.fp16_gradients, self.names_of)

    def unscale(
        self, spoiled: SpoiledGradients, optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        """Multiply the gradients by ``inverse`` in place; return ``found_inf``, or 1 after inf or nan, by device.

        Raises:
            RuntimeError, ValueError, TypeError: as ``LossScaler.unscale_``.
        """
        spoiled.refuse(optimizer, self.names_of)
        # Devices get the scale and a flag of their own: torch's kernel takes tensors of one device and dtype.
        gradients = grouped(optimizer, allow_fp16 or self.fp16_gradients, self.names_of)
        inverses: dict[torch.device, Tensor] = {}
        found: Flags = {}
        for (device, _), tensors in gradients.items():
            if device not in found:
                inverses[device] = inverse.to(device, non_blocking=True)
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            amp_unscale_(tensors, found[device], inverses[device])
        return self._agreed(spoiled, optimizer, found)

    def check(self, spoiled: SpoiledGradients, optimizer: Optimizer) -> Flags:
        """Look for inf and nan, and leave the gradients as they are."""
        scale = self.scales.first
        return self.unscale(spoiled, optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)

    def check_for_step(self, spoiled: SpoiledGradients, optimizer: Any) -> tuple[Any, Flags]:
        """Check gradients that the optimizer will unscale in its step.

        Returns:
            The result of its own ``check_gradients``, if it has one (else None), and the flags.
        """
        if not hasattr(optimizer, "check_gradients"):
            return None, self.check(spoiled, optimizer)
        spoiled.refuse(optimizer, self.names_of)
        own = optimizer.check_gradients(self.scales.first)
        return own, self._agreed(spoiled, optimizer, own.found_inf)

    def _agreed(self, spoiled: SpoiledGradients, optimizer: Optimizer, found: Flags) -> Flags:
        """Claim the gradients, and return the flags once all ranks that hold a part of them have the same."""
        claim(optimizer, spoiled.claimed)
        # Asked for, or the meshes of DTensors: it depends on parameters, for a rank without gradients has to join.
        asked = self.process_group
        group = group_of_parameters(parameters_of(optimizer)) if asked is None else asked
        if group is not None:
            agree(found, self.scales.first.device, group)
        return found


def holds_any(gradient: Tensor) -> bool:
    """Return whether anything in it is not 0. Reads the device."""
    return bool((stored_values(gradient) != 0).any())
