"""Checkpoints of a training: two generations on disk, each whole or absent, and which training they are of.

A checkpoint is written beside the last one, flushed to the disk, file and folder, and only then takes its
place; the last one becomes the one before. So whatever ends a training, a power cut too, one of the two is
there to go on from. ``core.distill.train`` gives it nothing that is not finite.

``Identity`` says what a training is: what of it may not change on going on is named where it did. What may
change (--rate, --save-every, --device, --held-out, --licence) is not in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from core.distill.files import flush_folder, remedy, write_whole
from core.models.errors import first_line, is_out_of_memory, too_little_memory

BEFORE = "-before"  # behind the name of the checkpoint that was the last one


class TrainingError(Exception):
    """A training cannot go on; the message is one sentence that says what to do."""


# --- Which training ----------------------------------------------------------------------------------------

Identity = Mapping[str, object]  # what people call a setting, and its value


def differences(kept: Identity, asked: Identity) -> str:
    """What of a training is another, for people; "" if nothing is."""
    found = []
    for name in dict.fromkeys((*asked, *kept)):
        was, now = kept.get(name), asked.get(name)
        if was == now:
            continue
        if all(value is None or isinstance(value, (int, float, str)) for value in (was, now)):
            found.append(f"{name} {_told(was)} and {_told(now, 'is')}")
        else:
            found.append(f"{name} differs")
    return ", ".join(found)


def _told(value: object, verb: str = "was") -> str:
    return f"{verb} not given" if value is None else f"{verb} {value}"


# --- Checkpoints -------------------------------------------------------------------------------------------


def save(path: Path, content: Mapping[str, object]) -> None:
    """Writes a checkpoint; the one that is there becomes the one before. Raises TrainingError."""
    new = path.with_name(path.name + ".new")

    try:
        write_whole(new, lambda file: torch.save(content, file))
        if path.exists():
            os.replace(path, before(path))
        os.replace(new, path)
        flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # the second of torch's writer, which has lost the first
        with contextlib.suppress(OSError):
            new.unlink()
        cause = _cause(error)
        raise TrainingError(
            f"The checkpoint {path} cannot be written ({_reason(cause)}): {remedy(cause)}. The same command "
            f"then goes on from {_what_there_is(path)}."
        ) from error


def before(path: Path) -> Path:
    """Where the generation before the checkpoint ``path`` is."""
    return path.with_name(path.stem + BEFORE + path.suffix)


def load(path: Path, device: torch.device, say: Callable[[str], object]) -> Mapping[str, object] | None:
    """The newest checkpoint that can be read; None where there is none. A damaged one is told and removed.

    Raises TrainingError where there are some, and all are damaged.
    """
    damaged = []
    for place in (path, before(path)):
        if not place.exists():
            continue
        try:
            content = torch.load(place, map_location=device, weights_only=True)
            whole = _is_whole(content)
        except Exception as error:  # torch names many kinds for a file that is not its own
            if is_out_of_memory(error):
                raise TrainingError(str(too_little_memory(f"read the checkpoint {place}"))) from error
            whole = False
        if whole:
            for other in damaged:  # else it would become the one before, in the place of this one
                with contextlib.suppress(OSError):
                    other.unlink()
                say(f"The checkpoint {other} is damaged: going on from the one before it.")
            return content
        damaged.append(place)
    if damaged:
        named = " and ".join(map(str, damaged))
        raise TrainingError(f"The checkpoint {named} is damaged: delete it to begin anew.")
    return None


def _is_whole(content: object) -> bool:
    """Whether it is a checkpoint, be it one of another version, and its weights are numbers."""
    names = ("what", "draft")
    return isinstance(content, dict) and all(name in content for name in names) and finite(content["draft"])


def finite(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether every weight is a finite number."""
    return all(bool(weight.isfinite().all()) for weight in weights.values())


def _what_there_is(path: Path) -> str:
    return "the last checkpoint" if path.exists() or before(path).exists() else "the beginning"


def _cause(error: BaseException) -> BaseException:
    """What the system said, where torch's writer hides it."""
    return error.__context__ if isinstance(error.__context__, OSError) else error


def _reason(cause: BaseException) -> str:
    return cause.strerror.lower() if isinstance(cause, OSError) and cause.strerror else first_line(cause)
