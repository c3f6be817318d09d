"""What ``core.bench_synthetic`` prints of its checks and measurements, and keeps for JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.auto_k import MOST
from core.models import rows as row_test
from core.models.decoder import Decoder
from core.records import Round
from core.synthetic import LARGE, SMALL, random_decoder, scripted_pair, weight_bytes
from core.synthetic_checks import (
    filters_depend,
    filters_differ,
    kernels_depend,
    tiny_differs,
    verdicts_differ,
)
from core.synthetic_measured import copy_speed, passes, speed, summary, synchronise
from core.synthetic_traffic import traffic
from core.terminal import put_out

ACCEPTANCE = (0.6, 0.8)
LAUNCHES_K = 4  # of the rounds whose launches and waits are counted
LIMIT_SECONDS = 210  # after which nothing new is begun
RUN_SECONDS = 1.2  # about what each run of the engine may take


@dataclass(frozen=True)
class Sizes:
    """How much is done: models, prompt and tokens a run, repeats, bytes copied, cases of the maths."""

    models: tuple[dict, dict]
    prompt: int
    most_tokens: int
    repeats: int
    copied: int
    cases: int


FULL = Sizes(LARGE, 256, 96, 2, 1 << 30, 40)
TINY = Sizes(SMALL, 32, 40, 1, 1 << 22, 10)


class Report:
    """Prints as it goes, keeps figures for JSON, and knows how much time is left."""

    def __init__(self) -> None:
        self.figures: dict[str, object] = {}
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def over(self) -> bool:
        return self.seconds > LIMIT_SECONDS

    def say(self, line: str = "") -> None:
        put_out(line)  # the figures are kept whether or not somebody reads on


def check(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Whether the device computes what the CPU does."""
    report.say("\nAgreement with the CPU")
    filters, verdicts = filters_differ(device), verdicts_differ(device, sizes.cases)
    report.say(f"  filter chain: probabilities differ by up to {filters:.1e}")
    report.say(f"  verification: {verdicts} of {2 * sizes.cases} blocks judged differently")
    report.figures["agreement"] = found = {"filters": filters, "verdicts": verdicts}
    for kind in ("lean", "transformers"):
        difference, different, replies = tiny_differs(kind, device)
        found[kind] = {"probability": difference, "different_replies": different, "replies": replies}
        report.say(
            f"  tiny model, {kind} decoder: probabilities differ by up to {difference:.1e},"
            f" {different} of {replies} replies differ"
        )


def check_rows(report: Report, target: Decoder, draft: Decoder) -> dict[str, float]:
    """How far rows depend on those beside them, in every kernel and in the models as a whole."""
    found = {f"target {name}": value for name, value in kernels_depend(target).items()}
    found |= {f"draft {name}": value for name, value in kernels_depend(draft).items()}
    found["filter chain"] = filters_depend(target.device, target.vocabulary)
    whole = row_test.row_dependence(target)
    found |= {"target, rows behind it": whole.later, "target, scored beside others": whole.alone}
    report.say("  rows of a pass, largest difference from a row alone or before a louder last row:")
    for name, value in found.items():
        report.say(f"    {name:<30} {'none' if value == 0 else f'{value:.1e}'}")
    return found


def measure(report: Report, form: str, device: torch.device, sizes: Sizes) -> dict[str, object]:
    """Everything about a pair whose target's layers are in ``form``."""
    start = time.perf_counter()
    target = random_decoder(sizes.models[0], form, device)
    draft = random_decoder(sizes.models[1], "bfloat16", device)
    synchronise(device)
    report.say(f"\nTarget in {form}, draft in bfloat16 (made in {time.perf_counter() - start:.0f} s)")
    ids = [n % draft.readable_ids for n in range(sizes.prompt)]
    pair = scripted_pair(target, draft, ACCEPTANCE[0], form)
    found: dict[str, object] = {"rows": check_rows(report, target, draft)}

    bandwidth = copy_speed(sizes.copied, device)
    by_rows, draft_pass, draft_step = passes(pair, ids, 5 * sizes.repeats)
    shares = {
        name: weight_bytes(model) / bandwidth / seconds
        for name, model, seconds in (("target", target, by_rows[0]), ("draft", draft, draft_pass))
    }
    found |= {
        "bandwidth": bandwidth,
        "weight_bytes": {"target": weight_bytes(target), "draft": weight_bytes(draft)},
        "verify_seconds": by_rows,
        "draft_pass_seconds": draft_pass,
        "draft_step_seconds": draft_step,
        "bandwidth_fraction": shares,
    }
    report.say(f"  a copy moves {bandwidth / 1e9:.1f} GB/s")
    report.say("  target's pass, ms by rows: " + "  ".join(f"{1e3 * s:.2f}" for s in by_rows))
    report.say(f"  draft's pass {1e3 * draft_pass:.2f} ms; a whole draft step {1e3 * draft_step:.2f} ms")
    for name, model in (("target", target), ("draft", draft)):
        report.say(
            f"  {name}: {weight_bytes(model) / 1e9:.4g} GB of weights a pass; at the speed of a copy that is"
            f" {shares[name]:.1%} of the time of one row"
        )

    what = "launches" if device.type == "cuda" else "operations"
    found["traffic"] = {}
    for k in (0, LAUNCHES_K):
        flow = traffic(pair, ids, k)
        found["traffic"][k] = vars(flow)
        copies = "" if flow.copies is None else f", {flow.copies:.1f} copies to the host"
        report.say(f"  a round with K = {k}: {flow.launches:.0f} {what}, {flow.waits:.2f} waits{copies}")

    tokens = int(min(sizes.most_tokens, max(16, RUN_SECONDS / by_rows[0])))
    found["speed"] = speeds(report, target, draft, form, ids, tokens, sizes.repeats)
    return found


def speeds(
    report: Report, target: Decoder, draft: Decoder, form: str, ids: Sequence[int], tokens: int, repeats: int
) -> dict[float, list[dict]]:
    """The engine's speed at every K, for each acceptance, the Ks taking turns."""
    found = {}
    for acceptance in ACCEPTANCE:
        if report.over:
            report.say("  (the rest is left out: the time is up)")
            break
        pair = scripted_pair(target, draft, acceptance, form)
        speed(pair, ids, MOST, 2 * MOST + 2, 0)
        rounds: dict[int, list[Round]] = {k: [] for k in range(MOST + 1)}
        for seed, k in itertools.product(range(1, repeats + 1), rounds):
            rounds[k] += speed(pair, ids, k, tokens, seed)
        found[acceptance] = rows = [summary(some, k, acceptance) for k, some in rounds.items()]
        _print_speeds(report, acceptance, rows)
    return found


def _print_speeds(report: Report, acceptance: float, rows: Sequence[dict]) -> None:
    tested = sum(row["tested"] for row in rows)
    kept = sum(row["acceptance"] * row["tested"] for row in rows[1:])
    report.say(
        f"\n  Expected acceptance {acceptance:.2f} at every position; came out {kept / tested:.3f}"
        f" of {tested} drafts tested, mean overlap {rows[-1]['alpha']:.4f}"
    )
    report.say("   K  tokens/s  ×plain  tokens/pass (expected)   draft  target    rest, ms a round")
    for row in rows:
        report.say(
            f"  {row['k']:>2} {row['tokens_per_second']:>9.1f}"
            f" {row['tokens_per_second'] / rows[0]['tokens_per_second']:>7.2f}"
            f" {row['tokens_per_pass']:>12.2f} ({row['expected_tokens_per_pass']:.2f})"
            f" {row['draft']:>12.2f} {row['target']:>7.2f} {row['overhead']:>7.2f}"
        )
