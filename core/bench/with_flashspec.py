"""A peer of the bench: the library flashspec on the models that ``core.bench.with_transformers`` loads.

Optional: ``pip install flashspec``. It decodes as it does by default (prompt lookup where the text repeats
itself, two drafts of the model elsewhere), or with K drafts of the model in every round. Its compiled path
needs CUDA and Triton and turns itself on where both are. Knows neither engine nor report.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch


def generate(
    target: torch.nn.Module,
    draft: torch.nn.Module,
    ids: Sequence[int],
    end_ids: frozenset[int],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    num_draft_tokens: int | None = None,
) -> dict[str, float]:
    """One reply, sampled as Redline samples it; without ``num_draft_tokens`` by flashspec's own strategy.

    Gives the times of ``core.bench.measured.Sample``: its first round reads the prompt, and gives the first
    tokens.
    """
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import ArmSpec, HuggingFaceDrafter, TargetModel

    device = target.device
    config = FlashSpecConfig(
        device=str(device), sampling=SamplingConfig(temperature=temperature, top_p=1.0, seed=seed)
    )
    engine = SpeculativeEngine(
        config,
        [HuggingFaceDrafter("draft", device, temperature=temperature, model=draft)],
        TargetModel("target", device, model=target),
        arms=[ArmSpec(0, num_draft_tokens)] if num_draft_tokens else None,
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it uses what transformers is about to rename
        result = engine.generate(torch.tensor([list(ids)]), max_new_tokens, sorted(end_ids))
    seconds = time.perf_counter() - start
    first, *rounds = result.arm_steps
    decode_seconds = sum(one.seconds for one in rounds)
    return {
        "tokens": sum(one.emitted for one in rounds),
        "decode_seconds": decode_seconds,
        "ttft_seconds": seconds - decode_seconds,
        "seconds": seconds,
    }
