"""How a model may be asked to run, and what "auto" means: forms of weights, devices and types.

Decides from words and sizes alone; knows no model and no file.
"""

from __future__ import annotations

import importlib.util

SMALL = 3_000_000_000  # bytes of weights in 16 bits below which a model on a card is left as it is

QUANTIZE = ("auto", "none", "int8", "int4", "nf4", "llm-int8")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def automatic_form(device: str, draft: bool, bytes_16bit: int | None = None) -> str:
    """What "auto" means for a model's weights on "cpu" or "cuda"; ``bytes_16bit``: their size in 16 bits.

    On a card a large target is what fills the memory: NF4, where its package is installed. A draft or a small
    target has to be quick and stays in half precision. On a processor int8 is both smaller and quicker than
    full precision.
    """
    if device == "cuda":
        small = bytes_16bit is not None and bytes_16bit < SMALL
        return "none" if draft or small or not has_bitsandbytes() else "nf4"
    return "int8"


def settled_form(asked: str, device: str, draft: bool, bytes_16bit: int | None = None) -> str:
    """What a form asked for means on "cpu" or "cuda", where int8 is LLM.int8."""
    if asked == "auto":
        return automatic_form(device, draft, bytes_16bit)
    return "llm-int8" if device == "cuda" and asked == "int8" else asked


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def flag(name: str) -> str:
    """The flag of a field: --draft-quantize for draft_quantize."""
    return "--" + name.replace("_", "-")


def quantize_flag(draft: bool) -> str:
    """The flag that says the form of a target's or a draft's weights."""
    return flag("draft_quantize" if draft else "quantize")
