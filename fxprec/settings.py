"""The checked arguments of one conversion."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Literal, get_args

import torch

from fxprec.costs.files import costs_of, shipped_for_here
from fxprec.errors import PolicyError, did_you_mean
from fxprec.kernels.cpu.processor import cpu_flags, has_bfloat16_units, instruction_limit
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.rows.program.prices import LoopPrices
from fxprec.passes.context import Context
from fxprec.passes.costs.device_costs import AttentionWay, DeviceCosts
from fxprec.passes.policy.policy import Policy

#: Run a graph op by op, or compiled by torch.compile.
Executor = Literal["eager", "inductor"]
Capture = Literal["auto", "symbolic", "dynamo"]
Placement = Literal["mincut", "autocast"]
#: See ``convert``. Costs of the user's own: as "pays", but by these.
Lower = Literal["always", "pays"] | DeviceCosts
#: See ``convert``. A mapping says of single regions, by patterns of their names, whether to fuse them.
Fuse = bool | Literal["auto", "aten"] | Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a conversion; picklable, so that a saved or copied model can be converted likewise.

    ``methods``: names of the methods besides forward, as ``MethodName`` writes them.

    Raises:
        ValueError: an unknown dtype, placement, capture, executor, ``lower`` or ``fuse``; says which there are and the
            nearest. Or settings that contradict each other.
    """

    policy: Policy
    dtype: torch.dtype
    device: str = "cpu"
    placement: Placement = "mincut"
    lower: Lower = "always"
    fuse: Fuse = "auto"
    capture: Capture = "auto"
    executor: Executor = "eager"
    keep_output_dtype: bool = True
    #: Whether the scaler that was handed back, if it is used, makes the gradients others. No part of what is compared.
    scales: bool = field(default=False, compare=False)
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("placement", self.placement, get_args(Placement))
        one_of("capture", self.capture, get_args(Capture))
        one_of("executor", self.executor, get_args(Executor))
        self._check_fuse()
        if self.dtype not in LOW_DTYPES:
            raise ValueError(
                f"dtype={self.dtype!r}: models are lowered to torch.float16 or torch.bfloat16; "
                "leave dtype out for float16 on CUDA and bfloat16 elsewhere"
            )
        self._check_lower()

    @property
    def pays(self) -> bool:
        """Return whether ops stay in FP32 where lowering them loses time. Then a graph is captured with its sizes."""
        return self.lower != "always" and self.policy.level != "O0"

    @property
    def why_slow(self) -> str:
        """Return why the low dtype is slow here, a CPU without units for it and without costs; "" where it is not."""
        if self.device != "cpu" or self.policy.level == "O0":
            return ""
        # Told once, since nobody expects a lower precision to be the slower one.
        if self.dtype is torch.float16:
            return (
                "float16 on a CPU without float16 units is hundreds of times slower than bfloat16 (with AVX512-FP16 "
                "four times, gradients of convolutions fifty times): fine for tests, else leave dtype out"
            )
        if self.pays or not cpu_flags() or has_bfloat16_units():
            return ""
        limit = instruction_limit()
        which = f"oneDNN is held to {limit} (ONEDNN_MAX_CPU_ISA), which" if limit else "this CPU"
        return (
            f"{which} has no bfloat16 units (AVX512-BF16, AMX, Arm BF16): products in bfloat16 are slower than in "
            "FP32, often several times, at worst hundreds of times (pytorch#146508). "
            'convert(model, example_inputs, lower="pays") lowers only what gains here'
        )

    @property
    def device_costs(self) -> DeviceCosts:
        """Return the user's own costs, or those of the device; they may lack the low dtype."""
        return self.lower if isinstance(self.lower, DeviceCosts) else costs_of(self.device, self.dtype)

    def context(self, gradients: bool = True, by_size: bool = True) -> Context:
        """Make the passes' view of these settings.

        Args:
            gradients: whether a backward pass may follow what is captured now.
            by_size: small regions may be left to torch's ops.
        """
        costs = self.device_costs if self.pays else None
        return Context(
            low=self.dtype,
            policy=self.policy,
            placement=self.placement,
            device=self.device,
            keep_output_dtype=self.keep_output_dtype,
            native_mixed=self.fuse is not False,
            regions=self.regions,
            region_choices=tuple(self.fuse.items()) if isinstance(self.fuse, Mapping) else (),
            by_size=by_size and self.regions == "triton" and self.device == "cuda" and self.fuse is not True,
            costs=costs,
            gradients=gradients,
            attention=self._attention,
            loops=self._loops,
            channels_last=self.fuse is True and self.device == "cpu" and self.executor == "eager",
            casts_fuse=self.regions == "triton" or self.executor == "inductor",
        )

    @property
    def _attention(self) -> tuple[AttentionWay, float, float] | None:
        """Return where another way than torch's gains, as ``Context.attention``: in bfloat16 on a CPU, op by op."""
        serves = self.device == "cpu" and self.dtype is torch.bfloat16 and self.executor == "eager"
        if not serves or self.fuse is False or self.policy.level == "O0":
            return None
        # "recomputed" keeps nothing for the backward and is more exact, so it comes first. With AVX512-BF16 units
        # "products" take clearly less time (0.65 to 0.8 of it at the sizes of models), with AMX they do not.
        ways: tuple[AttentionWay, ...] = ("compiled",) if self.fuse is True else ("recomputed", "products")
        way = self.device_costs.best_attention(self.dtype, ways)
        alone, trained = self.device_costs.attention_from(self.dtype, way)
        return None if min(alone, trained) == inf else (way, alone, trained)

    @property
    def _loops(self) -> LoopPrices | None:
        """Return where loops gain; by shipped costs where those that serve know nothing of them."""
        if self.regions != "loops":
            return None
        return self.device_costs.loops or shipped_for_here(self.device).loops

    @property
    def why_not_compiled(self) -> str:
        """Return why ``fuse=True`` compiles nothing on a CPU; "" where it does."""
        if self.dtype is not torch.bfloat16:
            return "C++ kernels are of bfloat16"
        return why_no_compiler()

    @property
    def chooses(self) -> bool:
        """Return whether settings name single regions."""
        return isinstance(self.fuse, Mapping)

    def check_regions(self, names: Sequence[str]) -> None:
        """Raise PolicyError for a pattern in ``fuse`` that names none of the regions that formed."""
        for pattern in self.fuse if isinstance(self.fuse, Mapping) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PolicyError(
                    f"fuse: {pattern!r} names no region{did_you_mean(pattern, names)}; "
                    f"there are {', '.join(sorted(names)) or 'none'}"
                )

    @property
    def regions(self) -> Literal["", "aten", "triton", "loops"]:
        """Return the way in which fused regions run; "" for none."""
        if self.fuse is False or self.policy.level == "O0" or self.executor == "inductor":
            return ""
        # What the user named comes before what the device has.
        if self.fuse == "aten":
            return "aten"
        if (self.device == "cuda" or self.fuse != "auto") and not why_no_kernels(self.device):
            return "triton"
        if self.fuse is True and self.device == "cpu":
            return "" if self.why_not_compiled else "loops"
        return "aten" if isinstance(self.fuse, Mapping) else ""

    def _check_lower(self) -> None:
        if self.lower == "always":
            return
        if isinstance(self.lower, DeviceCosts):
            if self.lower.device != self.device or self.dtype not in self.lower.curves:
                raise ValueError(
                    f"lower=DeviceCosts of {self.lower.device} with {', '.join(map(str, self.lower.curves))}: the "
                    f"conversion is to {self.dtype} on {self.device}. Give costs of that device and dtype"
                )
        else:
            one_of("lower", self.lower, ("always", "pays"))
        if self.placement == "autocast":
            raise ValueError(
                "lower='pays' with placement='autocast': torch.autocast lowers whatever the cost. Leave one of them out"
            )
        if self.policy.lowers_parameters:
            raise ValueError(
                "lower='pays' at level O3, which lowers the parameters themselves: an op in FP32 would cast them back "
                "at every call. Take level O2 or O1, or lower='always'"
            )

    def _check_fuse(self) -> None:
        if not isinstance(self.fuse, Mapping):
            return one_of("fuse", self.fuse, (True, False, "auto", "aten"))
        for pattern, yes in self.fuse.items():
            if not isinstance(pattern, str) or not isinstance(yes, bool):
                raise ValueError(
                    f"fuse={{{pattern!r}: {yes!r}}}: give patterns of region names and True or False, such as "
                    "{'fused_*gelu*': False}; fxprec.report lists the names"
                )
        return None


def why_no_kernels(device: str) -> str:
    """Return why fused kernels do not run on a device of this type; "" where they do."""
    from fxprec.kernels.launch.triton_support import why_not  # which loads Triton

    return why_not(device)


def why_no_compiler() -> str:
    """Return why C++ kernels cannot be made here; "" where they can."""
    # Whose ops are registered when it is imported.
    from fxprec.kernels.cpu import compiled_attention

    return compiled_attention.why_not()


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise a ValueError that lists the choices and the nearest one."""
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}{hint}")
