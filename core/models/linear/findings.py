"""What was found of the forms of products on a machine, as records: plain numbers, and what they come to.

``core.models.linear.evidence`` finds it and keeps it; the page and ``python -m core.models.linear`` show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.machine.busy import BUSY
from core.models.linear import forms
from core.models.linear.products import MANY

ROWS = (1, 4, 8, MANY)  # of the passes that are timed; 4 are those of K = 3
DISTURBED = "Other work disturbed these times: they are taken anew at a start when the machine is quiet."
WORTH = 2
FLOAT = "float32"
# A reply of which the whole is shortest wins: passes over one row, over a round's, and over a prompt's.
TYPICAL = {1: 10, 4: 40, MANY: 1}


@dataclass(frozen=True)
class Sizes:
    """Of a model's products, (out, in): those of one of ``count`` layers, and the head's. Activations of a
    layer's last product have outliers. ``attention``: heads, key heads, numbers of a head."""

    layers: tuple[tuple[int, int], ...]
    count: int
    head: tuple[int, int]
    attention: tuple[int, int, int]


@dataclass(frozen=True)
class Evidence:
    """What was found of one form.

    ``error``: the largest against float64, as a share of what is summed, signs aside; None where it did not
    run. ``alone``: the largest difference between a row of several and the same alone, as a share of the
    largest number, 0 where bit-equal. ``layers`` and ``head`` are seconds for ``ROWS`` rows of a target,
    empty where not timed. ``draft`` are seconds for one row as a draft runs such products: all of an int8
    form in one part, and of the head a third. ``verdict`` says why it cannot be chosen, and is empty where it
    can.
    """

    form: str
    error: float | None = None
    alone: float = 0.0
    layers: tuple[float, ...] = ()
    head: tuple[float, ...] = ()
    draft: float | None = None
    verdict: str = ""

    @property
    def right(self) -> bool:
        return not self.verdict


@dataclass(frozen=True)
class Found:
    """The forms to run, of a target's ``layers`` and ``head`` and of a ``draft``, and the dtype of
    ``attention``.

    ``table`` is the evidence, and ``attended`` that on attention: seconds of a layer's at 4 and 256 rows
    behind 1,024 ids, by dtype. ``rows_tested`` says whether the model made of these forms was asked how far
    its rows depend on each other, and ``rows_note`` is the sentence about it, None where they do not.
    ``others`` is the share of the machine's time, in percent, that other processes took meanwhile.
    """

    layers: str
    head: str
    draft: str
    attention: str
    table: tuple[Evidence, ...]
    attended: dict[str, tuple[float, ...]]
    rows_tested: bool = False
    rows_note: str | None = None
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether so much else was running that the times mislead."""
        return self.others > BUSY

    @property
    def sentence(self) -> str | None:
        """What to say where nothing quantised is right and quick."""
        quantised = [entry for entry in self.table if forms.family(entry.form) not in forms.DENSE]
        if forms.family(self.layers) not in forms.DENSE or any(entry.right for entry in quantised):
            return None
        return (
            "No quantised product is right and quick on this processor, so the weights run in "
            f"{self.layers}, which is slower: python -m core.models.linear shows why."
        )

    @property
    def reads_bfloat16(self) -> bool:
        """Whether dense products of many rows are faster in bfloat16 than in float32."""
        many = {entry.form: entry.layers[-1] for entry in self.table if entry.right and entry.layers}
        return many.get("bfloat16", math.inf) < many[FLOAT]

    def best(self, family: str) -> str:
        """The fastest right form of a family for activations with outliers, and with nothing beside; the
        fastest dense one where none takes at most ``WORTH`` times as long as that, for who asks for a family
        asks for less memory, too."""
        right = {entry.form: typical(entry.layers) for entry in self.table if entry.right}
        dense = min((form for form in right if form in forms.DENSE), key=right.__getitem__)
        left_out = forms.ONE, forms.BESIDE
        own = [form for form in right if forms.family(form) == family and not form.startswith(left_out)]
        fastest = min(own, key=right.__getitem__, default=dense)
        return fastest if right[fastest] <= WORTH * right[dense] else dense


def typical(seconds: Sequence[float]) -> float:
    """Seconds that a reply's passes take, of those that one takes at each of ``ROWS``."""
    return sum(TYPICAL.get(rows, 0) * taken for rows, taken in zip(ROWS, seconds, strict=True))
