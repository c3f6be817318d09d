"""Matrix products for a decoder, in the forms a CPU runs fast, and bitsandbytes' for a CUDA card.

Every form is a callable ``(rows, in) -> (rows, out)``, floating, that takes the decoder's activations and
gives the dtype its kernel gives: what follows takes it as it comes, which saves a conversion. ``unscaled``
gives the same as two factors, the kernel's own output and a scale a row (None where there is none), for
callers that multiply by something anyway. In int8 and int4 row i depends on input row i alone, bit for bit
and at every row count (docs/ENGINE.md, rule 13: a verification pass must score a token as a one-row pass
would).

- ``dense``: the weights as they are, float32 or 16 bits.
- ``int8``: symmetric int8 weights with one scale an output row, activations rounded with one scale a row
  *before* the product, so no row sees another's scale. Which kernel multiplies is
  ``core.models.linear.int8``'s matter.
- ``int4``: 4-bit weights in groups of 32 inputs with a scale and an offset each (the layout of
  GGUF's Q4_1), bfloat16 activations, float32 sums. Weights that came from a Q4_1 file keep their
  16 levels: every group of such a file holds its own minimum and maximum, so quantising the
  dequantised weights again finds the same levels. Its kernel takes as long for each of many rows as for
  one: for reading prompts it may keep the weights in another form, too.
- ``llm-int8``: bitsandbytes' int8 weights and activations, each with a scale a row, products in int32
  (Dettmers et al. 2022, arXiv:2208.07339, with no outliers apart).
- ``nf4``: bitsandbytes' 4 bits with double quantisation and 16-bit activations (Dettmers et al. 2023,
  arXiv:2305.14314); fused kernels for few rows, on a card from bitsandbytes 0.50 on.

``rounded`` of a form says which weights it holds: ``core.models.linear.checks`` holds its kernel against a
float64 product of those. Knows nothing of models, and not which form is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from core.models.linear.int8 import Kernel

Scaled = tuple[torch.Tensor, torch.Tensor | None]
_TINY = torch.tensor(1e-30)
GROUP = 32  # inputs that share a scale in the int4 form, as in GGUF's Q4_1
ROUNDED = 1 << 22  # weights that are rounded at a time
MANY = 256  # rows of a product by dense weights: which kernel is chosen depends on them


class Linear(Protocol):
    """A product; ``shape`` is (out, in), ``form`` the name of its form in a pair's description."""

    form: str
    shape: tuple[int, int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) to (rows, out)."""

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The same for rows of a prompt, at most ``MANY``, whose last bits may be others."""

    def unscaled(self, x: torch.Tensor, many: bool = False) -> Scaled:
        """(rows, out) and a scale a row (rows, 1) or None; multiplied they are what a call, or ``many``,
        gives."""


class _Whole:
    """A form whose kernel gives the product itself, and for ``many`` rows the same as for few."""

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def unscaled(self, x: torch.Tensor, many: bool = False) -> Scaled:
        return self.many(x) if many else self(x), None


class DenseLinear(_Whole):
    """``x @ weight.T`` in the weight's own dtype."""

    form = "none"

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class Int8Linear:
    """Int8 weights (out, in) with a scale an output row; each activation as one int8 part or as two.

    One part loses too much of this family's peaked activations unless they were rotated
    (``core.models.rotation``, docs/LOG.md). The second part holds what the first rounded away; it costs a
    second row in a product whose time hardly depends on the number of rows. Gives float32.
    """

    form = "int8"

    def __init__(self, weight: torch.Tensor, kernel: type[Kernel], parts: int = 2):
        self.shape = tuple(weight.shape)
        self.product, self.parts, self.half = kernel(*self.levels(weight)), parts, kernel.half
        # As tensors: an operation that is given a number makes a tensor of it first.
        self.one_step, self.finer = torch.tensor(1 / self.half), torch.tensor(2.0 * self.half)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, scale = self.unscaled(x)
        return y.mul_(scale)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def unscaled(self, x: torch.Tensor, many: bool = False) -> Scaled:
        x = x.float()
        if self.parts == 1:
            steps = torch.abs(x)
            step = self._step(steps)
            return self.product(torch.div(x, step, out=steps)), step
        rows, inside = x.shape
        steps = torch.empty(2 * rows, inside)
        coarse, fine = steps.unsafe_split(rows)
        step = self._step(torch.abs(x, out=coarse))
        torch.div(x, step, out=fine)
        torch.round(fine, out=coarse)
        fine.sub_(coarse).mul_(self.finer)
        y, below = self.product(steps).unsafe_split(rows)
        return torch.add(y, below, alpha=0.5 / self.half), step

    def _step(self, sizes: torch.Tensor) -> torch.Tensor:
        """What a step of each row stands for, (rows, 1), of its numbers' sizes. Largest of all sizes, for
        torch's maximum norm takes up to four times as long as both."""
        # A row of zeros keeps a harmless scale instead of dividing by zero.
        return torch.amax(sizes, 1, True).mul_(self.one_step).clamp_min_(_TINY)

    @staticmethod
    def levels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels -127..127 (out, in) int8 and scales (out,) float32."""
        levels, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        for rows in _some(weight):
            part = weight[rows].float()
            scale[rows] = part.abs().amax(1).clamp_min_(1e-30).div_(127)
            levels[rows] = part.div(scale[rows][:, None]).round_()
        return levels, scale

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        """The weights as this form holds them, float64."""
        levels, scale = Int8Linear.levels(weight)
        return levels.double() * scale.double()[:, None]


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels 0..15 (out, in) int32, scale and minimum (out, in / 32) float32, by each group's range."""
    levels = torch.empty(weight.shape, dtype=torch.int32)
    scale, low = (torch.empty(len(weight), weight.shape[1] // GROUP) for _ in range(2))
    for rows in _some(weight):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))
        low[rows], high = groups.amin(2), groups.amax(2)
        scale[rows] = ((high - low[rows]) / 15).clamp_min(1e-30)
        rounded = ((groups - low[rows][..., None]) / scale[rows][..., None]).round_().clamp_(0, 15)
        levels[rows] = rounded.flatten(1).to(torch.int32)
    return levels, scale, low


