"""Measures the embedded pair on this machine: does the draft pay off, and where does the time go?

    python -m core.bench [--k 4]... [--prompts 3] [--max-new-tokens 128] [--repeats 3] [--temperature 0 0.8]
        [--against transformers] [--json FILE] [--device cpu]

Runs code and prose prompts of ``data/prompts`` plainly, with each K, and with the peer, one after the other
within every repeat, so that a disturbance of the machine meets them alike; everything is warmed up first.
Prints medians over the repeats with their range, ratios taken within a repeat, the acceptance figures, the
time outside model passes, single passes by number of rows, predicted and measured speed-up, and a sentence
that says whether speculation pays off. ``--json`` writes the same figures and every single measurement.

Tokens per second are after the prompt was read: all of Redline's rounds; of transformers, which says only
when tokens come, everything from the first token to the end. Load averages at start and end are printed
because machines are shared; they cannot tell this program's own load from others', so read ratios rather
than speeds.

Reports, and judges no speed. Does not know the page, the record or other pairs, and does not check that
replies are right: tests do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from core.engine import Engine
from core.metrics import Figures, expected_tokens, predicted_speedup, summarize
from core.models.embedded import load_embedded, prepare_embedded
from core.models.errors import LoadError
from core.models.pair import Pair
from core.prompts import Prompt, load_prompts
from core.records import Round
from core.settings import MAX_DRAFT_TOKENS, SettingsError, parse_settings
from core.terminal import progress_printer
from core.text import encode_chat

DOMAINS = ("code", "prose")
PLAIN, PEER = "plain", "transformers"
WARM_UP_TOKENS = 16
PASS_REPEATS = 30  # of each single pass
FEWEST_ROWS_TIMED = 9  # passes of 1 row up to this many, or more where K asks for it


# --- Numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some measurements."""

    median: float
    low: float
    high: float

    def text(self, form: str = ".1f") -> str:
        """The median, and the range in brackets if there is one."""
        if self.low == self.high:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.low:{form}}..{self.high:{form}})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, smallest and largest of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def shown(value: Spread | float | None, form: str = ".1f") -> str:
    """A figure for people; "–" where it is undefined."""
    if value is None:
        return "–"
    return value.text(form) if isinstance(value, Spread) else format(value, form)


def milliseconds(value: Spread | float | None) -> Spread | float | None:
    if isinstance(value, Spread):
        return Spread(1e3 * value.median, 1e3 * value.low, 1e3 * value.high)
    return None if value is None else 1e3 * value


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


# --- Replies -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared: ``how`` is "plain", "K = 4" or "transformers"."""

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


Progress = Callable[[str, float | None], None]
Samples = dict[Case, list[Sample]]
Run = Callable[[Sequence[int], float, int, int], Sample]  # prompt ids, temperature, tokens, seed


def how_name(k: int) -> str:
    return f"K = {k}" if k else PLAIN


def redline(engine: Engine, k: int) -> Run:
    """Runs the engine with K = ``k``."""

    def run(ids: Sequence[int], temperature: float, max_new_tokens: int, seed: int) -> Sample:
        settings = parse_settings(
            temperature=temperature, num_draft_tokens=k, max_new_tokens=max_new_tokens, seed=seed
        )
        generation = engine.generate(ids, settings)
        rounds = tuple(generation)
        reply = generation.reply
        if reply.error:
            raise RuntimeError(reply.error)
        return Sample(
            repeat=0,
            prompt="",
            prompt_tokens=reply.prompt_tokens,
            tokens=len(reply.token_ids),
            decode_seconds=sum(round_.seconds for round_ in rounds),
            prefill_seconds=reply.prefill_seconds,
            ttft_seconds=reply.ttft_seconds,
            seconds=reply.seconds,
            rounds=rounds,
        )

    return run


class _Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when each token comes; ``generate`` first hands the prompt over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def peer(model: torch.nn.Module, end_ids: frozenset[int]) -> Run:
    """Runs transformers' ``generate``, told to sample as Redline does."""
    end = sorted(end_ids)

    def run(ids: Sequence[int], temperature: float, max_new_tokens: int, seed: int) -> Sample:
        sampling = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        prompt = torch.tensor([list(ids)])
        clock = _Clock()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            start = time.perf_counter()
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                eos_token_id=end,
                pad_token_id=end[0],
                streamer=clock,
                **sampling,
            )
            stop = time.perf_counter()
        first = clock.times[1]
        return Sample(
            repeat=0,
            prompt="",
            prompt_tokens=len(ids),
            tokens=out.shape[1] - len(ids) - 1,  # the first one came with the prompt
            decode_seconds=stop - first,
            prefill_seconds=None,
            ttft_seconds=first - start,
            seconds=stop - start,
        )

    return run


