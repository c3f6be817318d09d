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

from core.machine.progress import Progress
from core.models.linear import forms
from core.models.linear.findings import ROWS, Evidence, Sizes
from core.models.linear.forms import maker
from core.models.linear.products import MANY

LOOKING = "Finding the fastest right products on this processor"
BUDGET = 2.0  # seconds of timing after which no other turn begins
# What is timed stands for all there is: two layers, or one, or a part of it, and a part of the head.
LAYERS, WEIGHTS, HEAD_WEIGHTS = 2, 7_200_000, 4_000_000
ATTENDED = 576  # numbers of the heads that are timed, or of those of one key head
BEHIND = 1024  # ids
REPEATS = 3


def timed(table: Sequence[Evidence], sizes: Sizes, say: Progress) -> list[Evidence]:
    """The table with seconds for all that is right. Passes of the forms take turns, so that what disturbs the
    machine meets all of them. On a slow machine there is one turn, and what a prompt's rows take is reckoned
    from what few take, at most."""
    flush = torch.empty(64 * 1024 * 1024, dtype=torch.uint8)
    weights: dict[tuple[int, int], torch.Tensor] = {}
    models = {entry.form: _Model(entry.form, sizes, weights) for entry in table if entry.right}
    seconds = {form: [[math.inf] * len(ROWS), [math.inf] * len(ROWS)] for form in models}
    drafts = dict.fromkeys(models, math.inf)
    begun = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() - begun > BUDGET:
            break
        for done, (form, model) in enumerate(models.items()):
            say(f"{LOOKING}: timing {form}", 0.5 + (repeat + done / len(models)) / REPEATS / 2)
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
            drafts[form] = min(drafts[form], model.draft_seconds(flush))
    return [
        replace(
            entry,
            layers=tuple(models[entry.form].layers_scale * s for s in seconds[entry.form][0]),
            head=tuple(models[entry.form].head_scale * s for s in seconds[entry.form][1]),
            draft=drafts[entry.form],
        )
        if entry.form in models
        else entry
        for entry in table
    ]


class _Model:
    """The products of a model of these sizes in one form, or so many of them that they can stand for all."""

    def __init__(self, form: str, sizes: Sizes, weights: dict[tuple[int, int], torch.Tensor]):
        """``weights`` holds matrices by size, for all models to share."""
        layer = sum(math.prod(size) for size in sizes.layers)
        count = max(1, min(LAYERS, WEIGHTS // layer))
        share = min(1.0, WEIGHTS / (count * layer))
        parts = [(_rows(out, share), inside) for out, inside in sizes.layers]
        head = _rows(sizes.head[0], HEAD_WEIGHTS / math.prod(sizes.head)), sizes.head[1]
        own, target = maker(form), maker(forms.in_two(form))
        makers = [own] * (len(parts) - 1) + [target]

        def weight(size: tuple[int, int]) -> torch.Tensor:
            if size not in weights:
                weights[size] = torch.randn(*size)
            return weights[size]

        self.stack = [
            [make(weight(size)) for make, size in zip(makers, parts, strict=True)] for _ in range(count)
        ]
        self.top = target(weight(head))
        # What a draft runs otherwise than a target.
        same = forms.in_two(form) == form
        self.draft_last = [layer[-1] if same else own(weight(parts[-1])) for layer in self.stack]
        self.draft_top = self.top if same else own(weight(head))
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

    def draft_seconds(self, flush: torch.Tensor) -> float:
        """Of one row of all layers and of a third of the head, as a draft runs them."""
        flush.fill_(0)
        start = time.perf_counter()
        for layer, last in zip(self.stack, self.draft_last, strict=True):
            for product in (*layer[:-1], last):
                product.unscaled(self.inputs[1, product.shape[1]])
        middle = time.perf_counter()
        self.draft_top.unscaled(self.inputs[1, self.draft_top.shape[1]])
        end = time.perf_counter()
        return self.layers_scale * (middle - start) + self.head_scale * (end - middle) / 3


def _rows(out: int, share: float) -> int:
    """A share of a matrix's rows, 64 at least where there are as many."""
    return out if share >= 1 else min(out, max(64, int(out * share) // 64 * 64))


@torch.inference_mode()
def attention_seconds(sizes: Sizes) -> dict[str, tuple[float, ...]]:
    """Seconds of attention as a layer has it, behind ``BEHIND`` ids, by dtype, for 4 and for 256 rows of a
    pass. Of many heads some are timed and stand for all."""
    heads, kv_heads, size = sizes.attention
    group = heads // kv_heads
    some = max(1, min(kv_heads, ATTENDED // (group * size)))
    found = {}
    for name, dtype in forms.DENSE.items():
        keys = torch.randn(1, some, BEHIND + MANY, size).to(dtype)
        seconds = []
        for rows in (4, MANY):
            query = torch.randn(1, some, -(-group * rows // 8) * 8, size).to(dtype)
            mask = torch.zeros(query.shape[2], keys.shape[2], dtype=dtype)
            least = math.inf
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
                least = min(least, time.perf_counter() - start)
            seconds.append(kv_heads / some * least)
        found[name] = tuple(seconds)
    return found
