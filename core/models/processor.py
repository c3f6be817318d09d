"""What this processor is and what its torch can do, asked so that absence is an answer.

The questions are private operators of torch's, which not every build has: one for Apple's processors has no
oneDNN, and so none of its operators. They are asked for by what they answer, never by torch's version; where
one is missing or fails, the answer is no. Knows no model and no kernel. Imports torch only when asked.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path


def has_fast_bfloat16() -> bool:
    """Whether this processor has bfloat16 products that torch reaches (by oneDNN)."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # no such operator, or none for this machine
        return False


@functools.cache
def description() -> tuple[str, ...]:
    """What the system says of this processor: its name and what it can do."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        first = ["model name: " + _mac_name()]
    told = (line for line in first if line.startswith(("model name", "flags", "CPU", "Features")))
    return platform.machine(), platform.processor(), *told


def _mac_name() -> str:
    """What a Mac calls its processor, which Python's platform does not tell; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
