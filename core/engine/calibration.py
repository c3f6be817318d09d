"""What a pair's passes cost on this machine, measured once and kept: ``core.engine.auto_k`` decides by it.

The least of a few timings of each pass is taken: what a machine does beside only adds to it. Kept in the
user's cache folder by the pair's weights and forms, the device and the versions, so that later starts decide
alike. On a CPU the number of threads is chosen first (``core.machine.threads``) and kept with the costs. A
pair is measured behind a short context; a long one makes all passes dearer and the draft's share of a round
smaller. Where passes take so long that ``BUDGET`` is spent, each is timed once and those of a large K not at
all: ``Costs.verify`` is then shorter, and K is chosen among those that were measured.

Run: ``python -m core.engine.calibration`` measures the embedded pair anew and prints its costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from core.engine.auto_k import MOST
from core.engine.loop import Engine
from core.figures.costs import Costs
from core.machine.heartbeat import heard
from core.machine.home import home
from core.machine.kept import keep
from core.machine.progress import Progress, silent
from core.machine.threads import choose, chosen_by_user, usable_cores, use
from core.models.errors import LoadError
from core.pairs.load import load_embedded
from core.pairs.pair import CHOSEN, Pair
from core.records import Settings
from core.text.terminal import progress_printer

log = logging.getLogger(__name__)

KEPT = "costs.json"  # in home()
CONTEXT = 96  # ids behind which passes are timed
REPEATS = 3
BUDGET = 10.0  # seconds after which no pass is timed once more, and no larger K at all
LEAST = Settings().num_draft_tokens  # the K up to which costs are measured however long that takes
MEASURING = "Measuring what passes cost"


def costs(pair: Pair, say: Progress = silent) -> Costs | None:
    """The pair's costs: kept ones, or measured now and kept. None without a draft.

    torch computes with the number of threads they were measured with from then on.
    """
    if pair.drafter is None:
        return None
    try:
        kept = json.loads((home() / KEPT).read_text(encoding="utf-8"))
        found = kept[_name(pair)]
        costs, threads = Costs(found["draft"], tuple(found["verify"]), found["overhead"]), found["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return measure_again(pair, say)
    use(threads)
    return costs


def measure_again(pair: Pair, say: Progress = silent) -> Costs:
    """The pair's costs, measured now and kept. The pair has a draft and writes nothing meanwhile."""
    if pair.info.device == "cpu":
        choose_threads(pair, say)
    measured = measure(pair, say=say)
    _keep(home() / KEPT, _name(pair), measured)
    return measured


@torch.inference_mode()
def choose_threads(pair: Pair, say: Progress = silent) -> int:
    """The number of threads with which a plain and a speculative round take least time, now in use."""
    ids = [i % pair.target.readable_ids for i in range(CONTEXT)]
    cache, state = pair.target.new_cache(), pair.drafter.new_state()
    settings = Settings(temperature=1.0)
    count = settings.num_draft_tokens

    def rounds() -> None:
        for rows in (1, count + 1):
            cache.crop(CONTEXT - 1)
            pair.target.logits(ids[-1:] * rows, cache)
        cache.crop(CONTEXT - 1)
        state.crop(CONTEXT - 1)
        pair.drafter.draft(ids, count, settings, lambda: 0.5, state, cache)

    pair.target.prefill(ids[:-1], cache)
    pair.drafter.prefill(ids[:-1], state, cache)
    return choose(rounds, say)


def costs_if_any(pair: Pair, say: Progress = silent) -> Costs | None:
    """``costs``; None with a line in the log where measuring fails, for a pair runs without them."""
    try:
        return costs(pair, say)
    except Exception as error:
        log.warning("What the pair's passes cost could not be measured: %r", error)
        return None


