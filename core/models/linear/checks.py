"""Whether a form of a product is right on this machine: against float64, and row by row independent.

Inputs are hard ones: sums as large as they get, one huge activation among small ones, rows of zeros, 1 to 17
rows. What cannot run here drops out, and so does what takes over ``HOPELESS`` times as long as the quickest,
after that one call. Knows sizes and no model, and not which right form is fastest.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from core.models.linear import forms
from core.models.linear.findings import FLOAT, Evidence, Sizes
from core.models.linear.forms import maker
from core.models.linear.products import MANY, Linear

CHECKED_ROWS = 17  # a round has no more
CHECKED_OUT, CHECKED_WEIGHTS = 1024, 1024 * 1536  # of a matrix, at most
HOPELESS = 50
SLOW = 0.1  # seconds of a call that is not repeated
QUICK, FEW_ROWS = 0.005, (2, 4, 17)  # of a form whose first call takes longer, fewer row counts are checked
TOLERANCE = {"int8": 1e-5, "int4": 0.01, "bfloat16": 0.01, "float32": 1e-5}


def check(form: str, sizes: Sizes, most_seconds: float = math.inf) -> tuple[Evidence, float]:
    """Whether ``form`` is right here, and seconds of a call; more than ``most_seconds`` end the check."""
    evidence, worst, alone, taken = Evidence(form), 0.0, 0.0, 0.0
    for size in {sizes.layers[0], sizes.layers[-1]}:
        weight = hard_weight(*size)
        out, inside = weight.shape
        if not forms.takes(form, weight):
            return replace(evidence, verdict=f"does not take a matrix of {out} × {inside}"), taken
        x = hard_inputs(inside, forms.half(form))
        try:
            product = maker(form)(weight)
            product(x)  # kernels set themselves up at their first call
            start = time.perf_counter()
            y = product(x)
            taken = time.perf_counter() - start
        except (RuntimeError, AttributeError) as error:
            return replace(evidence, verdict=f"does not run here ({_first_line(error)})"), taken
        worst = max(worst, _error(y, x, forms.rounded(form, weight)))
        for _ in range(2) if taken < SLOW else ():  # one call may be disturbed
            start = time.perf_counter()
            product(x)
            taken = min(taken, time.perf_counter() - start)
        if taken > most_seconds and forms.family(form) not in forms.DENSE:
            quick = 1e3 * most_seconds / HOPELESS
            verdict = f"too slow: {1e3 * taken:.0f} ms where the quickest takes {quick:.2g}"
            return replace(evidence, error=worst, verdict=verdict), taken
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))  # whose sums are rounded
        single = torch.cat([product(row[None]) for row in x])
        for rows in range(2, CHECKED_ROWS + 1) if taken < QUICK else FEW_ROWS:
            difference = (product(x[:rows]) - single[:rows]).abs().max() / single.abs().max()
            alone = max(alone, difference.item())
    verdict = ""
    if worst > TOLERANCE[forms.family(form)] and form != FLOAT:  # what is left where nothing is right
        verdict = f"wrong by {worst:.0%}"
    elif alone and forms.family(form) not in forms.DENSE:
        verdict = f"a row depends on the rows beside it, by {alone:.0e}"  # the dense ones are a last resort
    return replace(evidence, error=worst, alone=alone, verdict=verdict), taken


def reads_alike(product: Linear) -> bool:
    """Whether a row of a prompt comes out the same wherever the prompt is cut, bit for bit."""
    x = torch.randn(MANY, product.shape[1], generator=torch.Generator().manual_seed(3))
    whole = product.many(x)
    cuts = ((0, 1), (0, 255), (7, 3), (100, 17), (100, 156), (255, 1))
    return all(torch.equal(product.many(x[at : at + rows]), whole[at : at + rows]) for at, rows in cuts)


@torch.inference_mode()
def attends_alike(name: str, sizes: Sizes) -> bool:
    """Whether a row of attention in this dtype is the same in passes of more and of fewer blocks of rows."""
    _, kv_heads, size = sizes.attention
    generator = torch.Generator().manual_seed(4)
    dtype = forms.DENSE[name]
    query, keys = (torch.randn(1, kv_heads, n, size, generator=generator).to(dtype) for n in (56, 512))
    mask = torch.zeros(56, 512, dtype=dtype)

    def attended(rows: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(query[:, :, :rows], keys, keys, attn_mask=mask[:rows])

    whole = attended(56)
    return all(torch.equal(attended(rows), whole[:, :, :rows]) for rows in range(8, 56, 8))


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


def hard_weight(out: int, inside: int) -> torch.Tensor:
    """A matrix (out, in) float32, half of whose rows are as large as its numbers get, and one is zero; of a
    large one some of its rows."""
    out = min(out, CHECKED_OUT, max(16, CHECKED_WEIGHTS // inside // 16 * 16))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out, inside, generator=generator)
    weight[: out // 4] = weight[: out // 4].sign()
    weight[out // 4 : out // 2] = 1.0
    weight[-1] = 0.0
    return weight


def hard_inputs(inside: int, half: int) -> torch.Tensor:
    """``CHECKED_ROWS`` rows of whole numbers up to ``half``, which every form holds without rounding."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-half, half + 1, (CHECKED_ROWS, inside), generator=generator).float()
    x[:, 0] = half  # a row's largest number is its scale
    x[0], x[1], x[2] = half, -half, 0
    x[3, ::2], x[3, 1::2] = half, -half
    x[4, 1:] = x[4, 1:].sign()  # one huge activation among small ones
    return x


def _error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest difference from the product in float64, as a share of the sum of the sizes in it."""
    x, weight = x.double(), weight.double()
    sizes = (x.abs() @ weight.abs().T).clamp_min(1e-30)
    error = ((y.double() - x @ weight.T).abs() / sizes).amax().item()
    return error if math.isfinite(error) else math.inf


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
