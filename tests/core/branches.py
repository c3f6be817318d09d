"""The exact law of a random computation: it is run once for every way in which its draws can fall.

    law = every_branch(monkeypatch, run)        # result -> probability

Nothing is drawn with numbers from [0, 1): each decision of ``core.verify.sampling.accepts`` and each index
that ``core.verify.sampling.draw`` may give is taken in turn, with the probability that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import core.verify.sampling
import core.verify.tree


def constant() -> float:
    """The uniform draws of a computation whose decisions do not look at them."""
    return 0.5


def every_branch(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> dict[object, float]:
    law: dict[object, float] = Counter()
    scripts: list[tuple[int, ...]] = [()]  # which option to take at each decision
    taken: list[int] = []
    weight = 1.0

    def choose(options: list[tuple[object, float]]):
        nonlocal weight
        options = [option for option in options if option[1] > 0]
        place = len(taken)
        if place < len(script):
            pick = script[place]
        else:  # beyond its script a run takes the first option; the others are for later runs
            pick = 0
            scripts.extend((*taken, other) for other in range(1, len(options)))
        taken.append(pick)
        value, probability = options[pick]
        weight *= probability
        return value

    def accepts(u: float, p: float, q: float) -> bool:
        kept = min(1.0, p / q)
        return choose([(True, kept), (False, 1 - kept)])

    def draw(weights, u: float) -> int:
        total = weights.double().sum().item()
        return choose([(index, w / total) for index, w in enumerate(weights.double().tolist())])

    with monkeypatch.context() as patch:
        for module in (core.verify.sampling, core.verify.tree):
            patch.setattr(module, "accepts", accepts)
            patch.setattr(module, "draw", draw)
        while scripts:
            script = scripts.pop()
            taken.clear()
            weight = 1.0
            result = run()
            law[result] += weight
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    return law