@torch.inference_mode()
def measure(
    pair: Pair,
    batched: bool | None = None,
    say: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Times the pair's passes and a few rounds of its engine (``batched`` as the engine takes it)."""
    begun = clock()

    def over() -> bool:
        return clock() - begun > BUDGET

    ids = [i % pair.target.readable_ids for i in range(CONTEXT)]
    engine = Engine(pair, batched=batched)
    if engine.batched:
        return _of_rounds(engine, ids, say, over)
    cache, state = pair.target.new_cache(), pair.drafter.new_state()
    pair.target.prefill(ids[:-1], cache)
    pair.drafter.prefill(ids[:-1], state, cache)
    settings = Settings(temperature=1.0, num_draft_tokens=MOST, max_new_tokens=2 * MOST)

    def verify(rows: int) -> None:
        cache.crop(CONTEXT - 1)
        pair.target.logits(ids[-1:] * rows, cache)

    def draft() -> None:
        state.crop(CONTEXT - 1)
        cache.crop(CONTEXT - 1)
        pair.drafter.draft(ids, MOST, settings, lambda: 0.5, state, cache)

    work = {0: draft} | {rows: partial(verify, rows) for rows in range(1, MOST + 2)}
    seconds: dict[int, float] = {}
    for turn in range(REPEATS):  # in turn, so that a disturbance of the machine meets all alike
        for n in work:
            if over() and (turn or n > LEAST + 1):
                break
            say(MEASURING, (turn * len(work) + n) / (REPEATS * len(work) + 1))
            start = clock()
            work[n]()
            seconds[n] = min(seconds.get(n, math.inf), clock() - start)
    # Beside passes so long that there is no time for a round, the rest of one is nothing.
    rounds = [] if over() else list(Engine(pair, cache_bytes=0).generate(ids, settings))
    return Costs(
        draft=seconds.pop(0) / MOST,
        verify=tuple(accumulate(seconds.values(), max)),  # more rows are not cheaper: that was a disturbance
        overhead=min((round_.overhead_seconds for round_ in rounds), default=0.0),
    )


def _of_rounds(engine: Engine, ids: list[int], say: Progress, over: Callable[[], bool]) -> Costs:
    """Of rounds with each K, the least: a pass alone would be timed with a wait that rounds do not have."""
    verify, draft, overhead = [], math.inf, math.inf
    for k in range(MOST + 1):
        if over() and k > LEAST:
            break
        say(MEASURING, k / (MOST + 1))
        repeats = 1 if over() else REPEATS
        settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=repeats * (k + 1))
        rounds = [r for r in engine.generate(ids, settings) if r.drafted == k]
        if not rounds:  # a drafter that does not reach so far: more rows there will not be
            verify.append(verify[-1])
            continue
        verify.append(min(r.target_seconds for r in rounds))
        overhead = min(overhead, *(r.overhead_seconds for r in rounds))
        if k:
            draft = min(draft, *(r.draft_seconds / k for r in rounds))
    return Costs(draft if draft < math.inf else 0.0, tuple(accumulate(verify, max)), overhead)


def _name(pair: Pair) -> str:
    """What costs depend on, in one word."""
    info = dataclasses.replace(pair.info, exactness_note=None)  # it says how much there was time to test
    device = torch.cuda.get_device_name() if info.device.startswith("cuda") else f"{usable_cores()} cores"
    # With the user's own number of threads what was measured is theirs.
    forms = None if pair.products is None else [getattr(pair.products, part) for part in CHOSEN]
    what = (info, forms, device, torch.__version__, torch.get_num_threads() if chosen_by_user() else None)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _keep(path: Path, name: str, measured: Costs) -> None:
    try:
        keep(path, name, dataclasses.asdict(measured) | {"threads": torch.get_num_threads()})
    except OSError as error:
        log.warning("The costs of the pair are not kept: %s", error)


def main() -> None:
    try:
        with heard(progress_printer(sys.stderr)) as say:
            pair = load_embedded(say)
            found = measure_again(pair, say)
            say("", None)
    except LoadError as error:
        sys.exit(str(error))
    rows = ", ".join(f"{1e3 * seconds:.1f}" for seconds in found.verify)
    print(f"threads: {torch.get_num_threads()} of {usable_cores()} cores")
    print(f"target, 1 to {len(found.verify)} rows: {rows} ms")
    print(f"draft step: {1e3 * found.draft:.1f} ms; the rest of a round: {1e3 * found.overhead:.1f} ms")


if __name__ == "__main__":
    main()
