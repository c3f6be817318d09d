"""What the CUDA card here can do, as torch says: its own 16 bits, and whether this torch knows it at all.

Where there is no card, the answers are those of a card of today. AMD's builds of torch say ``cuda`` too; they
name an architecture ("gfx1100") in the place of a capability. Knows no model; imports torch only when asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

OWN_BFLOAT16 = (8, 0)  # compute capability from which products in bfloat16 are the card's own


def half() -> str:
    """The 16 bits in which this card multiplies fast: below capability 8.0 (T4, RTX 20, V100) float16."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "bfloat16"
    return half_of(torch.cuda.get_device_capability())


def half_of(capability: tuple[int, int]) -> str:
    """The same of an NVIDIA card of this compute capability."""
    return "bfloat16" if capability >= OWN_BFLOAT16 else "float16"


def unknown() -> str | None:
    """A sentence where this torch has no kernels for the card; None where it has, and without a card."""
    import torch

    if not torch.cuda.is_available():
        return None
    built, name = torch.cuda.get_arch_list(), torch.cuda.get_device_name()
    if torch.version.hip is not None:
        # "gfx90a:sramecc+:xnack-" says how the card is set as well.
        arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "").split(":")[0]
        if not built or not arch or arch in {one.split(":")[0] for one in built}:
            return None
        return _sentence(name, arch, "a torch built for it")
    capability = torch.cuda.get_device_capability()
    if not built or runs(built, capability):
        return None
    oldest = min((found for one in built if (found := _capability(one))), default=capability)
    older = capability < oldest
    other = "an older torch, or one built for CUDA 12.6" if older else "a newer torch"
    return _sentence(name, f"compute capability {capability[0]}.{capability[1]}", other)


def _sentence(name: str, what: str, other: str) -> str:
    import torch

    return (
        f"This torch ({torch.__version__}) has no kernels for the card {name} ({what}): choose --device cpu, "
        f"or install {other}, which knows this card."
    )


def runs(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether kernels built for these architectures run on a card of ``capability``.

    Machine code ("sm_86") runs on cards of the same generation that are no older; code that a driver
    compiles ("compute_120") on all that are no older.
    """
    for one in built:
        found = _capability(one)
        if found is None or found > capability:
            continue
        if one.startswith("compute_") or found[0] == capability[0]:
            return True
    return False


def _capability(built: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", built)
    return None if match is None else (int(match[1]), int(match[2]))
