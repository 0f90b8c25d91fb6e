"""Cases that fail on faults that are known and not mended yet: 'group-case-capture' -> the fault. To be empty.

Strict: who mends a fault takes its lines away.
"""

KNOWN: dict[str, str] = {
    "functions-own_function_with_a_product-auto": "bodies of autograd functions: mixed dtypes in the backward",
    "functions-own_function_with_a_product-dynamo": "bodies of autograd functions: mixed dtypes in the backward",
    "numbers-negative_zero-auto": "A3: equal is not same",
    "numbers-negative_zero_outside-auto": "A3: equal is not same",
    "numbers-signed_zero_as_an_argument-auto": "A3: equal is not same",
    "objects-own_dict_by_name-auto": "A2: state reached from the module",
    "surroundings-environment_missing-auto": "A1: state outside of the model is baked in",
    "surroundings-patched_function_of_torch-auto": "A1: state outside of the model is baked in",
    "writes-class_attribute-auto": "writes through type(self) go to the dynamic subclass",
}
