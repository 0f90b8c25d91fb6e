"""Whether the torch that runs is one that fxprec was tested with: said once, when fxprec is imported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from fxprec.errors import UntestedTorchWarning
from fxprec.kernels.torch_internals import TESTED_TORCH


def warn_if_untested(version: str, missing: Mapping[str, str]) -> None:
    """Warn of a newer minor version than those tested, and of private names that are not there.

    Args:
        version: of torch.
        missing: private names of torch that were not found, and what goes without each.
    """
    newest = TESTED_TORCH[-1]
    newer = _minor(version) > _minor(newest)
    if not newer and not missing:
        return
    said = [f"torch {version} is newer than {newest}, the newest that fxprec was tested with"] if newer else []
    said += [f"torch {version} has no {name}: {without}" for name, without in missing.items()]
    warnings.warn(
        f"{'; '.join(said)}. Before you rely on it compare a model with its original (fxprec.original), or install "
        f"torch {newest} or a newer fxprec. To silence this: "
        "warnings.filterwarnings('ignore', message='torch .*fxprec')",
        UntestedTorchWarning,
        stacklevel=3,
    )


def _minor(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)
