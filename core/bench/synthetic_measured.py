"""What passes and rounds of a synthetic pair take, and how fast a device copies.

Serves ``core.bench.synthetic``, which prints it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from core.engine import device_rule
from core.engine.loop import Engine
from core.figures.metrics import expected_tokens
from core.pairs.pair import Pair
from core.records import Fate, Round, Settings


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(works: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median seconds of each, done to the end, taking turns after a turn that warms up."""
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, times in zip(works, taken, strict=True):
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            if turn:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def copy_speed(size: int, device: torch.device) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes on the device."""
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    goal = torch.empty_like(source)
    return 2 * size / min(timed([lambda: goal.copy_(source)] * 5, device, 2))


@torch.inference_mode()
def passes(
    pair: Pair, ids: Sequence[int], counts: Sequence[int], repeats: int
) -> tuple[list[float], float, float]:
    """Seconds of the target's passes over ``counts`` rows, of the draft's over one, and of a draft step."""
    target, draft = pair.target, pair.drafter.model
    device, settings = target.device, Settings(temperature=1.0)
    caches = target.new_cache(), draft.new_cache()
    target.prefill(ids, caches[0])
    draft.prefill(ids, caches[1])
    rows = torch.tensor(ids[: max(counts)], device=device)
    u = torch.tensor([0.5], dtype=torch.float64, device=device)

    def score(count: int) -> None:
        caches[0].crop(len(ids))
        target.device_logits(rows[:count], caches[0])

    def propose() -> torch.Tensor:
        caches[1].crop(len(ids))
        return draft.device_logits(rows[:1], caches[1])

    def step() -> None:
        device_rule.draw(device_rule.distributions(propose(), settings).p, u)

    works = [lambda count=count: score(count) for count in counts]
    *by_rows, draft_pass, draft_step = timed([*works, propose, step], device, repeats)
    return by_rows, draft_pass, draft_step


def speed(pair: Pair, ids: Sequence[int], k: int, tokens: int, seed: int) -> list[Round]:
    """The rounds of a reply."""
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=tokens, seed=seed)
    generation = Engine(pair, cache_bytes=0, batched=True).generate(ids, settings)
    rounds = list(generation)
    if generation.reply.error:
        raise RuntimeError(generation.reply.error)
    return rounds


def summary(rounds: Sequence[Round], k: int, acceptance: float) -> dict[str, float | None]:
    """Figures of rounds with K = ``k``, beside what the script promises of whole ones."""
    whole = [r for r in rounds if r.num_draft_tokens == k]
    accepted = sum(r.count(Fate.ACCEPTED) for r in rounds)
    tested = accepted + sum(r.count(Fate.REJECTED) for r in rounds)
    overlaps = [token.overlap for r in rounds for token in r.tokens if token.overlap is not None]
    seconds = sum(r.seconds for r in rounds)
    milliseconds = {
        name: 1e3 * statistics.median(getattr(r, f"{name}_seconds") for r in whole)
        for name in ("draft", "target", "overhead")
    }
    return {
        "k": k,
        "tokens_per_second": sum(r.emitted for r in rounds) / seconds,
        "tokens_per_pass": statistics.mean(r.emitted for r in whole),
        "expected_tokens_per_pass": expected_tokens([acceptance] * k, k),
        "tested": tested,
        "acceptance": accepted / tested if tested else None,
        "alpha": statistics.mean(overlaps) if overlaps else None,
    } | milliseconds
