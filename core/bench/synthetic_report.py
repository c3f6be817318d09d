"""What ``core.bench.synthetic`` prints of its checks and measurements, and keeps for JSON.

Each function is a section of the run: it measures by way of ``core.bench.synthetic_checks``, ``_traffic``,
``_measured`` and ``_memory``, says what came out, and notes as a problem what is not as it must be.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.bench import nf4_dispatch, roofline
from core.bench.cards import Card
from core.bench.random_pair import (
    CONTEXT,
    LARGE,
    SMALL,
    STEADY,
    config_of,
    random_decoder,
    scripted_pair,
    steady_pair,
    weight_bytes,
)
from core.bench.roofline import Host, Model, Work
from core.bench.synthetic_checks import (
    filters_depend,
    filters_differ,
    kernels_depend,
    tiny_differs,
    verdicts_differ,
)
from core.bench.synthetic_measured import passes, speed, summary, synchronise
from core.bench.synthetic_memory import full_memory
from core.bench.synthetic_traffic import traffic, waits
from core.drafters.auto import AutoDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine.auto_k import MOST
from core.figures.costs import Costs
from core.figures.metrics import expected_tokens
from core.models import rows as row_test
from core.models.decoder import Decoder
from core.models.memory import size_of
from core.pairs.pair import Pair
from core.records import Round
from core.text.terminal import put_out

ACCEPTANCE = (0.6, 0.8)
LAUNCHES_K = 4  # of the rounds whose launches and waits are counted
ROWS = (*range(1, MOST + 2), 12, 16)  # of the passes that are timed
LIMIT_SECONDS = 150  # after which nothing new is begun, so that it ends within three minutes
RUN_SECONDS = 0.8  # about what each run of the engine may take
FILTERS_MAY_DIFFER = 1e-4  # of a probability: other kernels round otherwise
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """How much is done: models, prompt and tokens a run, repeats, bytes copied, cases of the maths, seconds
    for whether rows depend on each other, and the Ks whose speed is measured."""

    models: tuple[dict, dict]
    prompt: int
    most_tokens: int
    repeats: int
    copied: int
    cases: int
    dependence: float
    ks: tuple[int, ...] = tuple(range(MOST + 1))


FULL = Sizes(LARGE, 256, 96, 2, 1 << 30, 40, 5.0)
TINY = Sizes(SMALL, 32, 24, 1, 1 << 22, 5, 0.0, (0, 1, LAUNCHES_K, MOST))


class Report:
    """Prints as it goes, keeps figures for JSON and problems for the end, and knows how much time is left."""

    def __init__(self) -> None:
        self.figures: dict[str, object] = {}
        self.problems: list[str] = []
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def over(self) -> bool:
        return self.seconds > LIMIT_SECONDS

    def say(self, line: str = "") -> None:
        put_out(line)  # the figures are kept whether or not somebody reads on

    def must(self, holds: bool, problem: str) -> None:
        """Says and keeps ``problem`` where something does not hold that must."""
        if not holds:
            self.problems.append(problem)
            self.say(f"  NOT AS IT MUST BE: {problem}")


# --- What would settle most --------------------------------------------------------------------------------


def agreement(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Whether the device computes what the CPU does."""
    report.say("\nAgreement with the CPU")
    filters, verdicts = filters_differ(device), verdicts_differ(device, sizes.cases)
    report.say(f"  filter chain: probabilities differ by up to {filters:.1e}")
    report.say(f"  verification: {verdicts} of {2 * sizes.cases} blocks judged differently")
    report.must(filters < FILTERS_MAY_DIFFER, f"the filter chain differs from the CPU's by {filters:.1e}")
    report.must(verdicts == 0, f"{verdicts} blocks are judged otherwise than on the CPU")
    report.figures["agreement"] = found = {"filters": filters, "verdicts": verdicts}
    for kind in ("lean", "transformers"):
        difference, different, replies = tiny_differs(kind, device, max(2, sizes.cases // 10))
        found[kind] = {"probability": difference, "different_replies": different, "replies": replies}
        report.say(
            f"  tiny model, {kind} decoder: probabilities differ by up to {difference:.1e},"
            f" {different} of {replies} replies differ"
        )
        report.must(different == 0, f"{different} replies of a tiny model differ from the CPU's ({kind})")


def rounds_asked(report: Report, pair: Pair, ids: Sequence[int], work: Work | None) -> dict[int, dict]:
    """Launches, waits and copies of rounds, beside what the fake card counts of them."""
    on_card = pair.info.device == "cuda"
    found = {}
    for k in (0, LAUNCHES_K):
        flow = traffic(pair, ids, k)
        line = f"  a round with K = {k}: {flow.waits:.2f} waits, {flow.launches:.0f} "
        line += "launches" if on_card else "operations"
        if flow.copies is not None:
            line += f", {flow.copies:.1f} copies to the host"
        counted = None if work is None else _counted(work, k)
        if counted is not None:
            line += f"; the fake card counts {counted:.0f} that launch"
        report.say(line)
        report.must(flow.waits == 1, f"a round with K = {k} waits {flow.waits:.2f} times, not once")
        found[k] = dataclasses.asdict(flow) | {"fake_launches": counted}
    return found


def _counted(work: Work, k: int) -> float:
    return (work.passed + (work.step.times(k) + work.judging if k else work.plain)).launches


def ways(report: Report, target: Decoder, form: str) -> None:
    """Waits of a round of the ways to draft that are played on the device beside a model's."""
    report.figures["ways"] = found = {}
    for drafter in (
        NgramDrafter(CONTEXT),
        RecyclingDrafter(CONTEXT),
        AutoDrafter(RecyclingDrafter(CONTEXT), CONTEXT),
    ):
        flow = waits(steady_pair(target, drafter, form), [1, 2, 3, *[STEADY] * 8], LAUNCHES_K)
        report.say(f"  {drafter.name}: {flow.waits:.2f} waits a round, {flow.drafted:.1f} drafts")
        report.must(flow.waits == 1, f"a round of {drafter.name} waits {flow.waits:.2f} times, not once")
        found[drafter.name] = dataclasses.asdict(flow)


def timed_passes(
    report: Report, pair: Pair, models: tuple[Decoder, Decoder], ids: Sequence[int], card: Card, repeats: int
) -> dict[str, object]:
    """The target's passes by number of rows, the draft's, a draft step, and the share of reading weights."""
    by_rows, draft_pass, draft_step = passes(pair, ids, ROWS, 5 * repeats)
    report.say(
        "  target's pass, rows: ms   "
        + "  ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in zip(ROWS, by_rows, strict=True))
    )
    if pair.info.quantization == "nf4" and pair.info.device == "cuda":
        report.say(f"  {_switch(models[0], card)}")
    report.say(f"  draft's pass {1e3 * draft_pass:.2f} ms; a whole draft step {1e3 * draft_step:.2f} ms")
    held = {"target": weight_bytes(models[0]), "draft": weight_bytes(models[1])}
    shares = {
        name: held[name] / card.bandwidth / seconds
        for name, seconds in (("target", by_rows[0]), ("draft", draft_pass))
    }
    for name, share in shares.items():
        report.say(
            f"  {name}: {held[name] / 1e9:.4g} GB of weights a pass; at the speed of a copy"
            f" ({card.bandwidth / 1e9:.1f} GB/s) that is {share:.1%} of the time of one row"
        )
    return {
        "rows": ROWS,
        "verify_seconds": by_rows,
        "draft_pass_seconds": draft_pass,
        "draft_step_seconds": draft_step,
        "weight_bytes": held,
        "bandwidth_fraction": shares,
    }


def _switch(target: Decoder, card: Card) -> str:
    """From how many rows on bitsandbytes is expected to unpack the weights of a product."""
    names = dict(zip(("qkv", "out", "gate and up", "down"), target.layers[0].products, strict=True))
    how = target.dtype, card.capability, card.multiprocessors
    first = {
        name: next((n for n in ROWS if nf4_dispatch.fused(product.shape, n, *how) is False), None)
        for name, product in names.items()
    }
    said = [f"{name} from {rows} rows" for name, rows in first.items() if rows is not None]
    return f"by bitsandbytes' own rule weights are unpacked: {', '.join(said) or 'never here'}"


def speeds(
    report: Report, models: tuple[Decoder, Decoder], form: str, ids: Sequence[int], sizes: Sizes,
    tokens: int, costs: Costs | None, ks: Sequence[int], acceptances: Sequence[float],
) -> dict[float, list[dict]]:  # fmt: skip
    """The engine's speed at every K, for each acceptance, the Ks taking turns; ``costs``: the roofline's."""
    found = {}
    for acceptance in acceptances:
        if report.over:
            report.say("  (the rest is left out: the time is up)")
            break
        pair = scripted_pair(*models, acceptance, form)
        speed(pair, ids, max(ks), 2 * max(ks) + 2, 0)
        rounds: dict[int, list[Round]] = {k: [] for k in ks}
        for seed, k in itertools.product(range(1, sizes.repeats + 1), rounds):
            rounds[k] += speed(pair, ids, k, tokens, seed)
        found[acceptance] = rows = [summary(some, k, acceptance) for k, some in rounds.items()]
        for row in rows:
            row["roofline"] = None
            if costs is not None:
                row["roofline"] = expected_tokens(acceptance, row["k"]) / costs.round_seconds(row["k"])
        _print_speeds(report, acceptance, rows)
    return found


def _print_speeds(report: Report, acceptance: float, rows: Sequence[dict]) -> None:
    tested = sum(row["tested"] for row in rows)
    kept = sum(row["acceptance"] * row["tested"] for row in rows[1:])
    report.say(
        f"\n  Expected acceptance {acceptance:.2f} at every position; came out {kept / tested:.3f}"
        f" of {tested} drafts tested, mean overlap {rows[-1]['alpha']:.4f}"
    )
    report.say("   K  tokens/s  ×plain  roofline  tokens/pass (expected)   draft  target    rest, ms a round")
    for row in rows:
        bound = "–" if row["roofline"] is None else f"{row['roofline']:.1f}"
        report.say(
            f"  {row['k']:>2} {row['tokens_per_second']:>9.1f}"
            f" {row['tokens_per_second'] / rows[0]['tokens_per_second']:>7.2f} {bound:>9}"
            f" {row['tokens_per_pass']:>12.2f} ({row['expected_tokens_per_pass']:.2f})"
            f" {row['draft']:>12.2f} {row['target']:>7.2f} {row['overhead']:>7.2f}"
        )


# --- A pair, and what comes after it -----------------------------------------------------------------------


def work_of(report: Report, sizes: Sizes, dtype: torch.dtype) -> Work | None:
    """What the fake card counts of rounds of this pair; None, said, where it cannot be counted here."""
    try:
        return roofline.count(*map(config_of, sizes.models), "nf4", dtype)
    except Exception as error:  # it stands on torch's private parts: the run must not hang on it
        report.say(f"  (the fake card cannot count here: {type(error).__name__}: {error})")
        return None


def estimated(sizes: Sizes, form: str, dtype: torch.dtype, work: Work, card: Card, host: Host) -> Costs:
    """The roofline's costs of this pair."""
    configs = [config_of(one) for one in sizes.models]
    models = [
        Model.of(config, size_of(config), kind, dtype)
        for config, kind in zip(configs, (form, "none"), strict=True)
    ]
    return roofline.costs(work, *models, card, host, sizes.prompt)


def measure(
    report: Report, form: str, dtype: torch.dtype, device: torch.device, sizes: Sizes,
    here: tuple[Card, Host], brief: bool,
) -> dict[str, object]:  # fmt: skip
    """A pair whose target's layers are in ``form``; ``brief``: no more than passes and two speeds."""
    start = time.perf_counter()
    models = (
        random_decoder(sizes.models[0], form, device, dtype),
        random_decoder(sizes.models[1], "none", device, dtype),
    )
    synchronise(device)
    name = f"{'unquantised' if form == 'none' else form.upper()}, {dtype}".replace("torch.", "")
    report.say(f"\nTarget {name} (made in {time.perf_counter() - start:.0f} s)")
    ids = [n % models[1].readable_ids for n in range(sizes.prompt)]
    pair = scripted_pair(*models, ACCEPTANCE[0], form)
    found: dict[str, object] = {}
    work = costs = None
    if not brief:
        work = work_of(report, sizes, dtype)
        found["traffic"] = rounds_asked(report, pair, ids, work)
        ways(report, models[0], form)
        if work is not None:
            costs = estimated(sizes, form, dtype, work, *here)
    found |= timed_passes(report, pair, models, ids, here[0], sizes.repeats)
    tokens = int(min(sizes.most_tokens, max(16, RUN_SECONDS / found["verify_seconds"][0])))
    ks, acceptances = ((0, LAUNCHES_K), ACCEPTANCE[-1:]) if brief else (sizes.ks, ACCEPTANCE)
    found["speed"] = speeds(report, models, form, ids, sizes, tokens, costs, ks, acceptances)
    if not brief and not report.over:
        report.figures["memory"] = memory(report, pair, ids)
        found["dependence"] = dependence(report, *models, sizes.dependence)
    return found


def memory(report: Report, pair: Pair, ids: Sequence[int]) -> dict[str, object]:
    """What a full card does to a reply and to those after it."""
    report.say("\nA reply while the memory is full" + (" (played)" if pair.info.device != "cuda" else ""))
    found = full_memory(pair, ids)
    report.say(f"  {found.sentence or 'it was written all the same'}")
    report.say(f"  another afterwards: {'written' if found.usable else 'NOT written'}")
    report.must(found.usable, "the engine is of no use after memory was out")
    return dataclasses.asdict(found)


def dependence(report: Report, target: Decoder, draft: Decoder, seconds: float) -> dict[str, float]:
    """How far rows depend on those beside them, in every kernel and in the models as a whole."""
    found = {f"target {name}": value for name, value in kernels_depend(target).items()}
    found |= {f"draft {name}": value for name, value in kernels_depend(draft).items()}
    found["filter chain"] = filters_depend(target.device, target.vocabulary)
    whole = row_test.row_dependence(target, budget=seconds)
    found |= {"target, rows behind it": whole.later, "target, scored beside others": whole.alone}
    report.say("\nRows of a pass, largest difference from a row alone or before a louder last row")
    for name, value in found.items():
        report.say(f"  {name:<30} {'none' if value == 0 else f'{value:.1e}'}")
    return found
