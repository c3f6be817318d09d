"""Matrix products for a decoder: their forms and kernels, and the evidence that chooses among them."""

from core.models.linear.products import (
    MANY,
    DenseLinear,
    Int4Linear,
    Int8Linear,
    Linear,
    LlmInt8Linear,
    Nf4Linear,
    Scaled,
)

__all__ = [
    "MANY",
    "DenseLinear",
    "Int4Linear",
    "Int8Linear",
    "Linear",
    "LlmInt8Linear",
    "Nf4Linear",
    "Scaled",
]
