"""A round's figures, which come to the host as one tensor: what is in it, and what is read from it there.

Knows no model, no rule and no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.engine.rounds import Drafted, Verdict, chain, outcome_figures
from core.records import Fate
from core.verify.sampling import TOP, BadLogitsError, Outcome

# Columns of the table that comes to the host, one row a position; then ids and values of the top of p and q.
COLUMNS = (
    *("id", "draft_usable", "target_usable", "largest", "q", "p", "u", "h", "overlap"),
    *("entropy_p", "entropy_q", "p_raw"),
)
OWN = ("kept", "id", "p", "q", "p_raw")  # and of what follows the table


_TINY = torch.finfo(torch.float32).tiny


def packed(
    columns: Mapping[str, torch.Tensor], p: torch.Tensor, q: torch.Tensor, own: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A round's figures as one float64 tensor: ``columns`` (rows or one less,) by name, of the tables ``p``
    (rows, n) and ``q`` (rows - 1, n) the most likely entries, and ``own`` (1,) each, as in ``OWN``."""
    count = len(p)
    table = torch.stack([F.pad(columns[name].double(), (0, count - len(columns[name]))) for name in COLUMNS])
    tops = [part for rows in (p, F.pad(q, (0, 0, 0, 1))) for part in _top(rows)]
    return torch.cat([part.double().flatten() for part in (table.T, *tops, *own)])


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Shannon entropies in nats of rows (n, width): (n,) float64."""
    return -(p * p.clamp_min(_TINY).log()).sum(-1, dtype=torch.float64).clamp_max(0)


def _top(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the most likely entries of each row, (n, TOP) or fewer."""
    values, ids = rows.topk(min(TOP, rows.shape[-1]))
    return ids, values


@dataclass(frozen=True, slots=True)
class ChainRound:
    """A round's figures on the host: ``table`` has a row for each position of the block, by column.

    Of the drafts ``drafted`` count, ``judged`` were held against the target and ``kept`` stand.
    """

    table: list[dict[str, object]]
    own: dict[str, float]
    drafted: int
    judged: int
    kept: int
    block: bool
    certain: bool

    @classmethod
    def unpacked(cls, numbers: list[float], count: int, block: bool, certain: bool) -> ChainRound:
        table, own = unpacked(numbers, count + 1)
        drafted = _leading(row["draft_usable"] for row in table[:count])
        judged = min(drafted, _leading(row["target_usable"] for row in table[:count]))
        return cls(table, own, drafted, judged, int(own["kept"]), block, certain)

    @property
    def drafts(self) -> list[Drafted]:
        """Those that count."""
        return chain((row["id"], row["q"]) for row in self.table[: self.drafted])

    rows = None  # a chain

    @property
    def used(self) -> int:
        """How many of the round's draws it took: one a draft that was drawn, one a test, one for the target's
        own token."""
        tested = self.judged if self.block else min(self.kept + 1, self.drafted)
        return (0 if self.certain else self.drafted) + tested + 1

    def verdicts(self) -> Iterator[Verdict]:
        """As ``core.engine.rounds.Played`` has them."""
        kept, own = self.kept, self.own
        for position in range(min(kept + 1, self.judged)):
            row = self.table[position]
            fate = Fate.ACCEPTED if position < kept else Fate.REJECTED
            h = row["h"] if self.block else None
            outcome = Outcome(row["id"], fate, position, row["p"], row["q"], row["u"], row["overlap"], h)
            yield verdict(outcome, row, row, row["p_raw"])
        if kept < self.judged:
            fate, q = Fate.RESAMPLED, own["q"]
        elif self.table[kept]["target_usable"]:
            fate, q = Fate.BONUS if kept else Fate.PLAIN, None
        else:
            raise BadLogitsError(f"the largest logit is {self.table[kept]['largest']}")
        row = self.table[kept]
        yield verdict(Outcome(int(own["id"]), fate, kept, own["p"], q), row, row, own["p_raw"])


def verdict(outcome: Outcome, of_p: dict, of_q: dict | None, p_raw: float) -> Verdict:
    """With the figures of the rows of a table that p and q stand in, q only where the outcome has one."""
    figures = {name: of_p[name] for name in ("entropy_p", "top_p")} | {"p_raw": p_raw}
    if outcome.q is not None:
        figures |= {name: of_q[name] for name in ("entropy_q", "top_q")}
    return Verdict(outcome, outcome_figures(outcome) | figures)