def _some(weight: torch.Tensor) -> Iterator[slice]:
    """Rows of a matrix (out, in), a few at a time: rounding the head of a large vocabulary as a whole would
    take gigabytes."""
    step = max(1, ROUNDED // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


class PaddedLinear(DenseLinear):
    """A dense product that always gets ``MANY`` rows, zeros behind those there are, and takes no more.

    A row then comes out the same, bit for bit, wherever it stands and whatever the others are, where the
    product's kernel treats its rows alike.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        return super().__call__(F.pad(x, (0, 0, 0, MANY - rows)) if rows < MANY else x)[:rows]


class Int4Linear(_Whole):
    """4-bit weights in groups of 32 inputs; bfloat16 activations, sums in float32. Gives bfloat16.

    ``beside`` makes a product of the same weights for ``many`` rows, which a prompt has; what that gives is
    near what a call gives, not equal.
    """

    form = "int4"

    def __init__(self, weight: torch.Tensor, beside: Callable[[torch.Tensor], Linear] | None = None):
        self.shape = tuple(weight.shape)
        levels, scale, zero = self.levels(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.scale_zero = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
        self.product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.beside = None if beside is None else beside(_unpacked(levels, scale, zero))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.bfloat16(), self.packed, GROUP, self.scale_zero)

    def unscaled(self, x: torch.Tensor, many: bool = False) -> Scaled:
        if many and self.beside is not None:
            return self.beside.unscaled(x, many)
        return self(x), None

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) if self.beside is None else self.beside(x)

    @staticmethod
    def levels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Levels 0..15 (out, in) int32, scale and zero (out, in / 32) bfloat16: the kernel computes
        (level - 8) * scale + zero."""
        levels, scale, low = quantize_int4(weight)
        return levels, scale.bfloat16(), (low + 8 * scale).bfloat16()

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        """The weights as this form holds them, float32."""
        return _unpacked(*Int4Linear.levels(weight))

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether the kernel can run a matrix (out, in) of this size."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0


def _unpacked(levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The weights (out, in) float32 of int4 levels."""
    groups = levels.view(*scale.shape, GROUP).float().sub_(8)
    return groups.mul_(scale.float()[..., None]).add_(zero.float()[..., None]).view(levels.shape)


class LlmInt8Linear(_Whole):
    """bitsandbytes' LLM.int8 of a weight (out, in) that is where it is to run, without outliers. Gives the
    activations' dtype.

    Levels of weights and of activations have a scale a row each, so no row sees another's; the sums are whole
    numbers, and so the same however they are made.
    """

    form = "llm-int8"

    def __init__(self, weight: torch.Tensor):
        from bitsandbytes.functional import int8_vectorwise_quant

        self.shape = tuple(weight.shape)
        self.levels, self.scale, _ = int8_vectorwise_quant(weight.half())
        self.round = int8_vectorwise_quant
        self.product = torch.ops.bitsandbytes.int8_scaled_mm.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        levels, scale, _ = self.round(x.half())
        return self.product(levels, self.levels, scale, self.scale, dtype=x.dtype)


class Nf4Linear(_Whole):
    """bitsandbytes' NF4 of a weight (out, in) that is where it is to run. Multiplies in ``dtype``, and gives
    it."""

    form = "nf4"

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16):
        from bitsandbytes import functional, matmul_4bit

        self.shape, self.dtype = tuple(weight.shape), dtype
        self.packed, self.state = functional.quantize_4bit(
            weight.contiguous(), compress_statistics=True, quant_type="nf4"
        )
        if weight.device.type == "cpu" and functional.has_avx512bf16():
            # As bitsandbytes' own layer does at its first pass: else each product unpacks the whole matrix.
            self.packed, self.state = functional._convert_weight_packed_for_cpu(self.packed, self.state)
        self.product = matmul_4bit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.to(self.dtype), self.packed, self.state)

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether the kernels can run a matrix (out, in) of this size."""
        return weight.shape[0] % 32 == 0 and weight.shape[1] % 64 == 0
