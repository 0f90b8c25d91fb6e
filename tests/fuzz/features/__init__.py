"""All features, by topic."""

from tests.fuzz.feature import Feature
from tests.fuzz.features.aliases import ALIASES
from tests.fuzz.features.attributes import ATTRIBUTES
from tests.fuzz.features.layers import LAYERS
from tests.fuzz.features.modes import MODES
from tests.fuzz.features.outside import OUTSIDE
from tests.fuzz.features.structure import STRUCTURE
from tests.fuzz.features.writes import WRITES

__all__ = ["FEATURES"]

FEATURES: tuple[Feature, ...] = (*LAYERS, *ATTRIBUTES, *OUTSIDE, *WRITES, *ALIASES, *MODES, *STRUCTURE)
