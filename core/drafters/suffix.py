"""A suffix automaton of a growing sequence of ids: where did its longest repeated ending occur before?

Built one id at a time in amortised constant time (Blumer et al. 1985, *The smallest automaton recognizing the
subwords of a text*), as SAM-Decoding uses it for drafting (Hu et al. 2024, arXiv:2411.10666). Knows ids and
nothing of drafting.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """``ids`` so far; ``match`` is the longest ending that occurred before, and where."""

    def __init__(self, ids: Iterable[int] = ()):
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [0]  # ids up to and with an occurrence, the first or a later one
        self._last = 0
        self.match: tuple[int, int] = (0, 0)
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Appends ``ids``."""
        for id in ids:
            self._append(id)

    def _append(self, id: int) -> None:
        self.ids.append(id)
        end = len(self.ids)
        state = self._state(self._length[self._last] + 1, {}, end)
        at = self._last
        while at != -1 and id not in self._next[at]:
            self._next[at][id] = state
            at = self._link[at]
        if at == -1:
            self._link[state] = 0
        else:
            found = self._next[at][id]
            if self._length[at] + 1 != self._length[found]:
                found = self._split(at, id, found)
            self._link[state] = found
        self._last = state
        # What the link stands for is the longest ending that occurs elsewhere, which is earlier.
        before = self._link[state]
        self.match = self._length[before], self._end[before] if before else 0
        self._end[before] = end

    def _state(self, length: int, next: dict[int, int], end: int) -> int:
        self._next.append(next)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _split(self, at: int, id: int, found: int) -> int:
        """A copy of ``found`` for its endings that are no longer than what leads from ``at``."""
        copy = self._state(self._length[at] + 1, dict(self._next[found]), self._end[found])
        self._link[copy] = self._link[found]
        self._link[found] = copy
        while at != -1 and self._next[at].get(id) == found:
            self._next[at][id] = copy
            at = self._link[at]
        return copy
