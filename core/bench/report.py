"""What the bench says: tables for people, JSON for programs, and one sentence a domain.

Pure: ``core.bench.run`` measures, ``core.bench.figures`` computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from core.bench.figures import (
    RIVALS,
    CaseFigures,
    Speculation,
    Verification,
    case_figures,
    speculation,
    verdict,
    verification,
)
from core.bench.measured import (
    DOMAINS,
    Case,
    FollowUp,
    Limit,
    Options,
    Passes,
    Sample,
    Samples,
    Session,
    Way,
    shown,
)
from core.figures.costs import Costs
from core.figures.intervals import FEW
from core.figures.metrics import summarize

MILLI, MEGA, GIGA = 1e3, 1e-6, 1e-9  # seconds to ms, bytes to MB and GB


@dataclass(frozen=True)
class Report:
    """Everything that was measured; its figures are computed when they are first asked for.

    ``ways`` are those of ``samples`` that draft; ``notes`` are sentences on what could not be measured;
    automatic K decided by ``costs``.
    """

    machine: dict[str, object]
    load_start: tuple[float, float, float] | None
    load_end: tuple[float, float, float] | None
    pair: dict[str, object]
    options: Options
    ways: tuple[Way, ...]
    samples: Samples
    passes: Passes
    limit: Limit | None = None
    follow_up: FollowUp | None = None
    session: Session | None = None
    notes: tuple[str, ...] = ()
    costs: Costs | None = None

    @cached_property
    def figures(self) -> dict[Case, CaseFigures]:
        return {case: case_figures(self.samples, case) for case in self.samples}

    @cached_property
    def speculations(self) -> list[Speculation]:
        return [
            speculation(self.samples, Case(domain, temperature, way.name), way)
            for domain in DOMAINS
            for temperature in self.options.temperatures
            for way in self.ways
        ]

    @cached_property
    def verifications(self) -> list[Verification]:
        """Where both verifiers were measured in the same case: the one beside the other."""
        pairs = [
            (way, other)
            for way in self.ways
            for other in self.ways
            if (way.verifier, other.verifier) == ("token", "block")
            and (way.k, way.auto) == (other.k, other.auto)
        ]
        return [
            verification(self.samples, Case(domain, temperature, way.name), way, other)
            for domain in DOMAINS
            for temperature in self.options.temperatures
            for way, other in pairs
        ]

    def verdicts(self) -> list[str]:
        if not self.ways:
            return []
        return [verdict(d, [s for s in self.speculations if s.case.domain == d]) for d in DOMAINS]


# --- For people --------------------------------------------------------------------------------------------


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


def as_text(report: Report) -> str:
    """The report for people."""
    sections = (
        _machine_section,
        _speed_section,
        _speculation_section,
        _auto_section,
        _verifier_section,
        _start_section,
        _follow_up_section,
        _round_section,
        _passes_section,
        _session_section,
    )
    written = ["\n".join(section(report)) for section in sections]
    return "\n\n".join(filter(None, [*written, "\n".join(report.verdicts())])) + "\n"


def _machine_section(report: Report) -> Iterator[str]:
    said, pair, o = report.machine, report.pair, report.options
    yield f"{said['processor']}, {said['cores']} cores, {said['system']}"
    if said["card"]:
        yield str(said["card"])
    yield (
        f"torch {said['torch']} ({said['torch_threads']} threads, {said['torch_cpu_capability']}), "
        f"transformers {said['transformers']}, Python {said['python']}"
    )
    for name, load in (("start", report.load_start), ("end", report.load_end)):
        yield f"load average at the {name}: {' '.join(f'{x:.2f}' for x in load) if load else '–'}"
    draft = f"draft {pair['draft']} ({pair['draft_quantization']})" if pair["draft"] else "no draft"
    yield f"target {pair['target']} ({pair['quantization']}), {draft}, {pair['device']}"
    if pair["exactness_note"]:
        yield str(pair["exactness_note"])
    yield from report.notes
    yield (
        f"{o.prompts} prompts a domain, up to {o.max_new_tokens} tokens each, {o.repeats} repeats;"
        " median (smallest..largest) of the repeats"
    )


def _case_name(case: Case) -> str:
    return f"{case.domain}, temperature {case.temperature:g}, {case.how}"


def _speed_section(report: Report) -> Iterator[str]:
    rivals = [name for name in RIVALS if any(name in f.times for f in report.figures.values())]
    rows = [
        [
            _case_name(case),
            shown(figures.tokens_per_second),
            shown(figures.tokens_per_reply),
            *(shown(figures.times.get(name), ".2f") for name in rivals),
        ]
        for case, figures in report.figures.items()
    ]
    yield (
        "Speed: tokens/s after the prompt was read, and how many times others' in the same repeat"
        " (of several ways of a peer, its fastest)"
    )
    yield table(["", "tokens/s", "tokens a reply", *(f"× {name}" for name in rivals)], rows)


def _speculation_section(report: Report) -> Iterator[str]:
    if not report.ways:
        return
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


def _auto_section(report: Report) -> Iterator[str]:
    automatic = [found for found in report.speculations if found.way.auto]
    if not automatic:
        return
    columns = sorted({k for found in automatic for k in found.chosen})
    yield "Automatic K: the share of rounds in which each K was chosen"
    yield table(
        ["", *(f"K = {k}" for k in columns)],
        [
            [_case_name(found.case), *(shown(found.chosen.get(k, 0.0), ".0%") for k in columns)]
            for found in automatic
        ],
    )
    if report.costs:
        verify = ", ".join(shown(seconds, ".1f", MILLI) for seconds in report.costs.verify)
        yield (
            f"Decided by costs measured before, ms: target, 1 to {len(report.costs.verify)} rows, {verify};"
            f" draft step {shown(report.costs.draft, '.1f', MILLI)};"
            f" the rest of a round {shown(report.costs.overhead, '.1f', MILLI)}"
        )


def _verifier_section(report: Report) -> Iterator[str]:
    if not report.verifications:
        return
    yield "Verifiers: accepted drafts a round, with 95% intervals over replies; the same prompts and seeds"
    yield table(
        ["", "replies", "token by token", "by block", "block / token"],
        [
            [
                _case_name(found.case),
                str(found.token.replies),
                *(_with_interval(one.mean, one.interval) for one in (found.token, found.block)),
                _with_interval(found.quotient, found.quotient_interval),
            ]
            for found in report.verifications
        ],
    )
    if min(found.token.replies for found in report.verifications) < FEW:
        yield f"Intervals over fewer than {FEW} replies are too narrow."


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    low_high = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
    return shown(value, ".3f") + low_high


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
    yield "A usual round, ms (medians), and the shares outside model passes and for reading weights"
    yield table(
        ["", "K", "drafting", "target", "outside", "outside share", "reading weights"],
        [
            [
                _case_name(case),
                str(usual.k),
                shown(usual.draft, ".2f", MILLI),
                shown(usual.target, ".2f", MILLI),
                shown(usual.outside, ".2f", MILLI),
                shown(figures.outside_share, ".1%"),
                shown(_round_share(report, figures), ".0%"),
            ]
            for case, figures in report.figures.items()
            if (usual := figures.usual_round)
        ],
    )


def _passes_section(report: Report) -> Iterator[str]:
    passes, limit = report.passes, report.limit
    yield f"Single passes behind {passes.context_tokens} tokens, ms: median (quartiles)"
    base = passes.target[0].median
    target, draft = (limit.target_share, limit.draft_share) if limit else (lambda seconds: None,) * 2
    named = [(f"target, {n} row{'s'[: n > 1]}", spread, target) for n, spread in enumerate(passes.target, 1)]
    named += [
        ("draft model, 1 row", passes.draft, draft),
        ("draft step with its draw", passes.draft_step, draft),
    ]
    yield table(
        ["", "ms", "× one row", "reading weights"],
        [
            [name, shown(s, ".2f", MILLI), f"{s.median / base:.2f}", shown(share(s.median), ".0%")]
            for name, s, share in named
            if s
        ],
    )
    if limit:
        yield _limit_sentence(limit)


def _limit_sentence(limit: Limit) -> str:
    draft = f", a draft step {limit.draft_bytes * MEGA:.1f} MB" if limit.draft_bytes else ""
    least = shown(limit.target_bytes / limit.memory, ".2f", MILLI)
    cached = shown(limit.target_bytes / limit.resident, ".2f", MILLI)
    return (
        f"Reading weights: a target pass reads {limit.target_bytes * MEGA:.1f} MB{draft}. Memory is read at"
        f" {limit.memory * GIGA:.1f} GB/s ({limit.memory_bytes * GIGA:.1f} GB, far beyond the caches), so a"
        f" target pass takes {least} ms at least; read again and again, {limit.target_bytes * MEGA:.1f}"
        f" MB come at {limit.resident * GIGA:.1f} GB/s, in {cached} ms."
    )


def _session_section(report: Report) -> Iterator[str]:
    if found := report.session:
        before, after, most = (f"{n * MEGA:.0f} MB" for n in (found.before, found.after, found.most))
        yield (
            f"A session of {found.replies} replies, resident memory: {before} before (after {found.settling}"
            f" replies), {after} after ({found.growth:+.1%}), at most {most} between"
        )


# --- For programs ------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, object]:
    """The report as plain data: its figures and every sample, rounds as their times and counts."""

    def plain(value: object) -> dict[str, object] | None:
        return dataclasses.asdict(value) if value else None

    return {
        "machine": report.machine,
        "load_start": report.load_start,
        "load_end": report.load_end,
        "pair": report.pair,
        "options": plain(report.options),
        "notes": list(report.notes),
        "cases": [
            plain(case)
            | plain(figures)
            | {"limit_share": _round_share(report, figures)}
            | {"samples": [_sample_json(sample) for sample in report.samples[case]]}
            for case, figures in report.figures.items()
        ],
        "speculation": [plain(found) for found in report.speculations],
        "verification": [plain(found) for found in report.verifications],
        "passes": plain(report.passes),
        "costs": plain(report.costs),
        "limit": plain(report.limit),
        "follow_up": plain(report.follow_up),
        "session": report.session and plain(report.session) | {"growth": report.session.growth},
        "verdicts": report.verdicts(),
    }


def _round_share(report: Report, figures: CaseFigures) -> float | None:
    if not (report.limit and figures.usual_round):
        return None
    return report.limit.round_share(figures.usual_round)


def _sample_json(sample: Sample) -> dict[str, object]:
    row = {f.name: getattr(sample, f.name) for f in dataclasses.fields(Sample) if f.name != "rounds"}
    return row | {"figures": dataclasses.asdict(summarize(sample.rounds)) if sample.rounds else None}
