"""Measures the embedded pair on this machine: does the draft pay off, and where does the time go?

    python -m core.bench [--k 3]... [--prompts 3] [--max-new-tokens 128] [--repeats 3] [--temperature 0 0.8]
        [--against transformers] [--conversation 3000] [--json FILE]

Runs code and prose prompts of ``data/prompts`` plainly, with each K, and with the peer (alone, and with the
same draft at K = 2, 4 and 8: ``core.bench_peer``), one after the other within every repeat, so that a
disturbance of the machine meets them alike; everything is warmed up first.
Prints medians over the repeats with their range, ratios taken within a repeat, the acceptance figures, the
time outside model passes, single passes by number of rows, predicted and measured speed-up, and a sentence
that says whether speculation pays off. ``--json`` writes the same figures, and those of every reply.

Tokens per second are after the prompt was read: all of Redline's rounds; of transformers, which says only
when tokens come, everything from the first token to the end. Load averages at start and end are printed
because machines are shared; they cannot tell this program's own load from others', so read ratios rather
than speeds.

Reports, and judges no speed. What the figures are and how they are told is in ``core.bench_report``. Does not
know the page, the record or other pairs, and does not check that replies are right: tests do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from core.bench_report import (
    ASSISTED_K,
    DOMAINS,
    PEER,
    Case,
    FollowUp,
    Options,
    Passes,
    Report,
    Sample,
    Samples,
    Spread,
    as_json,
    as_text,
    assisted_name,
    how_name,
    spread,
)
from core.chat import encode_chat
from core.engine import Engine
from core.models import Progress
from core.models.embedded import DRAFT_FILE, load_embedded, prepare_embedded
from core.models.errors import LoadError
from core.models.pair import Pair
from core.prompts import Prompt, load_prompts
from core.records import Reply, Settings
from core.settings import MAX_DRAFT_TOKENS, SettingsError, parse_settings
from core.terminal import progress_printer

USUAL_K = str(Settings().num_draft_tokens)
WARM_UP_TOKENS = 16
PASS_REPEATS = 30  # of each single pass
FEWEST_ROWS_TIMED = 9  # passes of 1 row up to this many, or more where K asks for it


# --- Replies -----------------------------------------------------------------------------------------------


# Prompt, its ids, temperature, tokens at most, repeat. The repeat is the seed, too.
Run = Callable[[Prompt, Sequence[int], float, int, int], Sample]


def redline(engine: Engine, k: int) -> Run:
    """Runs the engine with K = ``k``."""

    def run(
        prompt: Prompt, ids: Sequence[int], temperature: float, max_new_tokens: int, repeat: int
    ) -> Sample:
        settings = parse_settings(
            temperature=temperature, num_draft_tokens=k, max_new_tokens=max_new_tokens, seed=repeat
        )
        generation = engine.generate(ids, settings)
        rounds = tuple(generation)
        reply = generation.reply
        if reply.error:
            raise RuntimeError(reply.error)
        return Sample(
            repeat=repeat,
            prompt=prompt.id,
            prompt_tokens=reply.prompt_tokens,
            tokens=len(reply.token_ids),
            decode_seconds=sum(round_.seconds for round_ in rounds),
            prefill_seconds=reply.prefill_seconds,
            ttft_seconds=reply.ttft_seconds,
            seconds=reply.seconds,
            rounds=rounds,
        )

    return run


def peer(generate: Callable[..., dict[str, float]], end_ids: frozenset[int], **assistance: object) -> Run:
    """Runs the peer (``core.bench_peer.generate`` of a model), told to sample as Redline does."""

    def run(
        prompt: Prompt, ids: Sequence[int], temperature: float, max_new_tokens: int, repeat: int
    ) -> Sample:
        times = generate(ids, end_ids, temperature, max_new_tokens, repeat, **assistance)
        return Sample(repeat=repeat, prompt=prompt.id, prompt_tokens=len(ids), prefill_seconds=None, **times)

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
            run(*prompts[0], temperature, min(WARM_UP_TOKENS, max_new_tokens), 0)
    for repeat in range(1, repeats + 1):
        for number, (temperature, prompt, ids) in enumerate(steps):
            say("Measuring replies", ((repeat - 1) * len(steps) + number) / (repeats * len(steps)))
            for how, run in runs.items():
                sample = run(prompt, ids, temperature, max_new_tokens, repeat)
                samples.setdefault(Case(prompt.domain, temperature, how), []).append(sample)
    return dict(sorted(samples.items(), key=lambda item: DOMAINS.index(item[0].domain)))


# --- Single passes -----------------------------------------------------------------------------------------


def _quartiles(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


@torch.inference_mode()
def time_passes(pair: Pair, ids: Sequence[int], max_rows: int, repeats: int) -> Passes:
    """Times each kind of pass ``repeats`` times (at least 2), the kinds taking turns, after ``ids``."""
    settings = parse_settings(temperature=1, num_draft_tokens=1, seed=0)
    context, last = list(ids[:-1]), ids[-1]
    drafter = pair.drafter
    cache, state = pair.target.new_cache(), drafter.new_state()
    pair.target.prefill(context, cache)
    drafter.prefill(context, state)

    def target(rows: int) -> None:
        cache.crop(len(context))
        pair.target.logits([last] * rows, cache)

    def draft() -> None:
        state.crop(len(context))
        drafter.model.next_logits([last], state)

    def draft_step() -> None:
        state.crop(len(context))
        drafter.draft(ids, 1, settings, lambda: 0.5, state)

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


def conversation(tokenizer: object, tokens: int) -> list[dict[str, str]]:
    """The suite's prompts, each asked and repeated, and a last question: at least ``tokens`` ids."""
    question = {"role": "user", "content": "Go on, please."}
    messages: list[dict[str, str]] = []
    for prompt in itertools.cycle(load_prompts()):
        if len(encode_chat(tokenizer, [*messages, question])) >= tokens:
            break
        messages += [{"role": role, "content": prompt.prompt} for role in ("user", "assistant")]
    return [*messages, question]


