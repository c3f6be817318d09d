"""How long passes take in each form of products, in a model's sizes and with weights out of the near caches.

Knows sizes and no model, and not which form is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from core.models import Progress
from core.models.linear import forms
from core.models.linear.findings import ROWS, Evidence, Sizes
from core.models.linear.forms import maker
from core.models.linear.products import MANY

LOOKING = "Finding the fastest right products on this processor"
BUDGET = 2.0  # seconds of timing after which no other turn begins
LAYERS = 2  # layers that are timed, for all there are
MOST_WEIGHTS = 2_000_000  # of a matrix that is timed; of a larger one so many stand for all
REPEATS = 3


def timed(table: Sequence[Evidence], sizes: Sizes, say: Progress) -> list[Evidence]:
    """The table with seconds for all that is right. Passes of the forms take turns, so that what disturbs the
    machine meets all of them. On a slow machine there is one turn, and what a prompt's rows take is reckoned
    from what few take, at most."""
    flush = torch.empty(64 * 1024 * 1024, dtype=torch.uint8)
    weights: dict[tuple[int, int], torch.Tensor] = {}
    models = {entry.form: _Model(entry.form, sizes, weights) for entry in table if entry.right}
    seconds = {form: [[math.inf] * len(ROWS), [math.inf] * len(ROWS)] for form in models}
    begun = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() - begun > BUDGET:
            break
        for done, (form, model) in enumerate(models.items()):
            say(LOOKING, 0.5 + (repeat + done / len(models)) / REPEATS / 2)
            for place, rows in enumerate(ROWS):
                if rows == MANY and repeat:
                    continue
                few = seconds[form][0][place - 1]  # of as many rows as stand before
                if rows == MANY and MANY / ROWS[place - 1] * few > BUDGET / 2:
                    seconds[form][0][place] = MANY / ROWS[place - 1] * few
                    seconds[form][1][place] = seconds[form][1][0]
                    continue
                flush.fill_(repeat)
                for kind, work in enumerate((model.layers, model.head)):
                    start = time.perf_counter()
                    work(rows)
                    taken = time.perf_counter() - start
                    seconds[form][kind][place] = min(seconds[form][kind][place], taken)
    return [
        replace(
            entry,
            layers=tuple(models[entry.form].layers_scale * s for s in seconds[entry.form][0]),
            head=tuple(models[entry.form].head_scale * s for s in seconds[entry.form][1]),
        )
        if entry.form in models
        else entry
        for entry in table
    ]


class _Model:
    """The products of a model of these sizes in one form, or so many of them that they can stand for all."""

    def __init__(self, form: str, sizes: Sizes, weights: dict[tuple[int, int], torch.Tensor]):
        """``weights`` holds matrices by size, for all models to share."""
        makers = [maker(form)] * (len(sizes.layers) - 1) + [maker(forms.in_two(form))]
        self.stack = [
            [
                make(_weight(size, MOST_WEIGHTS, weights))
                for make, size in zip(makers, sizes.layers, strict=True)
            ]
            for _ in range(LAYERS)
        ]
        self.top = makers[-1](_weight(sizes.head, 2 * MOST_WEIGHTS, weights))
        whole = sizes.count * sum(math.prod(size) for size in sizes.layers)
        self.layers_scale = whole / sum(math.prod(p.shape) for layer in self.stack for p in layer)
        self.head_scale = math.prod(sizes.head) / math.prod(self.top.shape)
        widths = {inside for _, inside in (*sizes.layers, sizes.head)}
        self.inputs = {(rows, width): torch.randn(rows, width) for rows in ROWS for width in widths}

    def layers(self, rows: int) -> None:
        for layer in self.stack:
            for product in layer:
                product.unscaled(self.inputs[rows, product.shape[1]], rows == MANY)

    def head(self, rows: int) -> None:
        """A pass scores a prompt's last id alone."""
        product = self.top
        product.unscaled(self.inputs[1 if rows == MANY else rows, product.shape[1]])


def _weight(size: tuple[int, int], most: int, weights: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """A matrix of this size, or as many of its rows as come to ``most`` weights, 64 at least."""
    out, inside = size
    rows = min(out, max(64, most // inside // 64 * 64))
    if (rows, inside) not in weights:
        weights[rows, inside] = torch.randn(rows, inside)
    return weights[rows, inside]


@torch.inference_mode()
def attention_seconds() -> dict[str, tuple[float, ...]]:
    """Seconds of attention as a layer of the embedded target has it, behind 1,024 ids, by dtype, for 4 and
    for 256 rows of a pass."""
    found = {}
    for name, dtype in forms.DENSE.items():
        keys = torch.randn(1, 3, 1280, 64).to(dtype)
        seconds = []
        for rows in (4, MANY):
            query = torch.randn(1, 3, -(-3 * rows // 8) * 8, 64).to(dtype)
            mask = torch.zeros(query.shape[2], keys.shape[2], dtype=dtype)
            least = math.inf
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
                least = min(least, time.perf_counter() - start)
            seconds.append(least)
        found[name] = tuple(seconds)
    return found
