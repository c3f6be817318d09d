"""Attention of a tree's rows on a processor: each comes out as the row of a chain does, bit for bit; and the
mask by which a card's rows see their ancestors alone.

Where a row's ancestors lie apart in the cache, its sums over keys are made in another order than a chain's.
So the tree is walked branch by branch: the keys and values of a branch are laid behind what was committed in
the order of a chain, and the rows of it that were not attended for attend as those of a chain do, over the
same blocks of keys with the same mask. The next branch lays over them what it does not share. A row is
attended for once; what the walk costs is a call of attention for each branch and layer in the place of one
for all.

Knows rows, keys and masks; no weights, no ids and nothing of where trees come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from core.models.key_blocks import KEY_BLOCK
from core.models.kv_cache import KVCache

Mask = Callable[[int, int], torch.Tensor]  # of so many rows of a chain behind so many ids


def depths(parents: Sequence[int], start: int) -> list[int]:
    """The positions of a tree's rows whose roots follow ``start`` ids; a root's parent is -1."""
    found: list[int] = []
    for parent in parents:
        found.append(start if parent < 0 else found[parent] + 1)
    return found


def along_a_branch(k: int, width: int) -> list[int]:
    """The parents of a tree's rows, the root's own first: ``width`` children at each of ``k`` positions, the
    first of which has children. The trees that drafters make are such."""
    return [-1, *(1 + (depth - 1) * width if depth else 0 for depth in range(k) for _ in range(width))]


def families(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of a tree's rows that follow the same one, as (first row, end)."""
    first = 0
    for end in range(1, len(parents) + 1):
        if end == len(parents) or parents[end] != parents[first]:
            yield first, end
            first = end


def show_ancestors(mask: torch.Tensor, parents: Sequence[int], start: int) -> None:
    """Zeros in ``mask`` (rows, keys), which is -inf all over, what each row of a tree behind ``start`` ids
    may see: those ids, its ancestors and itself. Asks a card for nothing and sends it nothing."""
    mask[:, :start] = 0
    tree = mask[:, start : start + len(parents)]
    tree.diagonal().zero_()
    for first, end in families(parents):
        if (parent := parents[first]) >= 0:
            tree[first:end, : parent + 1] = tree[parent, : parent + 1]


class Walk:
    """The order in which rows are attended for: ``order`` names the tree's rows, each child behind its parent
    or behind the branches of its elder siblings; ``back`` (rows,) int64 says where in it each row of the tree
    is.
    """

    def __init__(self, parents: Sequence[int], start: int):
        children: dict[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(parents):
            children[parent].append(row)
        self.order: list[int] = []
        ahead = children[-1][::-1]
        while ahead:
            self.order.append(ahead.pop())
            ahead += children[self.order[-1]][::-1]
        self.back = torch.empty(len(parents), dtype=torch.int64)
        self.back[self.order] = torch.arange(len(parents))
        at = depths(parents, start)
        self.positions = [at[row] for row in self.order]
        # Pieces of branches, (first row, end) of the order. A chain's pass is made in two at a block's end,
        # too.
        begins = [
            place
            for place, row in enumerate(self.order)
            if not place or parents[row] != self.order[place - 1] or self.positions[place] % KEY_BLOCK == 0
        ]
        self._pieces = list(zip(begins, [*begins[1:], len(parents)], strict=True))
        self._steps: list[tuple] = []

    def begin(self, cache: KVCache, new: torch.Tensor, asked: torch.Tensor, mask: Mask) -> None:
        """Makes the views of a pass, which are the same in each layer but for what they hold.

        In ``cache`` there is room for all rows; ``new`` (2, rows, key heads, head size) are a layer's keys
        and values and ``asked`` (key heads, rows, queries of a key head, head size) its queries, both in the
        walk's ``order``.
        """
        kv_heads, _, group, size = asked.shape
        self._attended = torch.empty(len(self.order), group * kv_heads * size, dtype=cache.dtype)
        self._steps = []
        masks: dict[tuple[int, int], torch.Tensor] = {}  # siblings have the same
        for first, end in self._pieces:
            rows, position = end - first, self.positions[first]
            if (rows, position) not in masks:
                masks[rows, position] = mask(rows, position)
            seen_by = masks[rows, position]
            query = torch.zeros(1, kv_heads, len(seen_by), size, dtype=cache.dtype)
            self._steps.append(
                (
                    cache.of_layers(position, position + rows),
                    new[:, first:end],
                    query[0, :, : rows * group].view(kv_heads, rows, group, size),
                    asked[:, first:end],
                    query,
                    *cache.seen(seen_by.shape[1]),
                    seen_by,
                    self._attended[first:end].view(rows * group, kv_heads, size),
                    rows * group,
                )
            )

    def attend(self, layer: int) -> torch.Tensor:
        """What the rows of a layer attend to, (rows, heads * head size): one query of each key head of
        a position, then the next of each. The keys in the cache are afterwards those of the last branch."""
        for place, new, asking, asked, query, keys, values, mask, out, queries in self._steps:
            place[layer].copy_(new)
            asking.copy_(asked)
            attended = F.scaled_dot_product_attention(query, keys[layer], values[layer], attn_mask=mask)
            out.copy_(attended[0, :, :queries].transpose(0, 1))
        return self._attended