def measure(
    runs: dict[str, Run],
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    say: Progress,
) -> Samples:
    """Samples of every prompt (with its ids) at every temperature in every way, ways taking turns."""
    samples: Samples = {}
    steps = [(t, p, ids) for t in temperatures for p, ids in prompts]
    for temperature in temperatures:
        for run in runs.values():
            say("Warming up", None)
            run(prompts[0][1], temperature, min(WARM_UP_TOKENS, max_new_tokens), 0)
    for repeat in range(repeats):
        for number, (temperature, prompt, ids) in enumerate(steps):
            say("Measuring replies", (repeat * len(steps) + number) / (repeats * len(steps)))
            for how, run in runs.items():
                sample = run(ids, temperature, max_new_tokens, repeat + 1)
                case = Case(prompt.domain, temperature, how)
                samples.setdefault(case, []).append(
                    dataclasses.replace(sample, repeat=repeat, prompt=prompt.id)
                )
    return dict(sorted(samples.items(), key=lambda item: DOMAINS.index(item[0].domain)))


# --- What the replies say ----------------------------------------------------------------------------------


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
            f" (times plain at K = {best.k}: {best.measured.text('.2f')})"
        )
    return f"On {domain}, speculation " + ", and ".join(clauses) + "."


# --- Single passes -----------------------------------------------------------------------------------------


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


def _quartiles(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


@torch.inference_mode()
def time_passes(pair: Pair, ids: Sequence[int], max_rows: int, repeats: int) -> Passes:
    """Times each kind of pass ``repeats`` times (at least 2), the kinds taking turns, after ``ids``."""
    settings = parse_settings(temperature=1, num_draft_tokens=1, seed=0)
    context, last = list(ids[:-1]), ids[-1]
    cache, drafter = pair.cache, pair.drafter
    cache.length = 0
    pair.target.prefill(context, cache)
    drafter.prefill(context)

    def target(rows: int) -> None:
        cache.length = len(context)
        pair.target.logits([last] * rows, cache)

    def draft() -> None:
        drafter.rollback(len(context))
        drafter.decoder.next_logits([last], drafter.cache)

    def draft_step() -> None:
        drafter.rollback(len(context))
        drafter.draft(ids, 1, settings, lambda: 0.5)

    kinds = [lambda rows=rows: target(rows) for rows in range(1, max_rows + 1)] + [draft, draft_step]
    times: list[list[float]] = [[] for _ in kinds]
    for turn in range(repeats + 1):
        for kind, taken in zip(kinds, times, strict=True):
            start = time.perf_counter()
            kind()
            if turn:  # the first one warms up
                taken.append(time.perf_counter() - start)
    *by_rows, draft_spread, step_spread = map(_quartiles, times)
    return Passes(len(context), tuple(by_rows), draft_spread, step_spread)


# --- The machine -------------------------------------------------------------------------------------------


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def load_average() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # Windows has none
        return None


def machine() -> dict[str, object]:
    """What the figures depend on, for people and for JSON."""
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "transformers": transformers.__version__,
    }


# --- The report --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured."""

    machine: dict[str, object]
    load_start: tuple[float, float, float] | None
    load_end: tuple[float, float, float] | None
    pair: dict[str, object]
    options: Options
    samples: Samples
    speculations: tuple[Speculation, ...]
    passes: Passes

    def verdicts(self) -> list[str]:
        return [verdict(d, [s for s in self.speculations if s.case.domain == d]) for d in DOMAINS]


def _case_cells(case: Case) -> list[str]:
    return [f"{case.domain}, temperature {case.temperature:g}, {case.how}"]


def _speed_section(report: Report) -> Iterator[str]:
    has_peer = any(case.how == PEER for case in report.samples)
    rows = []
    for case, samples in report.samples.items():
        plain = report.samples[dataclasses.replace(case, how=PLAIN)]
        against = report.samples.get(dataclasses.replace(case, how=PEER))
        row = _case_cells(case) + [
            shown(spread(rates(samples))),
            shown(speedups(samples, plain), ".2f"),
            shown(statistics.mean(s.tokens for s in samples)),
        ]
        rows.append(row + ([shown(speedups(samples, against), ".2f")] if has_peer else []))
    yield "Speed: tokens/s after the prompt was read, and how many times others' in the same repeat"
    header = ["", "tokens/s", "× plain", "tokens a reply"]
    yield table(header + ([f"× {PEER}"] if has_peer else []), rows)


