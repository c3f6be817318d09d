"""From how many rows on bitsandbytes unpacks an NF4 weight before it multiplies, on a card.

Up to some rows it has a kernel that reads the 4-bit weights as they are; beyond, it writes them out in 16
bits and multiplies those, which moves some nine times the bytes. Where the switch lies depends on the card
and the matrix, by a rule of the library's own (0.50 and later), which this module asks. It takes the rule
out of the library's source, because on a machine without CUDA the module it stands in cannot be imported.

Knows no card; another version of the library may have no such rule, and then None is the answer.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

_RULE, _LEAST, _PROPERTIES = "_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M", "_gpu_dispatch_props"


def fused(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, capability: tuple[int, int], multiprocessors: int
) -> bool | None:
    """Whether a product of a weight of ``shape`` (out, in) with so many rows reads the packed weight as it is
    on such a card; None where the library does not say."""
    rule = _rule(multiprocessors, *capability)
    return None if rule is None else rule(0, dtype, rows, *shape)


@functools.cache
def _rule(multiprocessors: int, major: int, minor: int) -> Callable[..., bool] | None:
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "backends" / "cuda" / "ops.py").read_text(encoding="utf-8")
        found = [node for node in ast.parse(source).body if _name(node) in (_RULE, _LEAST)]
    except (OSError, SyntaxError):
        return None
    if {_name(node) for node in found} != {_RULE, _LEAST}:
        return None
    names = {"torch": torch, "functools": functools}
    names[_PROPERTIES] = lambda index: (multiprocessors, major, minor)
    exec(compile(ast.Module(found, []), _RULE, "exec"), names)  # the library's own code, two statements of it
    return names[_RULE]


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None
