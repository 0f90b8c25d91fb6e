"""All features, by topic."""

from tests.fuzz.feature import Feature
from tests.fuzz.features.aliases import ALIASES
from tests.fuzz.features.attributes import ATTRIBUTES
from tests.fuzz.features.layers import LAYERS
from tests.fuzz.features.modes import MODES
from tests.fuzz.features.outside import OUTSIDE
from tests.fuzz.features.structure import STRUCTURE
from tests.fuzz.features.writes import WRITES

__all__ = ["FEATURES", "RARELY_TRACED"]

FEATURES: tuple[Feature, ...] = (*LAYERS, *ATTRIBUTES, *OUTSIDE, *WRITES, *ALIASES, *MODES, *STRUCTURE)

#: What static capture declines: chosen less often where it is tested.
RARELY_TRACED = frozenset(
    """
    shape ones value_branch dataclass namespace object slots callable_object tensor_in_list numpy_array
    own_random_attribute numpy_generator python_random numpy_random torch_random global_tensor global_tensor_list
    global_module counter counter_only list tensor_list last use_last shape_cache global_cache lazy_attribute
    itertools object_counter defaultdict set_write deque_write setattr vars_write delete child_write
    dataclass_write buffer_iadd buffer_rebind buffer_mean tensor_attribute_write global_tensor_write
    parameter_write python_float ema_of_numbers buffer_and_attribute grad_enabled no_grad_region set_grad_region
    no_grad_method inference_method requires_grad_of_weight requires_grad_of_input input_dtype exception_by_shape
    checkpoint attention recurrent output_object
    """.split()
)
