"""What a training needs, asked before it starts: room on the disk, memory, and time.

Disk is counted: hidden states, two checkpoints and a third while it is written, the draft. Memory is counted
too, roughly and for the largest things. Time is that of one pass of the target and of one step, measured.
Knows how large a draft and a text are; not how either is learned.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.distill.checkpoint import TrainingError, before
from core.distill.evaluate import ROWS
from core.distill.kinds import Draft
from core.distill.target import IDS_AT_ONCE, Target
from core.models.memory import free_bytes, gigabytes

SPARE = 1 << 20  # bytes for what is not counted: the curve, the card, a file system's own


@dataclass(frozen=True)
class Needs:
    """``disk`` and ``memory`` in bytes, beside what is taken already."""

    disk: int
    memory: int
    reading_seconds: float
    step_seconds: float

    def __str__(self) -> str:
        return (
            f"about {gigabytes(self.disk)} of disk and {gigabytes(self.memory)} of memory, "
            f"{spoken(self.reading_seconds)} to read the text with the target, and "
            f"{spoken(self.step_seconds)} a step"
        )


def spoken(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def bytes_of_features(target: Target, kinds: int, ids: int) -> int:
    """Of the hidden states of so many ids, behind ``kinds`` layers, in 16 bits."""
    return ids * kinds * target.shape.hidden * 2


def bytes_on_disk(draft: Draft, checkpoint: Path) -> int:
    """Still to be written of checkpoints and the draft: two generations, one under way, the packed draft."""
    weights = 4 * sum(weight.numel() for weight in draft.parameters())
    one = weights + _of_optimisers(draft)
    there = sum(path.stat().st_size for path in (checkpoint, before(checkpoint)) if path.exists())
    return max(0, 3 * one - there) + weights + SPARE


def bytes_in_memory(draft: Draft, target: Target, head_ids: int, kinds: int, tokens: int) -> int:
    """The most that reading the text or a step takes, beside target and draft."""
    shape, size = target.shape, target.embedding.element_size()
    reading = IDS_AT_ONCE * (shape.hidden * (shape.layers + 1 + kinds) + 3 * target.inner) * size
    weights = 4 * sum(weight.numel() for weight in draft.parameters())
    rows = ROWS * (len(target.head) + 3 * head_ids) * 4
    depth = 3 + len(getattr(draft, "layers", ()))
    step = tokens * (kinds * shape.hidden * 2 + depth * (8 * shape.hidden + 3 * target.inner) * 4)
    # A step's gradients, the optimisers' state and what an update is made of.
    return max(reading, 2 * weights + _of_optimisers(draft) + rows + step)


def _of_optimisers(draft: Draft) -> int:
    """Muon keeps one number a weight of a matrix, AdamW two of a vector's."""
    return sum(4 * weight.numel() * (1 if weight.dim() == 2 else 2) for weight in draft.parameters())


def check_disk(folder: Path, needed: int) -> None:
    """Raises TrainingError where the disk of ``folder``, which need not be there yet, has less room."""
    if needed > (free := free_on_disk(folder)):
        raise TrainingError(
            f"Training needs {gigabytes(needed)} in {folder}, and {gigabytes(free)} are free there: make "
            "room, name a folder on another disk with --out, or give less text."
        )


def free_on_disk(folder: Path) -> int:
    """Bytes on the disk of ``folder``, which need not be there yet."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def check_memory(device: str, needed: int) -> None:
    """Raises TrainingError where less memory than ``needed`` can be had."""
    free = [value for value in (free_bytes(device), _left_of_limit() if device == "cpu" else None) if value]
    if free and needed > min(free):
        raise TrainingError(
            f"Training needs about {gigabytes(needed)} of memory, and {gigabytes(min(free))} are free: close "
            "what else uses it, or ask for fewer --tokens, --layers or --head-ids."
        )


def _left_of_limit() -> int | None:
    """What this process may still map (ulimit -v), where somebody has set a limit."""
    try:
        import resource
    except ImportError:  # not POSIX
        return None
    import psutil

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(1, limit - psutil.Process().memory_info().vms)


def measured(draft: Draft, read: Callable[[], int], step: Callable[[Draft], object]) -> tuple[float, float]:
    """Seconds an id that ``read`` takes, which says how many it read, and seconds of a ``step``.

    The step is made by a copy of the draft, the second time, when nothing is new to the processor.
    """
    begun = time.perf_counter()
    ids = read()
    an_id = (time.perf_counter() - begun) / max(1, ids)
    other = copy.deepcopy(draft)
    step(other)
    if next(draft.parameters()).is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step(other)
    if next(draft.parameters()).is_cuda:
        torch.cuda.synchronize()
    return an_id, time.perf_counter() - begun