def time_follow_up(pair: Pair, tokens: int, repeats: int) -> FollowUp:
    """Time to first token of a question after a conversation of ``tokens`` ids: its caches kept, and cold."""
    settings = parse_settings(temperature=0, max_new_tokens=8, seed=0)

    def reply(engine: Engine, messages: list[dict[str, str]]) -> Reply:
        generation = engine.generate(encode_chat(pair.tokenizer, messages), settings)
        for _ in generation:
            pass
        return generation.reply

    told = conversation(pair.tokenizer, tokens)
    warm, cold = [], []
    for _ in range(repeats):
        engine = Engine(pair)
        before = reply(engine, told)
        asked = [*told, {"role": "assistant", "content": before.visible_text}]
        asked.append({"role": "user", "content": "Thank you. And what else comes to your mind about that?"})
        warm.append(reply(engine, asked))
        cold.append(reply(Engine(pair), asked))
    return FollowUp(
        prompt_tokens=warm[0].prompt_tokens,
        new_tokens=warm[0].prompt_tokens - warm[0].reused_tokens,
        cold_seconds=spread(r.ttft_seconds for r in cold),
        warm_seconds=spread(r.ttft_seconds for r in warm),
        share=spread(w.ttft_seconds / c.ttft_seconds for w, c in zip(warm, cold, strict=True)),
    )


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


# --- The command -------------------------------------------------------------------------------------------


