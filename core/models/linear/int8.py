"""Kernels that multiply int8 weights by activations in whole steps, each around one of torch's operators.

A kernel is made from ``levels`` (out, in) int8 and ``scale`` (out,) float32, and takes ``x`` (rows, in)
float32 in steps, from ``-half`` to ``half``: it rounds x to whole steps and gives
``round(x) @ levels.T * scale`` in float32, each row as if it were alone. The sums are of integers, so their
order does not show. One takes x as it is and sums in float32 (``rounds`` says which).

None of them is right or quick everywhere, and a processor's flags do not say where: FBGEMM's sums of two
products can saturate in 16 bits on processors without VNNI (so it comes with 7-bit activations, too, whose
sums cannot); oneDNN's product is wrong in the same way on some, and on others a thousand times slower than
it looks. So each is held against float64 and timed before it is used: ``core.models.linear.evidence``.

Making one raises RuntimeError, AttributeError or NotImplementedError where this build of torch has no such
operator.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch


class Kernel(Protocol):
    """``half``: the largest step; ``rounds``: whether x is rounded to steps."""

    name: str
    half: int
    rounds: bool

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor): ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Fbgemm:
    """FBGEMM's product (x86) in one operator that rounds, multiplies and gives float32."""

    name, half, rounds, engine = "fbgemm", 127, True, "fbgemm"

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor):
        self.packed = _pack(levels, scale, self.engine)
        self.product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, 1.0, self.half + 1, self.packed)


class Fbgemm7(Fbgemm):
    """The same with activations of 7 bits: two products of at most 127 · 127 fit a 16-bit sum."""

    name, half = "fbgemm7", 63


class Onednn:
    """oneDNN's product of unsigned 8-bit activations. With signed ones it has fast code for AMX alone."""

    name, half, rounds = "onednn", 127, True

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor):
        self.scale = scale
        self.zero = torch.zeros(len(levels), dtype=torch.int32)
        self.packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self.product = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The conversion cuts off what is behind the point.
        steps = x.add(self.half + 1.5).to(torch.uint8)
        return self.product(
            steps,
            1.0,
            self.half + 1,
            self.packed,
            self.scale,
            self.zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )


class Qnnpack:
    """QNNPACK's product (ARM). It finds one scale for all rows by the largest and smallest number: two more
    columns, with weights of zero, hold 127 and -128 in every row, so that a step is always 1.
    """

    name, half, rounds, engine = "qnnpack", 127, True, "qnnpack"

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor):
        self.packed = _pack(torch.nn.functional.pad(levels, (0, 2)), scale, self.engine)
        self.product = torch.ops.quantized.linear_dynamic.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.pad(x, (0, 2), value=127.0)
        x[:, -1] = -128
        return self.product(x, self.packed, False)


class Weights:
    """Int8 weights against activations as they are, float32 sums: what torch has everywhere, for few rows."""

    name, half, rounds = "weights", 127, False

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor):
        self.levels, self.scale = levels, scale
        self.product = torch.ops.aten._weight_int8pack_mm.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.levels, self.scale)


KERNELS: dict[str, type[Kernel]] = {
    kernel.name: kernel for kernel in (Fbgemm, Fbgemm7, Onednn, Qnnpack, Weights)
}


def _pack(levels: torch.Tensor, scale: torch.Tensor, engine: str):
    before, zeros = torch.backends.quantized.engine, torch.zeros(len(levels), dtype=torch.long)
    with warnings.catch_warnings():  # of tensors that some later torch will not have: then others run
        warnings.simplefilter("ignore", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(levels, scale.double(), zeros, 0)
    torch.backends.quantized.engine = engine
    try:
        return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = before
