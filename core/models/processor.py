"""What this processor's torch can do, asked so that absence is an answer.

The questions are private operators of torch's, which not every build has: one for Apple's processors has no
oneDNN, and so none of its operators. They are asked for by what they answer, never by torch's version; where
one is missing or fails, the answer is no. Knows no model and no kernel. Imports torch only when asked.
"""

from __future__ import annotations


def has_fast_bfloat16() -> bool:
    """Whether this processor has bfloat16 products that torch reaches (by oneDNN)."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # no such operator, or none for this machine
        return False
