"""Facts of known cards, as their makers print them: memory, its bandwidth, capability, multiprocessors.

Memory and bandwidth are of NVIDIA's data sheets and product pages of each card, compute capability of
https://developer.nvidia.com/cuda-gpus, multiprocessors ("SMs") of the white papers of its architecture. A
data sheet's bandwidth is what the memory's pins carry: no program reaches it (``core.bench.roofline``).

Knows no card that is in this machine; imports nothing heavy. Run: ``python -m core.bench.cards`` prints the
table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class CardError(ValueError):
    """A card that is not known; the message is one sentence that names those that are."""


@dataclass(frozen=True)
class Card:
    """``memory`` in bytes, ``bandwidth`` in bytes a second; ``measured``: that of a copy on this very card,
    not the data sheet's."""

    title: str
    memory: float
    bandwidth: float
    capability: tuple[int, int]
    multiprocessors: int
    measured: bool = False


def _card(title: str, memory: float, bandwidth: float, capability: str, multiprocessors: int) -> Card:
    """``memory`` in GB, ``bandwidth`` in GB/s."""
    major, minor = map(int, capability.split("."))
    return Card(title, memory * 1e9, bandwidth * 1e9, (major, minor), multiprocessors)


# Smallest bandwidth first within a family.
CARDS: dict[str, Card] = {
    "rtx-3060": _card("RTX 3060", 12, 360, "8.6", 28),
    "rtx-3070": _card("RTX 3070", 8, 448, "8.6", 46),
    "rtx-3090": _card("RTX 3090", 24, 936, "8.6", 82),
    "rtx-4060": _card("RTX 4060", 8, 272, "8.9", 24),
    "rtx-4070": _card("RTX 4070", 12, 504, "8.9", 46),
    "rtx-4080": _card("RTX 4080", 16, 717, "8.9", 76),
    "rtx-4090": _card("RTX 4090", 24, 1008, "8.9", 128),
    "rtx-5090": _card("RTX 5090", 32, 1792, "12.0", 170),
    "t4": _card("T4", 16, 300, "7.5", 40),
    "v100": _card("V100 16 GB", 16, 900, "7.0", 80),
    "a10": _card("A10", 24, 600, "8.6", 72),
    "l4": _card("L4", 24, 300, "8.9", 58),
    "l40s": _card("L40S", 48, 864, "8.9", 142),
    "a100-40": _card("A100 40 GB", 40, 1555, "8.0", 108),
    "a100-80": _card("A100 80 GB SXM", 80, 2039, "8.0", 108),
    "h100": _card("H100 SXM", 80, 3350, "9.0", 132),
    "h200": _card("H200", 141, 4800, "9.0", 132),
}


def find(name: str) -> Card:
    """The card of that name; letter case, spaces and the maker's words do not matter. Raises CardError."""
    words = [
        word
        for word in re.split(r"[\s_-]+", name.lower().strip())
        if word not in ("nvidia", "geforce", "tesla")
    ]
    found = CARDS.get("-".join(words))
    if found is None:
        raise CardError(f"There is no card {name!r} in the table: choose one of {', '.join(CARDS)}.")
    return found


def main() -> None:
    for name, card in CARDS.items():
        capability = ".".join(map(str, card.capability))
        print(
            f"{name:10} {card.title:16} {card.memory / 1e9:4.0f} GB {card.bandwidth / 1e9:6,.0f} GB/s"
            f"  capability {capability:>4}  {card.multiprocessors:>3} multiprocessors"
        )


if __name__ == "__main__":
    main()
