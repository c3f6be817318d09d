"""What the bench measured, and what it says: figures, tables for people, JSON, and one sentence a domain.

Pure: ``core.bench`` measures. Knows the records and ``core.metrics``, no model and no clock, so that every
figure can be tested on invented measurements.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from core.metrics import Figures, expected_tokens, predicted_speedup, summarize
from core.records import Round

DOMAINS = ("code", "prose")
PLAIN, PEER = "plain", "transformers"
ASSISTED_K = (2, 4, 8)  # of the peer's assisted generation; it is compared by the best of them
MILLI = 1e3  # seconds to milliseconds


# --- Numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some measurements."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, smallest and largest of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def shown(value: Spread | float | None, form: str = ".1f", scale: float = 1) -> str:
    """A figure for people, times ``scale``, with its range in brackets if it has one; "–" where undefined."""
    if value is None:
        return "–"
    if not isinstance(value, Spread):
        return format(scale * value, form)
    median, low, high = (format(scale * x, form) for x in (value.median, value.low, value.high))
    return median if value.low == value.high else f"{median} ({low}..{high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns two spaces apart, the first flush left and the others flush right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in cells
    )


# --- What was measured -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, checked. ``prompts`` counts those of each domain."""

    k: tuple[int, ...]
    prompts: int
    max_new_tokens: int
    repeats: int
    temperatures: tuple[float, ...]
    against: str | None
    conversation: int = 0  # tokens before a follow-up; 0: none is timed


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared: ``how`` is "plain", "K = 4", "transformers" or "transformers, K = 4"."""

    domain: str
    temperature: float
    how: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply, measured. ``tokens`` were decoded in ``decode_seconds``, after the prompt was read.

    ``rounds`` is empty, and ``prefill_seconds`` None, for a peer that has none to show.
    """

    repeat: int
    prompt: str
    prompt_tokens: int
    tokens: int
    decode_seconds: float
    prefill_seconds: float | None
    ttft_seconds: float
    seconds: float
    rounds: tuple[Round, ...] = ()


Samples = dict[Case, list[Sample]]


def how_name(k: int) -> str:
    return f"K = {k}" if k else PLAIN


def assisted_name(k: int) -> str:
    """The peer with the draft as its assistant."""
    return f"{PEER}, K = {k}"


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of single passes behind ``context_tokens`` ids: quartiles as low and high.

    ``target`` by number of rows from 1; ``draft`` is the draft model's pass over one id, and
    ``draft_step`` such a pass with the draw that follows it.
    """

    context_tokens: int
    target: tuple[Spread, ...]
    draft: Spread
    draft_step: Spread


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Seconds to the first token of a follow-up, of whose ``prompt_tokens`` a warm reply read ``new_tokens``.

    ``share`` is warm over cold within a repeat.
    """

    prompt_tokens: int
    new_tokens: int
    cold_seconds: Spread
    warm_seconds: Spread
    share: Spread


@dataclass(frozen=True)
class Report:
    """Everything that was measured; its figures are computed when they are first asked for."""

    machine: dict[str, object]
    load_start: tuple[float, float, float] | None
    load_end: tuple[float, float, float] | None
    pair: dict[str, object]
    options: Options
    samples: Samples
    passes: Passes
    follow_up: FollowUp | None = None

    @cached_property
    def figures(self) -> dict[Case, CaseFigures]:
        return {case: case_figures(self.samples, case) for case in self.samples}

    @cached_property
    def speculations(self) -> list[Speculation]:
        return [
            speculation(self.samples, Case(domain, temperature, how_name(k)), k)
            for domain in DOMAINS
            for temperature in self.options.temperatures
            for k in self.options.k
        ]

    def verdicts(self) -> list[str]:
        return [verdict(d, [s for s in self.speculations if s.case.domain == d]) for d in DOMAINS]


# --- What it comes to --------------------------------------------------------------------------------------