def _start_section(report: Report) -> Iterator[str]:
    yield "Before the first token, ms: prefill, and time to first token with it"
    yield table(
        ["", "prefill", "first token", "prompt tokens"],
        [
            _case_cells(case)
            + [
                shown(milliseconds(spread(s.prefill_seconds for s in samples)), ".0f"),
                shown(milliseconds(spread(s.ttft_seconds for s in samples)), ".0f"),
                shown(spread(float(s.prompt_tokens) for s in samples), ".0f"),
            ]
            for case, samples in report.samples.items()
        ],
    )


def _round_section(report: Report) -> Iterator[str]:
    yield "A usual round, ms (medians), and the share of decoding outside model passes"
    rows = []
    for case, samples in report.samples.items():
        rounds = all_rounds(samples)
        usual = parts(rounds, max((round_.num_draft_tokens for round_ in rounds), default=0))
        if usual:
            figures = (usual.draft, usual.target, usual.outside)
            cells = [shown(milliseconds(value), ".2f") for value in figures]
            rows.append(_case_cells(case) + cells + [shown(outside_shares(samples), ".1%")])
    yield table(["", "drafting", "target", "outside", "outside share"], rows)


def _speculation_section(report: Report) -> Iterator[str]:
    yield "Speculation: acceptance, tokens a target pass, expected (E) and measured, and the speed-up"
    yield table(
        ["", "accepted", "α", "tokens/pass", "E from a_i", "E from α", "predicted ×", "measured ×"],
        [
            _case_cells(found.case)
            + [
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


def _passes_section(report: Report) -> Iterator[str]:
    passes = report.passes
    yield f"Single passes behind {passes.context_tokens} tokens, ms: median (quartiles)"
    base = passes.target[0].median
    named = [(f"target, {rows} row{'s'[: rows > 1]}", t) for rows, t in enumerate(passes.target, 1)]
    named += [("draft model, 1 row", passes.draft), ("draft step with its draw", passes.draft_step)]
    rows = [[name, shown(milliseconds(s), ".2f"), f"{s.median / base:.2f}"] for name, s in named]
    yield table(["", "ms", "× one row"], rows)


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


def as_text(report: Report) -> str:
    """The report for people."""
    sections = (
        _machine_section,
        _speed_section,
        _speculation_section,
        _start_section,
        _round_section,
        _passes_section,
    )
    return "\n\n".join("\n".join(section(report)) for section in sections) + (
        "\n\n" + "\n".join(report.verdicts()) + "\n"
    )


def as_json(report: Report) -> dict[str, object]:
    """The report as plain data: its figures and every sample, rounds as their times and counts."""
    return {
        "machine": report.machine,
        "load_start": report.load_start,
        "load_end": report.load_end,
        "pair": report.pair,
        "options": dataclasses.asdict(report.options),
        "cases": [_case_json(case, samples, report.samples) for case, samples in report.samples.items()],
        "speculation": [dataclasses.asdict(found) for found in report.speculations],
        "passes": dataclasses.asdict(report.passes),
        "verdicts": report.verdicts(),
    }


def _case_json(case: Case, samples: Sequence[Sample], all_samples: Samples) -> dict[str, object]:
    plain = all_samples[dataclasses.replace(case, how=PLAIN)]
    against = all_samples.get(dataclasses.replace(case, how=PEER))
    figures: dict[str, Spread | None] = {
        "tokens_per_second": spread(rates(samples)),
        "times_plain": speedups(samples, plain),
        "times_transformers": speedups(samples, against) if against else None,
        "outside_share": outside_shares(samples),
        "prefill_seconds": spread(s.prefill_seconds for s in samples),
        "ttft_seconds": spread(s.ttft_seconds for s in samples),
    }
    return {
        **dataclasses.asdict(case),
        **{name: value and dataclasses.asdict(value) for name, value in figures.items()},
        "samples": [_sample_json(sample) for sample in samples],
    }


def _sample_json(sample: Sample) -> dict[str, object]:
    row = {f.name: getattr(sample, f.name) for f in dataclasses.fields(Sample) if f.name != "rounds"}
    return row | {"figures": dataclasses.asdict(summarize(sample.rounds)) if sample.rounds else None}


# --- The command -------------------------------------------------------------------------------------------


class BenchError(ValueError):
    """A measurement that cannot be made; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, checked. ``prompts`` counts those of each domain."""

    k: tuple[int, ...]
    prompts: int
    max_new_tokens: int
    repeats: int
    temperatures: tuple[float, ...]
    against: str | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.bench", description="Measure the embedded pair on this machine."
    )
    parser.add_argument("--k", action="append", metavar="N[,N]", help="draft tokens a round; repeatable (4)")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="of each domain (%(default)s)")
    parser.add_argument("--max-new-tokens", default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", nargs="+", default=["0", "0.8"], metavar="X", help="(0 0.8)")
    parser.add_argument("--against", choices=[PEER], help="measure this peer, too, on the same weights")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="(%(default)s)")
    return parser


def parse_options(given: argparse.Namespace) -> Options:
    """Raises SettingsError or BenchError with one sentence."""
    texts = [text for item in given.k or ["4"] for text in item.split(",")]
    lengths = dict.fromkeys(parse_settings(num_draft_tokens=text).num_draft_tokens for text in texts)
    if 0 in lengths:
        raise BenchError(f"K must be 1 to {MAX_DRAFT_TOKENS}: plain decoding is always measured.")
    if given.repeats < 1:
        raise BenchError(f"The number of repeats must be 1 or more, not {given.repeats}.")
    choose_prompts(given.prompts)
    return Options(
        k=tuple(lengths),
        prompts=given.prompts,
        max_new_tokens=parse_settings(max_new_tokens=given.max_new_tokens).max_new_tokens,
        repeats=given.repeats,
        temperatures=tuple(
            dict.fromkeys(parse_settings(temperature=text).temperature for text in given.temperature)
        ),
        against=given.against,
    )


def choose_prompts(count: int) -> list[Prompt]:
    """The suite's first ``count`` prompts of each domain. Raises BenchError."""
    suite = load_prompts()
    of_domain = [[prompt for prompt in suite if prompt.domain == domain] for domain in DOMAINS]
    most = min(map(len, of_domain))
    if not 1 <= count <= most:
        raise BenchError(f"The number of prompts must be 1 to {most}, not {count}.")
    return [prompt for prompts in of_domain for prompt in prompts[:count]]


def peer_model(say: Progress) -> torch.nn.Module:
    """The target's weights as transformers runs them, in bfloat16. Raises LoadError."""
    folder = prepare_embedded(say)
    say("Reading the same weights with transformers", None)
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def bench(options: Options, pair: Pair, say: Progress) -> Report:
    """Measures all that ``options`` ask for. Raises LoadError."""
    load_start = load_average()
    prompts = [
        (prompt, encode_chat(pair.tokenizer, [{"role": "user", "content": prompt.prompt}]))
        for prompt in choose_prompts(options.prompts)
    ]
    engine = Engine(pair)
    runs = {how_name(k): redline(engine, k) for k in (0, *options.k)}
    if options.against == PEER:
        runs[PEER] = peer(peer_model(say), pair.end_ids)
    samples = measure(runs, prompts, options.temperatures, options.max_new_tokens, options.repeats, say)
    say("Timing single passes", None)
    max_rows = max(FEWEST_ROWS_TIMED, max(options.k) + 1)
    passes = time_passes(pair, prompts[0][1], max_rows, PASS_REPEATS)
    return Report(
        machine=machine(),
        load_start=load_start,
        load_end=load_average(),
        pair=dataclasses.asdict(pair.info),
        options=options,
        samples=samples,
        speculations=tuple(
            speculation(samples, Case(domain, temperature, how_name(k)), k)
            for domain in DOMAINS
            for temperature in options.temperatures
            for k in options.k
        ),
        passes=passes,
    )


def main(arguments: Sequence[str] | None = None, load: Callable[..., Pair] = load_embedded) -> int:
    """The command; returns its exit status, 2 where nothing could be measured. ``load`` gives the pair."""
    given = _parser().parse_args(arguments)
    say = progress_printer(sys.stderr)
    try:
        options = parse_options(given)
        report = bench(options, load(say), say)
        say("", None)
        sys.stdout.reconfigure(encoding="utf-8")
        print(as_text(report), end="")
        if given.json:
            text = json.dumps(as_json(report), indent=1, ensure_ascii=False, allow_nan=False)
            Path(given.json).write_text(text + "\n", encoding="utf-8")
    except (BenchError, SettingsError, LoadError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{given.json} cannot be written: {(error.strerror or str(error)).lower()}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
