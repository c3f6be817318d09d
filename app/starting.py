"""Begins to load the pair while Gradio is still being imported: both take seconds, on different cores.

Knows how an engine is made and given up; no page. Imports nothing heavy itself.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from app import zero_gpu
from app.loading import Loader, Progress
from core.models.spec import embedded_spec

if TYPE_CHECKING:
    from core.models.spec import PairSpec


def begin(spec: PairSpec | None) -> Loader:
    """A loader at work on ``spec``, or on what this machine suggests where it is None."""
    loader = Loader(load_engine, release)
    # On ZeroGPU only what is loaded before the launch reaches a GPU.
    loader.start(spec, wait=zero_gpu.active())
    return loader


def load_engine(spec: PairSpec | None, progress: Progress) -> Any:
    """The engine of ``spec``, or of what this machine suggests where it is None. Raises LoadError."""
    progress("Starting PyTorch.", None)
    from app.choosing import by_machine
    from core.engine import Engine

    spec = spec or by_machine()
    if spec == embedded_spec():
        # As core.models.load does it, but without importing what only other pairs need, which takes seconds.
        from core.models.embedded import load_embedded

        pair = load_embedded(progress)
    else:
        from core.models.load import load_pair

        pair = load_pair(spec, progress)
    if not zero_gpu.active():  # there, the GPU is lent to replies alone
        from core.calibration import costs_if_any

        progress("Measuring what passes cost", None)
        pair.costs = costs_if_any(pair)
    return zero_gpu.engine(Engine(pair))


def release() -> None:
    """Give memory back that no engine needs any more, a card's too."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