def unpacked(numbers: list[float], rows: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    """A round's table, by row and column, and what is said of the target's own token (``OWN``)."""
    columns = len(COLUMNS)
    end, start = len(numbers) - len(OWN), rows * columns
    table = [dict(zip(COLUMNS, numbers[row * columns :][:columns], strict=True)) for row in range(rows)]
    top = (end - start) // (4 * rows)

    def pairs(part: int, row: int) -> tuple[tuple[int, float], ...]:
        ids, values = (numbers[start + (rows * (part + n) + row) * top :][:top] for n in range(2))
        return tuple((int(i), value) for i, value in zip(ids, values, strict=True) if value > 0)

    for index, row in enumerate(table):
        row |= {"id": int(row["id"]), "top_p": pairs(0, index), "top_q": pairs(2, index)}
    return table, dict(zip(OWN, numbers[end:], strict=True))


@dataclass(frozen=True, slots=True)
class TreeRound:
    """A round with a tree on the host: ``table`` has a row for each of the target's, ``own["kept"]`` being
    the one behind the branch that stands, and in the row before a node's own what is said of the node.

    ``drawn`` says which candidates of a position took a draw: "all", the "first" or "none".
    """

    table: list[dict[str, object]]
    own: dict[str, float]
    width: int
    drawn: str

    @property
    def nodes(self) -> list[int]:
        """The places that are filled, of all count * width."""
        return [node for node, row in enumerate(self.table[:-1]) if row["draft_usable"]]

    @property
    def rows(self) -> list[int]:
        """The target's row of each draft."""
        return [node + 1 for node in self.nodes]

    @property
    def drafts(self) -> list[Drafted]:
        """Those that count, which name their parents among themselves."""
        index = {node: number for number, node in enumerate(self.nodes)}
        return [
            Drafted(self.table[n]["id"], self.table[n]["q"], index.get(self._parent(n))) for n in self.nodes
        ]

    def _parent(self, node: int) -> int:
        """The first candidate of the position before; -1 at the first position."""
        return max(-1, (node // self.width - 1) * self.width)

    def _reached(self) -> Iterator[tuple[int, list[int], int | None]]:
        """For each position that was reached the row before it, the candidates that were tried there, and the
        last of them where it stands, else None."""
        last, width, row = int(self.own["kept"]) - 1, self.width, 0
        branch = [*range(0, last - last % width, width), last] if last >= 0 else []
        for kept in branch:
            yield row, [node for node in self.nodes if kept - kept % width <= node <= kept], kept
            row = kept + 1
        # Behind a later candidate nothing was proposed.
        after = range(len(branch) * width, (len(branch) + 1) * width if not max(last, 0) % width else 0)
        yield row, [node for node in self.nodes if node in after], None

    @property
    def used(self) -> int:
        """As ``ChainRound.used``."""
        first = sum(node % self.width == 0 for node in self.nodes)
        taken = {"all": len(self.nodes), "first": first, "none": 0}[self.drawn]
        return taken + sum(len(tried) for _, tried, _ in self._reached()) + 1

    def verdicts(self) -> Iterator[Verdict]:
        """As ``core.engine.rounds.Played`` has them."""
        own, index = self.own, {node: number for number, node in enumerate(self.nodes)}
        for position, (row, tried, kept) in enumerate(self._reached()):
            before = self.table[row]
            if not before["target_usable"]:
                raise BadLogitsError(f"the largest logit is {before['largest']}")
            for node in tried:
                of, fate = self.table[node], Fate.ACCEPTED if node == kept else Fate.REJECTED
                figures = of["p"], of["q"], of["u"], of["overlap"]
                outcome = Outcome(of["id"], fate, position, *figures, index=index[node], row=row)
                yield verdict(outcome, before, of, of["p_raw"])
        fate = Fate.RESAMPLED if tried else Fate.BONUS if position else Fate.PLAIN
        first, q = (tried[0], own["q"]) if tried else (None, None)
        outcome = Outcome(int(own["id"]), fate, position, own["p"], q, index=index.get(first), row=row)
        yield verdict(outcome, before, None if first is None else self.table[first], own["p_raw"])


def all_kept(length: int, id: int, count: int, width: int = 1) -> torch.Tensor:
    """Figures (length,) of a round with ``count`` drafts of ``id`` that all stand, each the first of
    ``width`` candidates, as ``Batched.launch`` has them: for rounds without numbers
    (``core.bench.fake_card``)."""
    numbers, rows, columns = torch.ones(length, dtype=torch.float64), count * width + 1, len(COLUMNS)
    start = length - len(OWN) - rows * (columns + 4 * TOP)  # before it what a drafter learns from
    numbers[:start] = numbers[start : start + rows * columns : columns] = id
    numbers[-len(OWN)] = 1 + (count - 1) * width if count else 0
    numbers[1 - len(OWN)] = id
    return numbers


def _leading(usable: Iterable[float]) -> int:
    """How many come before the first that is not."""
    return sum(1 for _ in itertools.takewhile(bool, usable))
