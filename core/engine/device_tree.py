"""Trees on tensors whose shapes depend on K and the width alone: candidates, verification, the branch kept.

What ``core.verify.tree`` does node by node, for all nodes at once and without a look at any number
(``core.engine.batched``). A tree of ``count`` positions has ``width`` places for candidates at each, of which
the first ones are filled, and goes on behind the first of them (``core.models.tree_walk.along_a_branch``):
its rows are that of the last committed id, then those of the first position's candidates, and so on, empty
places among them. A place that is empty has nothing behind it and is never tried.

So each position that is reached on the way of the first candidates was reached by one test a position before
it, and the test of place s at position d is the d + s th of the round: which draw it takes is known ahead.

The maths is that of ``core.verify.tree``, row for row: q in float32, draws, ratios and residuals in float64.
Knows distributions; no model, mask or cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.engine.device_rule import Rows, draw, largest


@dataclass(frozen=True, slots=True)
class Candidates:
    """For one position: ``ids`` (width,) as columns of the draft's rows, ``q`` and ``soft`` (width, n) as the
    ``Proposal`` of each has them, ``filled`` (width,) bool; ``drawn``, one number, how many took a draw."""

    ids: torch.Tensor
    q: torch.Tensor
    soft: torch.Tensor
    filled: torch.Tensor
    drawn: torch.Tensor


def siblings(row: Rows, width: int, draws: torch.Tensor, greedy: bool) -> Candidates:
    """``core.verify.tree.siblings`` of one row (1, n) at ``draws`` (width,) float64; ``greedy`` at
    temperature 0.

    What comes of a row that is not usable is not filled.
    """
    if width == 1:
        return Candidates(draw(row.p, draws), row.p, row.soft, row.usable, row.usable)
    there = min(width, row.p.shape[-1])
    found = _likeliest(row, there) if greedy else _drawn(row, there, draws)
    return found if there == width else _padded(found, width)


def _drawn(row: Rows, width: int, draws: torch.Tensor) -> Candidates:
    ids, qs, filled = [], [row.p], [row.usable]
    for place in range(width):
        ids.append(draw(qs[-1], draws[place : place + 1]))
        if place < width - 1:
            left = qs[-1].scatter(1, ids[-1][:, None], 0.0)
            mass = left.sum(-1, keepdim=True)
            filled.append(filled[-1] & (mass[:, 0] > 0))
            qs.append(torch.where(mass > 0, left / mass, left))
    q, there = torch.cat(qs), torch.cat(filled)
    return Candidates(torch.cat(ids), q, q, there, there.sum())


def _likeliest(row: Rows, width: int) -> Candidates:
    """The one id of p, which takes a draw, and of ``soft`` those that follow it, which take none."""
    columns = largest(row.soft, width)
    values, order = row.soft.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    # By its own column, not the first of ``soft``: there rounding may have made others equal to it.
    first = row.p.argmax(-1, keepdim=True)
    ids = columns.gather(1, order)
    # The others in their order, the first one taken out wherever it stands.
    behind = (ids == first).to(torch.uint8).sort(dim=-1, stable=True).indices
    ids = torch.cat([first, ids.gather(1, behind)[:, : width - 1]], 1)[0]
    values = torch.cat([values.new_ones(1, 1), values.gather(1, behind)[:, : width - 1]], 1)[0]
    filled = (values > 0) & row.usable
    q = torch.zeros_like(row.p).expand(width, -1).scatter(1, ids[:, None], 1.0)
    return Candidates(ids, q, row.soft.expand(width, -1), filled, row.usable.sum())


def _padded(found: Candidates, width: int) -> Candidates:
    """With empty places up to ``width``: a head of fewer ids than were asked for."""
    more = width - len(found.ids)
    return Candidates(
        F.pad(found.ids, (0, more)),
        F.pad(found.q, (0, 0, 0, more)),
        F.pad(found.soft, (0, 0, 0, more)),
        F.pad(found.filled, (0, more)),
        found.drawn,
    )


def branch_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Of 1 + count * width ``rows`` of a tree the count + 1 that stand before its positions and behind the
    last; all rows of a chain."""
    return rows if width == 1 else torch.cat([rows[:1], rows[1::width]])