class BenchError(ValueError):
    """A measurement that cannot be made, or kept; the message is one sentence."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.bench", description="Measure the embedded pair on this machine."
    )
    parser.add_argument(
        "--k", action="append", metavar="N[,N]", help=f"draft tokens a round; repeatable ({USUAL_K})"
    )
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="of each domain (%(default)s)")
    parser.add_argument("--max-new-tokens", default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", nargs="+", default=["0", "0.8"], metavar="X", help="(0 0.8)")
    parser.add_argument("--against", choices=[PEER], help="measure this peer, too, on the same weights")
    parser.add_argument(
        "--conversation",
        type=int,
        default=0,
        metavar="TOKENS",
        help="also time a follow-up to a conversation this long, its caches kept and cold",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    return parser


def parse_options(given: argparse.Namespace) -> Options:
    """Raises SettingsError or BenchError with one sentence."""
    texts = [text for item in given.k or [USUAL_K] for text in item.split(",")]
    lengths = dict.fromkeys(parse_settings(num_draft_tokens=text).num_draft_tokens for text in texts)
    if 0 in lengths:
        raise BenchError(f"K must be 1 to {MAX_DRAFT_TOKENS}: plain decoding is always measured.")
    if given.repeats < 1:
        raise BenchError(f"The number of repeats must be 1 or more, not {given.repeats}.")
    if given.conversation < 0:
        raise BenchError(f"The conversation must be 0 or more tokens long, not {given.conversation}.")
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
        conversation=given.conversation,
    )


def choose_prompts(count: int) -> list[Prompt]:
    """The suite's first ``count`` prompts of each domain. Raises BenchError."""
    suite = load_prompts()
    of_domain = [[prompt for prompt in suite if prompt.domain == domain] for domain in DOMAINS]
    most = min(map(len, of_domain))
    if not 1 <= count <= most:
        raise BenchError(f"The number of prompts must be 1 to {most}, not {count}.")
    return [prompt for prompts in of_domain for prompt in prompts[:count]]


def peer_runs(pair: Pair, say: Progress) -> dict[str, Run]:
    """The same target in transformers, alone and with the same draft at each K. Raises LoadError."""
    from core import bench_peer

    folder = prepare_embedded(say)
    say("Reading the same weights with transformers", None)
    model = bench_peer.target_model(folder)
    assistant = bench_peer.assistant_model(model, DRAFT_FILE)
    generate = functools.partial(bench_peer.generate, model)
    return {PEER: peer(generate, pair.end_ids)} | {
        assisted_name(k): peer(generate, pair.end_ids, assistant=assistant, num_draft_tokens=k)
        for k in ASSISTED_K
    }


def bench(options: Options, pair: Pair, say: Progress) -> Report:
    """Measures all that ``options`` ask for. Raises LoadError."""
    load_start = load_average()
    prompts = [
        (prompt, encode_chat(pair.tokenizer, [{"role": "user", "content": prompt.prompt}]))
        for prompt in choose_prompts(options.prompts)
    ]
    engine = Engine(pair, cache_bytes=0)  # every prompt is read anew, as the peer reads it
    runs = {how_name(k): redline(engine, k) for k in (0, *options.k)}
    if options.against == PEER:
        runs |= peer_runs(pair, say)
    samples = measure(runs, prompts, options.temperatures, options.max_new_tokens, options.repeats, say)
    say("Timing single passes", None)
    max_rows = max(FEWEST_ROWS_TIMED, max(options.k) + 1)
    passes = time_passes(pair, prompts[0][1], max_rows, PASS_REPEATS)
    follow_up = None
    if options.conversation:
        say("Timing a follow-up", None)
        follow_up = time_follow_up(pair, options.conversation, options.repeats)
    return Report(
        machine=machine(),
        load_start=load_start,
        load_end=load_average(),
        pair=dataclasses.asdict(pair.info),
        options=options,
        samples=samples,
        passes=passes,
        follow_up=follow_up,
    )


def write_json(report: Report, path: str) -> None:
    """Raises BenchError."""
    text = json.dumps(as_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.") from error


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
            write_json(report, given.json)
    except (BenchError, SettingsError, LoadError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
