"""The one error that loading a model raises, and others in words."""

from __future__ import annotations

import errno
import os
import re

# What systems and libraries say when memory is out, in small letters. torch on a processor has a wording of
# its own for Linux and one for Windows; Windows speaks of its paging file.
_WORDS = re.compile(
    "can't allocate memory|cannot allocate memory|unable to allocate|not enough memory|out of memory"
    "|out_?of_?memory|bad_?alloc|bad allocation|paging file is too small"
    # A card's libraries: NVIDIA's and hipBLAS, rocBLAS, CUDA's and HIP's own codes, MIOpen.
    "|_status_alloc_failed|rocblas_status_memory_error|(cuda|hip)errormemoryallocation|miopenstatusallocfailed"
)
# The codes of errors as text, which need not be in English: Rust's (safetensors) and Python's of Windows.
_CODE = re.compile(r"\b(?:os error|winerror) (\d+)\b")
_WINDOWS = (8, 14, 1455)  # not enough memory, out of memory, the paging file is too small


class LoadError(RuntimeError):
    """A model cannot be loaded; the message is one sentence that says why and what to do."""


class UnusableNumbers(LoadError):
    """A model, as it was loaded, gives logits from which nothing can be drawn."""


def is_out_of_memory(error: BaseException) -> bool:
    """Of Python, of the system, of a card, or of torch on a processor; also where that caused ``error``."""
    return (
        isinstance(error, MemoryError)
        or _is_of_system(error)
        or _says_so(f"{type(error).__name__}: {error}")
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
    )


def _is_of_system(error: BaseException) -> bool:
    """By its number. 8 is one of Windows' alone: elsewhere it is a program of a wrong format."""
    if not isinstance(error, OSError):
        return False
    return error.errno in (errno.ENOMEM, 1455) or getattr(error, "winerror", None) in _WINDOWS


def _says_so(text: str) -> bool:
    text = text.lower()
    codes = _WINDOWS if os.name == "nt" else (errno.ENOMEM, 1455)
    return bool(_WORDS.search(text)) or any(int(code) in codes for code in _CODE.findall(text))


def too_little_memory(what: str) -> LoadError:
    """Where memory was out before a model was reached: ``what`` is what was being done."""
    return LoadError(f"There was too little memory to {what}: close what else uses it, and try again.")


def first_line(error: Exception) -> str:
    """What an error says, to stand within a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")