def seen_along(seen: torch.Tensor, nodes: torch.Tensor, width: int) -> torch.Tensor:
    """The ids before each of 1 + count * width rows (rows, n) bool, where ``seen`` (n,) came before all."""
    rows = [seen[None]]
    for first in range(0, len(nodes), width):
        rows.append(seen_behind(rows[-1], nodes[first : first + width]))
    return torch.cat(rows)


def seen_behind(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As ``seen_along``, for the candidates ``ids`` (width,) that follow the first of ``rows``."""
    return rows[:1].expand(len(ids), -1).scatter(1, ids[:, None], True)


@dataclass(frozen=True, slots=True)
class JudgedTree:
    """Of count * width nodes ``p``, ``q``, ``u`` and ``overlap`` (nodes,) float64, p and overlap being of
    what the elder siblings left.

    ``row`` (1,) is the target's row from which its own token comes, behind the branch that stands: 0, or one
    more than its last node. ``own`` (1,) is that token, ``own_p`` and ``own_q`` (1,) its probabilities.
    """

    row: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    u: torch.Tensor
    overlap: torch.Tensor
    own: torch.Tensor
    own_p: torch.Tensor
    own_q: torch.Tensor


def judge_tree(
    p: Rows,
    q: torch.Tensor,
    nodes: torch.Tensor,
    filled: torch.Tensor,
    draws: torch.Tensor,
    taken: torch.Tensor,
    width: int,
) -> JudgedTree:
    """``core.verify.tree.verify_tree`` of a tree of 1 + count * width rows ``p``.

    ``nodes`` (count * width,) are ids, ``q`` (count * width, n) float32 what each was drawn from and
    ``filled`` (count * width,) bool which of them there are: none of a position behind one that has none.
    ``draws`` float64 are the round's, of which ``taken`` () went into the candidates; count + width follow.
    Nothing is kept by a row of p that is not usable, and what is drawn from it means nothing.
    """
    count = len(nodes) // width
    # What stands before each position, and behind the last: the rows of the first candidates.
    before = branch_rows(p.p, width).double()
    q, ids, there = q.view(count, width, -1), nodes.view(count, width, 1), filled.view(count, width)
    left = before[:count]
    ps, qs, shared = [], [], []
    for place in range(width):
        q_here = q[:, place].double()
        ps.append(left.gather(1, ids[:, place])[:, 0])
        qs.append(q_here.gather(1, ids[:, place])[:, 0])
        shared.append(torch.minimum(left, q_here).sum(-1).clamp_max(1))
        rest = (left - q_here).clamp_min_(0)
        mass = rest.sum(-1, keepdim=True)
        refused = there[:, place, None] & (mass > 0)
        left = torch.where(refused, rest / mass, left)
    p_x, q_x = torch.stack(ps, 1), torch.stack(qs, 1)
    places = torch.arange(width, device=draws.device)
    tests = torch.arange(count, device=draws.device)[:, None] + places
    u = draws.gather(0, (taken + tests).flatten()).view(count, width)
    kept = there & (u * q_x < p_x)
    # Of each position the first that is kept, ``width`` where none is, as it is behind the last.
    at = torch.where(kept, places, width).amin(1)
    stands = (at == 0).long().cumprod(0).sum()[None]  # positions whose first candidate stands
    at = F.pad(at, (0, 1), value=width).gather(0, stands)
    tried = F.pad(there.sum(1), (0, 1)).gather(0, stands)
    leaf = at < width  # one of its siblings does, behind which nothing was proposed
    row = torch.where(leaf, 1 + stands * width + at, (1 + (stands - 1) * width).clamp_min(0))
    whole = p.p.index_select(0, row).double()
    rest = torch.cat([left, before[count:]]).index_select(0, stands)
    used = taken + stands + torch.where(leaf, at + 1, tried)
    own = draw(torch.where(leaf[:, None], whole, rest), draws.gather(0, used))
    first = F.pad(q[:, 0], (0, 0, 0, 1)).index_select(0, stands).double() * (~leaf & (tried > 0))[:, None]
    return JudgedTree(
        row=row,
        p=p_x.flatten(),
        q=q_x.flatten(),
        u=u.flatten(),
        overlap=torch.stack(shared, 1).flatten(),
        own=own,
        own_p=whole.gather(1, own[:, None])[0],
        own_q=first.gather(1, own[:, None])[0],
    )