def by_repeat(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each repeat, in order."""
    repeats = sorted({sample.repeat for sample in samples})
    return [[sample for sample in samples if sample.repeat == repeat] for repeat in repeats]


def rates(samples: Sequence[Sample]) -> list[float | None]:
    """Decoded tokens per second, prompts together, of each repeat."""
    return [ratio(sum(s.tokens for s in r), sum(s.decode_seconds for s in r)) for r in by_repeat(samples)]


def speedups(samples: Sequence[Sample], base: Sequence[Sample]) -> Spread | None:
    """How many times faster than ``base``: the ratio of rates within each repeat."""
    return spread(ratio(rate, other) for rate, other in zip(rates(samples), rates(base), strict=True))


def all_rounds(samples: Iterable[Sample]) -> list[Round]:
    return [round_ for sample in samples for round_ in sample.rounds]


def outside_shares(samples: Sequence[Sample]) -> Spread | None:
    """The share of decoding spent outside model passes, of each repeat; None for the peer."""
    each = [summarize(all_rounds(repeat)) for repeat in by_repeat(samples)]
    return spread(ratio(f.overhead_seconds, f.decode_seconds) for f in each if f.rounds)


@dataclass(frozen=True, slots=True)
class Parts:
    """Medians over rounds, in seconds: drafting, the target's pass, and the rest."""

    draft: float
    target: float
    outside: float


def parts(rounds: Sequence[Round], k: int) -> Parts | None:
    """The parts of a usual round that aimed at ``k`` drafts; None where there was none."""
    chosen = [round_ for round_ in rounds if round_.num_draft_tokens == k]
    if not chosen:
        return None
    return Parts(
        statistics.median(round_.draft_seconds for round_ in chosen),
        statistics.median(round_.target_seconds for round_ in chosen),
        statistics.median(round_.overhead_seconds for round_ in chosen),
    )


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """What the samples of one case come to. Speeds, times and shares are spreads over the repeats.

    ``times_plain``, ``times_transformers`` and ``times_assisted`` (the peer's best K in this case) compare
    within a repeat; ``usual_round`` is a round of the K
    that was set. Undefined figures are None: of the peer all that needs rounds.
    """

    tokens_per_second: Spread | None
    times_plain: Spread | None
    times_transformers: Spread | None
    times_assisted: Spread | None
    tokens_per_reply: float
    prefill_seconds: Spread | None
    ttft_seconds: Spread | None
    prompt_tokens: Spread | None
    usual_round: Parts | None
    outside_share: Spread | None


def case_figures(all_samples: Samples, case: Case) -> CaseFigures:
    samples = all_samples[case]
    against = all_samples.get(dataclasses.replace(case, how=PEER))
    assisted = best_assisted(all_samples, case)
    rounds = all_rounds(samples)
    return CaseFigures(
        tokens_per_second=spread(rates(samples)),
        times_plain=speedups(samples, all_samples[dataclasses.replace(case, how=PLAIN)]),
        times_transformers=speedups(samples, against) if against else None,
        times_assisted=speedups(samples, assisted) if assisted else None,
        tokens_per_reply=statistics.mean(s.tokens for s in samples),
        prefill_seconds=spread(s.prefill_seconds for s in samples),
        ttft_seconds=spread(s.ttft_seconds for s in samples),
        prompt_tokens=spread(s.prompt_tokens for s in samples),
        usual_round=parts(rounds, max((round_.num_draft_tokens for round_ in rounds), default=0)),
        outside_share=outside_shares(samples),
    )


def best_assisted(all_samples: Samples, case: Case) -> list[Sample] | None:
    """The peer's samples at the K that was fastest in this case; None where it was not measured."""
    each = [all_samples.get(dataclasses.replace(case, how=assisted_name(k))) for k in ASSISTED_K]
    measured = [(spread(rates(samples)), samples) for samples in each if samples]
    known = [(rate.median, samples) for rate, samples in measured if rate]
    return max(known, key=lambda one: one[0])[1] if known else None


@dataclass(frozen=True, slots=True)
class Speculation:
    """How K drafts a round did against plain decoding. ``expected`` is E(K) of the measured a_i, tokens a
    round; ``expected_alpha`` that of alpha for all positions; ``predicted`` the speed-up E(K) stands for."""

    case: Case
    k: int
    figures: Figures
    expected: float | None
    expected_alpha: float | None
    predicted: float | None
    measured: Spread | None


def speculation(samples: Samples, case: Case, k: int) -> Speculation:
    plain_samples = samples[dataclasses.replace(case, how=PLAIN)]
    rounds = all_rounds(samples[case])
    figures = summarize(rounds)
    expected = expected_tokens(figures.conditional_acceptance, k)
    plain, drafting = parts(all_rounds(plain_samples), 0), parts(rounds, k)
    return Speculation(
        case=case,
        k=k,
        figures=figures,
        expected=expected,
        expected_alpha=expected_tokens(figures.alpha, k),
        predicted=predicted_speedup(
            expected,
            plain_seconds=plain and plain.target + plain.outside,
            draft_seconds=drafting and drafting.draft,
            target_seconds=drafting and drafting.target,
            overhead_seconds=drafting and drafting.outside,
        ),
        measured=speedups(samples[case], plain_samples),
    )


def verdict(domain: str, found: Sequence[Speculation]) -> str:
    """One sentence: whether speculation pays off on a domain, by temperature, with the best K of each."""
    clauses = []
    for temperature in dict.fromkeys(s.case.temperature for s in found):
        known = [s for s in found if s.case.temperature == temperature and s.measured]
        if not known:
            clauses.append(f"is not known at temperature {temperature:g}")
            continue
        best = max(known, key=lambda s: s.measured.median)
        if best.measured.low > 1:
            says = "pays off"
        elif best.measured.high < 1:
            says = "does not pay off"
        else:
            says = "makes no sure difference"
        clauses.append(
            f"{says} at temperature {temperature:g}"
            f" (times plain at K = {best.k}: {shown(best.measured, '.2f')})"
        )
    return f"On {domain}, speculation " + ", and ".join(clauses) + "."


# --- For people --------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report for people."""
    sections = (
        _machine_section,
        _speed_section,
        _speculation_section,
        _start_section,
        _follow_up_section,
        _round_section,
        _passes_section,
    )
    written = ["\n".join(section(report)) for section in sections]
    return "\n\n".join([*filter(None, written), "\n".join(report.verdicts())]) + "\n"


def _machine_section(report: Report) -> Iterator[str]:
    said, pair = report.machine, report.pair
    yield f"{said['processor']}, {said['cores']} cores, {said['system']}"
    yield (
        f"torch {said['torch']} ({said['torch_threads']} threads, {said['torch_cpu_capability']}), "
        f"transformers {said['transformers']}, Python {said['python']}"
    )
    for name, load in (("start", report.load_start), ("end", report.load_end)):
        yield f"load average at the {name}: {' '.join(f'{x:.2f}' for x in load) if load else '–'}"
    yield (
        f"target {pair['target']} ({pair['quantization']}), draft {pair['draft']}"
        f" ({pair['draft_quantization']}), {pair['device']}"
    )
    if pair["exactness_note"]:
        yield str(pair["exactness_note"])
    o = report.options
    yield (
        f"{o.prompts} prompts a domain, up to {o.max_new_tokens} tokens each, {o.repeats} repeats;"
        " median (smallest..largest) of the repeats"
    )


def _case_name(case: Case) -> str:
    return f"{case.domain}, temperature {case.temperature:g}, {case.how}"


def _speed_section(report: Report) -> Iterator[str]:
    columns = 6 if report.options.against else 4
    rows = [
        [
            _case_name(case),
            shown(figures.tokens_per_second),
            shown(figures.times_plain, ".2f"),
            shown(figures.tokens_per_reply),
            shown(figures.times_transformers, ".2f"),
            shown(figures.times_assisted, ".2f"),
        ][:columns]
        for case, figures in report.figures.items()
    ]
    yield "Speed: tokens/s after the prompt was read, and how many times others' in the same repeat"
    header = ["", "tokens/s", "× plain", "tokens a reply", f"× {PEER}", "× its best assisted"]
    yield table(header[:columns], rows)


def _speculation_section(report: Report) -> Iterator[str]:
    yield "Speculation: acceptance, tokens a target pass, expected (E) and measured, and the speed-up"
    yield table(
        ["", "accepted", "α", "tokens/pass", "E from a_i", "E from α", "predicted ×", "measured ×"],
        [
            [
                _case_name(found.case),
                shown(found.figures.draft_acceptance_rate, ".1%"),
                shown(found.figures.alpha, ".3f"),
                shown(found.figures.tokens_per_pass, ".2f"),
                shown(found.expected, ".2f"),
                shown(found.expected_alpha, ".2f"),
                shown(found.predicted, ".2f"),
                shown(found.measured, ".2f"),
            ]
            for found in report.speculations
        ],
    )


def _start_section(report: Report) -> Iterator[str]:
    yield "Before the first token, ms: prefill, and time to first token with it"
    yield table(
        ["", "prefill", "first token", "prompt tokens"],
        [
            [
                _case_name(case),
                shown(figures.prefill_seconds, ".0f", MILLI),
                shown(figures.ttft_seconds, ".0f", MILLI),
                shown(figures.prompt_tokens, ".0f"),
            ]
            for case, figures in report.figures.items()
        ],
    )


def _follow_up_section(report: Report) -> Iterator[str]:
    if found := report.follow_up:
        yield f"A follow-up to a conversation, {found.prompt_tokens:,} prompt tokens, ms to its first token"
        yield table(
            ["", "tokens read", "ms", "× cold"],
            [
                ["cold", str(found.prompt_tokens), shown(found.cold_seconds, ".0f", MILLI), "1.00"],
                [
                    "caches kept",
                    str(found.new_tokens),
                    shown(found.warm_seconds, ".0f", MILLI),
                    shown(found.share, ".3f"),
                ],
            ],
        )


def _round_section(report: Report) -> Iterator[str]:
    yield "A usual round, ms (medians), and the share of decoding outside model passes"
    yield table(
        ["", "drafting", "target", "outside", "outside share"],
        [
            [
                _case_name(case),
                shown(usual.draft, ".2f", MILLI),
                shown(usual.target, ".2f", MILLI),
                shown(usual.outside, ".2f", MILLI),
                shown(figures.outside_share, ".1%"),
            ]
            for case, figures in report.figures.items()
            if (usual := figures.usual_round)
        ],
    )


def _passes_section(report: Report) -> Iterator[str]:
    passes = report.passes
    yield f"Single passes behind {passes.context_tokens} tokens, ms: median (quartiles)"
    base = passes.target[0].median
    named = [(f"target, {rows} row{'s'[: rows > 1]}", t) for rows, t in enumerate(passes.target, 1)]
    named += [("draft model, 1 row", passes.draft), ("draft step with its draw", passes.draft_step)]
    rows = [[name, shown(s, ".2f", MILLI), f"{s.median / base:.2f}"] for name, s in named]
    yield table(["", "ms", "× one row"], rows)


# --- For programs ------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, object]:
    """The report as plain data: its figures and every sample, rounds as their times and counts."""
    return {
        "machine": report.machine,
        "load_start": report.load_start,
        "load_end": report.load_end,
        "pair": report.pair,
        "options": dataclasses.asdict(report.options),
        "cases": [
            dataclasses.asdict(case)
            | dataclasses.asdict(figures)
            | {"samples": [_sample_json(sample) for sample in report.samples[case]]}
            for case, figures in report.figures.items()
        ],
        "speculation": [dataclasses.asdict(found) for found in report.speculations],
        "passes": dataclasses.asdict(report.passes),
        "follow_up": dataclasses.asdict(report.follow_up) if report.follow_up else None,
        "verdicts": report.verdicts(),
    }


def _sample_json(sample: Sample) -> dict[str, object]:
    row = {f.name: getattr(sample, f.name) for f in dataclasses.fields(Sample) if f.name != "rounds"}
    return row | {"figures": dataclasses.asdict(summarize(sample.rounds)) if sample.rounds else None}
