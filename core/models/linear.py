"""Matrix products for a decoder, in the forms a CPU runs fast, and bitsandbytes' for a CUDA card.

Every form is a callable ``(rows, in) -> (rows, out)``, floating, that takes the decoder's activations and
gives the dtype its kernel gives: what follows takes it as it comes, which saves a conversion. In int8 and
int4 row i depends on input row i alone, bit for bit and at every row count (docs/ENGINE.md, rule 13: a
verification pass must score a token as a one-row pass would). ``core.models.rows`` measures that.

- ``dense``: the weights as they are, float32 or 16 bits.
- ``int8``: symmetric int8 weights with one scale an output row, activations quantised with one
  scale a row *before* the product, so no row sees another's scale. The sums are in integers:
  exact, in any order. oneDNN's kernel through ``torch.ops.onednn``.
- ``int4``: 4-bit weights in groups of 32 inputs with a scale and an offset each (the layout of
  GGUF's Q4_1), bfloat16 activations, float32 sums. Weights that came from a Q4_1 file keep their
  16 levels: every group of such a file holds its own minimum and maximum, so quantising the
  dequantised weights again finds the same levels. Its kernel takes as long for each of many rows as for
  one: for reading prompts, processors with tiles for bfloat16 may keep dense weights beside the packed.
- ``nf4``: bitsandbytes' 4 bits with double quantisation and bfloat16 activations (Dettmers et al. 2023,
  arXiv:2305.14314); fused kernels for few rows, on a card from bitsandbytes 0.50 on.

Knows nothing of models. Which form is fastest where is measured in ``docs/LOG.md``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
GROUP = 32  # inputs that share a scale in the int4 form, as in GGUF's Q4_1
MANY = 256  # rows of a product by dense weights: which kernel is chosen depends on them
FINE = 254.0  # the fine part of an int8 activation counts in 1/254 of the coarse one: -127 to 127


class DenseLinear:
    """``x @ weight.T`` in the weight's own dtype."""

    form = "none"

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class Int8Linear:
    """Int8 weights (out, in) with a scale an output row; each activation as two int8 parts, 15 bits.

    One int8 part alone loses too much of this family's peaked activations (docs/LOG.md). The second
    part holds what the first rounded away; it costs a second row in a product whose time hardly
    depends on the number of rows. Gives float32.
    """

    form = "int8"

    def __init__(self, weight: torch.Tensor):
        self.shape = tuple(weight.shape)
        scale = weight.float().abs().amax(1).clamp_min(1e-30) / 127
        levels = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self.scale = scale
        self.zero = torch.zeros(weight.shape[0], dtype=torch.int32)
        self.packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self.product = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, rows = x.float(), x.shape[0]
        # A row of zeros keeps a harmless scale instead of dividing by zero.
        row_scale = x.abs().amax(1, True).mul_(1 / 127).clamp_min_(1e-30)
        scaled = x.div(row_scale)
        coarse = scaled.round()
        fine = scaled.sub_(coarse).mul_(FINE).round_()
        parts = torch.cat([coarse, fine]).to(torch.int8)
        y = self.product(
            parts, 1.0, 0, self.packed, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.add(y[:rows], y[rows:], alpha=1 / FINE).mul_(row_scale)


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels 0..15 (out, in) int32, scale and minimum (out, in / 32) float32, by each group's range."""
    out_features, in_features = weight.shape
    groups = weight.float().view(out_features, in_features // GROUP, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).clamp_min(1e-30)
    levels = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
    return levels.to(torch.int32).view(out_features, in_features), scale, low


class Int4Linear:
    """4-bit weights in groups of 32 inputs; bfloat16 activations, sums in float32. Gives bfloat16.

    ``dense`` keeps the same weights in bfloat16, too, at two bytes each, for products of ``many`` rows.
    """

    form = "int4"

    def __init__(self, weight: torch.Tensor, dense: bool = False):
        self.shape = tuple(weight.shape)
        levels, scale, low = quantize_int4(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        # The kernel computes (level - 8) * scale + zero.
        self.scale_zero = (
            torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
        )
        self.product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.dense = None
        if dense:
            scale, zero = self.scale_zero.float().permute(2, 1, 0).unsqueeze(-1)
            weight = levels.view(*scale.shape[:2], GROUP).float().sub_(8).mul_(scale).add_(zero)
            self.dense = weight.to(torch.bfloat16).view(self.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.bfloat16(), self.packed, GROUP, self.scale_zero)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The product of rows of a prompt, up to ``MANY``: by the dense weights where they are kept.

        A row then comes out the same, bit for bit, wherever it stands and whatever the others are: the
        kernel always gets ``MANY`` rows, zeros behind those there are. It is near that of a call, not equal.
        """
        if self.dense is None:
            return self(x)
        x, rows = x.bfloat16(), len(x)
        if rows < MANY:
            x = F.pad(x, (0, 0, 0, MANY - rows))
        return F.linear(x, self.dense)[:rows]

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether the kernel can run a matrix (out, in) of this size."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0


class Nf4Linear:
    """bitsandbytes' NF4 of a weight (out, in) that is where it is to run. Gives bfloat16."""

    form = "nf4"

    def __init__(self, weight: torch.Tensor):
        from bitsandbytes import functional, matmul_4bit

        self.shape = tuple(weight.shape)
        self.packed, self.state = functional.quantize_4bit(
            weight.contiguous(), compress_statistics=True, quant_type="nf4"
        )
        if weight.device.type == "cpu" and functional.has_avx512bf16():
            # As bitsandbytes' own layer does at its first pass: else each product unpacks the whole matrix.
            self.packed, self.state = functional._convert_weight_packed_for_cpu(self.packed, self.state)
        self.product = matmul_4bit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.bfloat16(), self.packed, self.state)

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether the kernels can run a matrix (out, in) of this size."""
        return weight.shape[0] % 32 == 0 and weight.shape[1] % 64 == 0


def dense(dtype: torch.dtype) -> Callable[[torch.Tensor], Linear]:
    """A maker of ``DenseLinear`` in ``dtype``."""
    return lambda weight: DenseLinear(weight.to(dtype))


def fitting(form: str, beside: bool = False) -> Callable[[torch.Tensor], Linear]:
    """``FORMS[form]``; in int8 a matrix of a size that the int4 kernel cannot take. ``beside`` says whether
    int4 keeps dense weights, too."""
    if form == "int4":
        return lambda weight: Int4Linear(weight, beside) if Int4Linear.takes(weight) else Int8Linear(weight)
    return FORMS[form]


def reading(form: str) -> Callable[[torch.Tensor], Linear]:
    """``fitting`` with dense weights beside packed ones where those read prompts faster here."""
    return fitting(form, beside=has_bfloat16_tiles())


def has_bfloat16_tiles() -> bool:
    """Whether this processor multiplies bfloat16 matrices in tiles (AMX), and torch can."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported()


def _supports_int4() -> bool:
    # The kernel exists everywhere; without vector code of its own it is slower than no quantisation.
    return torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")


def _supports_int8() -> bool:
    # Without VNNI the sums of int8 products saturate in 16 bits.
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


FORMS: dict[str, Callable[[torch.Tensor], Linear]] = {
    "int4": Int4Linear,
    "int8": Int8Linear,
    "bfloat16": dense(torch.bfloat16),
    "float32": dense(torch.float32),
}


def best_form(form: str) -> str:
    """``form`` ("int4" or "int8") where this processor runs it well, or else a dense one.

    A fixed rule rather than a race at every start: the same machine always gives the same numbers.
    """
    if {"int4": _supports_int4, "int8": _supports_int8}[form]():
        return form
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def product_dependence(
    linear: Linear,
    in_features: int,
    max_rows: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest difference any earlier row shows when the last row's input grows a hundredfold.

    Every row count from 2 to ``max_rows`` is tried, and each row is compared with its own one-row
    product too; 0.0 means bit-equal throughout. (``core.models.rows`` tests whole models.)
    """
    x = torch.randn(max_rows, in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    worst = 0.0
    single = torch.cat([linear(x[i : i + 1]) for i in range(max_rows)])
    for rows in range(2, max_rows + 1):
        calm = linear(x[:rows])
        loud_input = x[:rows].clone()
        loud_input[-1] *= 100
        loud = linear(loud_input)
        for difference in (calm[:-1] - loud[:-1], calm - single[:rows]):
            worst = max(worst, difference.abs().max().item())
    return worst
