"""Cases that fail on faults that are known and not mended yet: 'group-case-capture' -> the fault. To be empty.

Strict: who mends a fault takes its lines away.
"""

KNOWN: dict[str, str] = {
    "functions-own_function_with_a_product-auto": "bodies of autograd functions: mixed dtypes in the backward",
    "functions-own_function_with_a_product-dynamo": "bodies of autograd functions: mixed dtypes in the backward",
    "writes-class_attribute-auto": "writes through type(self) go to the dynamic subclass",
}
