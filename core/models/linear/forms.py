"""The forms a product on a CPU can take, by name. Which of them is right and quick here is evidence's matter.

A *family* is what a person asks for and a record says (``int8``, ``int4``, or a dense dtype); a *form* is one
way to run it:

- ``int8-KERNEL``: a kernel of ``core.models.linear.int8``, activations in one part. Close enough to the model
  only where its outliers were turned away (``core.models.rotation``), or in a draft, whose q may be rounded;
- ``int8x2-KERNEL``: the same with activations in two parts, twice the rows, or as they are where the kernel
  does not round them;
- ``int4``; ``int4+FORM`` reads prompts by another form of the same weights, which is kept beside;
- ``bfloat16`` and ``float32``: dense.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from core.models.linear.int8 import KERNELS
from core.models.linear.products import DenseLinear, Int4Linear, Int8Linear, Linear, PaddedLinear

Make = Callable[[torch.Tensor], Linear]  # turns a weight matrix (out, in) into a product

ONE, TWO = "int8-", "int8x2-"  # parts of an activation
BESIDE = "int4+"
DENSE = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# From the one likeliest to be quick, for slow ones are known by what came before them.
NAMES = (
    *(
        parts + name
        for name, kernel in KERNELS.items()
        for parts in (ONE, TWO)
        if parts == TWO or kernel.rounds
    ),
    "int4",
    *DENSE,
)


def family(form: str) -> str:
    """The family of a form; a family is its own."""
    return "int8" if form.startswith((ONE, TWO)) else "int4" if form.startswith(BESIDE) else form


def in_two(form: str) -> str:
    """The form for activations with outliers: that in two parts of an int8 form in one, others themselves."""
    return TWO + form.removeprefix(ONE) if form.startswith(ONE) else form


def needs_rotation(form: str) -> bool:
    """Whether a target runs in ``form`` only with its outliers turned away."""
    return form.startswith(ONE)


def is_close(form: str) -> bool:
    """Whether a target may run in ``form``, rotated if it must be: activations have eight bits at least."""
    return not form.startswith(ONE) or half(form) == 127


def maker(form: str) -> Make:
    """Makes products in ``form``; a matrix that int4 cannot take becomes float32."""
    if family(form) == "int8":
        kernel = _kernel(form)
        return partial(Int8Linear, kernel=kernel, parts=2 if form.startswith(TWO) and kernel.rounds else 1)
    if family(form) == "int4":
        make, whole = partial(Int4Linear, beside=_beside(form)), maker("float32")
        return lambda weight: make(weight) if Int4Linear.takes(weight) else whole(weight)
    dtype = DENSE[form]
    return lambda weight: DenseLinear(weight.to(dtype))


def _beside(form: str) -> Make | None:
    """What makes the products that an int4 form keeps beside."""
    beside = form.removeprefix(BESIDE)
    if beside in DENSE:  # whose rows depend on how many there are: there are always as many
        return lambda weight: PaddedLinear(weight.to(DENSE[beside]))
    return None if beside == form == "int4" else maker(beside)


def takes(form: str, weight: torch.Tensor) -> bool:
    """Whether a form can hold a matrix (out, in) of this size."""
    return family(form) != "int4" or Int4Linear.takes(weight)


def rounded(form: str, weight: torch.Tensor) -> torch.Tensor:
    """A matrix (out, in) as a form holds it, in a floating dtype that loses nothing of it."""
    kind = family(form)
    if kind in DENSE:
        return weight.to(DENSE[kind])
    return (Int8Linear if kind == "int8" else Int4Linear).rounded(weight)


def half(form: str) -> int:
    """The largest whole number an activation can be without being rounded, where it is the row's largest."""
    return _kernel(form).half if family(form) == "int8" else 127


def _kernel(form: str):
    return KERNELS[form.removeprefix(TWO).removeprefix(ONE)]
