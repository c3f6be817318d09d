"""Begins to load the pair while Gradio is still being imported: both take seconds, on different cores.

Knows how an engine is made and given up; no page. Imports nothing heavy itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.serving import zero_gpu
from app.serving.loading import Loader, Progress
from core.machine.heartbeat import heard
from core.pairs.load import load_pair, release

if TYPE_CHECKING:
    from core.pairs.spec import PairSpec


def begin(spec: PairSpec | None) -> Loader:
    """A loader at work on ``spec``, or on what this machine suggests where it is None."""
    loader = Loader(load_engine, release)
    # On ZeroGPU only what is loaded before the launch reaches a GPU.
    loader.start(spec, wait=zero_gpu.active())
    return loader


def load_engine(spec: PairSpec | None, progress: Progress) -> Any:
    """The engine of ``spec``, or of what this machine suggests where it is None. Raises LoadError."""
    with heard(progress) as say:
        say("Starting PyTorch.", None)
        from app.serving.choosing import by_machine
        from core.engine.loop import Engine

        pair = load_pair(spec or by_machine(), say)
        if not zero_gpu.active():  # there, the GPU is lent to replies alone
            from core.engine.calibration import MEASURING, costs_if_any

            say(MEASURING, None)
            pair.costs = costs_if_any(pair, say)
    return zero_gpu.engine(Engine(pair))
