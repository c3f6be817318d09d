"""Measures a pair on this machine: does the draft pay off, where does the time go, how far is the limit?

    python -m core.bench [--pair NAME | --target MODEL --draft MODEL] [--device cpu|cuda]
        [--k 3,auto] [--verifier token,block] [--prompts 3] [--max-new-tokens 128] [--repeats 3]
        [--temperature 0 0.8] [--against transformers,llama.cpp,flashspec]
        [--conversation TOKENS] [--session REPLIES] [--json FILE]
    python -m core.bench --device cuda --synthetic [--json FILE]
    python -m core.bench --device cuda --roofline CARD [--pair NAME]

Runs code and prose prompts of ``data/prompts`` plainly, with each K and verifier, and with the peers on the
same weights: transformers alone and with the same draft at K = 2, 4 and 8, llama.cpp on the same GGUF file,
flashspec on transformers' models (``core.bench.with_transformers``, ``core.bench.llama_cpp``,
``core.bench.with_flashspec``). They take turns within every repeat, so that a disturbance of the machine
meets them alike.

Prints medians over the repeats with their range, ratios taken within a repeat, acceptance, the K that was
chosen automatically, both verifiers side by side, the time outside model passes, single passes by number of
rows, how much of a pass the reading of the weights takes at the speed of this machine's memory, predicted and
measured speed-up, and a sentence that says whether speculation pays off. ``--json`` writes the same figures,
and those of every reply.

Tokens per second are after the prompt was read: all of Redline's rounds; of a peer, which says only when
tokens come, everything from the first token to the end. Load averages at start and end are printed because
machines are shared; they cannot tell this program's own load from others', so read ratios rather than speeds.

``--synthetic`` measures a large pair of random weights on a card instead, without downloads
(``core.bench.synthetic``). ``--roofline`` estimates what a card that is not here would reach
(``core.bench.roofline_table``). Reports, and judges no speed; does not check that replies are right: tests
do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.bench import roofline_table as bench_roofline
from core.bench import synthetic as bench_synthetic
from core.bench.cards import CardError
from core.bench.machine import load_average, machine, measure_limit
from core.bench.measured import AUTO, DOMAINS, PEERS, Options, Way
from core.bench.report import Report, as_json, as_text
from core.bench.run import (
    BenchError,
    check_follow_up,
    check_installed,
    hold_session,
    measure,
    peer_runs,
    redline,
    time_follow_up,
    time_passes,
    usable,
    warm_up,
)
from core.engine.calibration import measure_again
from core.engine.loop import Engine
from core.machine.heartbeat import heard
from core.machine.progress import Progress
from core.models.errors import LoadError
from core.models.sources import SpecError
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.load import load_pair
from core.pairs.pair import Pair
from core.pairs.spec import PairSpec, embedded_spec
from core.records import Settings
from core.settings import MAX_DRAFT_TOKENS, VERIFIERS, SettingsError, parse_settings
from core.text.chat import encode_chat
from core.text.prompts import Prompt, load_prompts
from core.text.terminal import printable, progress_printer, put_out, use_utf8

USUAL_K = str(Settings().num_draft_tokens)
PASS_REPEATS = 30  # of each single pass
FEWEST_ROWS_TIMED = 9  # passes of 1 row up to this many, or more where K asks for it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.bench", description="Measure a pair on this machine."
    )
    parser.add_argument(
        "--k",
        action="append",
        metavar="N[,N]",
        help=f"draft tokens a round, numbers or {AUTO}; repeatable ({USUAL_K})",
    )
    parser.add_argument(
        "--verifier",
        action="append",
        metavar="NAME[,NAME]",
        help=f"{' or '.join(VERIFIERS)} ({VERIFIERS[0]})",
    )
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="of each domain (%(default)s)")
    parser.add_argument("--max-new-tokens", default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", nargs="+", default=["0", "0.8"], metavar="X", help="(0 0.8)")
    parser.add_argument(
        "--against",
        action="append",
        metavar="PEER[,PEER]",
        help=f"measure these, too, on the same weights: {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--conversation",
        type=int,
        default=0,
        metavar="TOKENS",
        help="also time a follow-up to a conversation this long, its caches kept and cold",
    )
    parser.add_argument(
        "--session",
        type=int,
        default=0,
        metavar="REPLIES",
        help="also hold a session of so many short replies and see how memory grows",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    parser.add_argument(
        "--synthetic",
        action="store_true",
        help="instead, a 7B-shaped pair of random weights on a CUDA card (of the flags only --json counts)",
    )
    bench_roofline.add_arguments(parser)
    add_pair_arguments(parser)
    return parser


def parse_options(given: argparse.Namespace) -> Options:
    """Raises SettingsError or BenchError with one sentence."""
    lengths = _list(given.k) or [USUAL_K]
    k = tuple(dict.fromkeys(AUTO if text == AUTO else _length(text) for text in lengths))
    verifiers = _list(given.verifier) or VERIFIERS[:1]
    for verifier in verifiers:
        parse_settings(verifier=verifier)
    against = tuple(dict.fromkeys(_list(given.against)))
    for name in against:
        if name not in PEERS:
            raise BenchError(f"--against must be one of {', '.join(PEERS)}, not {name!r}.")
    if given.repeats < 1:
        raise BenchError(f"The number of repeats must be 1 or more, not {given.repeats}.")
    for what in ("conversation", "session"):
        if getattr(given, what) < 0:
            raise BenchError(f"The length of the {what} must be 0 or more, not {getattr(given, what)}.")
    choose_prompts(given.prompts)
    return Options(
        k=k,
        prompts=given.prompts,
        max_new_tokens=parse_settings(max_new_tokens=given.max_new_tokens).max_new_tokens,
        repeats=given.repeats,
        temperatures=tuple(
            dict.fromkeys(parse_settings(temperature=text).temperature for text in given.temperature)
        ),
        verifiers=tuple(dict.fromkeys(verifiers)),
        against=against,
        conversation=given.conversation,
        session=given.session,
    )


def _list(given: Sequence[str] | None) -> list[str]:
    """The words of flags that were repeated, or hold several with commas between."""
    return [text.strip() for item in given or () for text in item.split(",")]


def _length(text: str) -> int:
    k = parse_settings(num_draft_tokens=text).num_draft_tokens
    if k == 0:
        raise BenchError(f"K must be 1 to {MAX_DRAFT_TOKENS} or {AUTO}: plain decoding is always measured.")
    return k


def choose_prompts(count: int) -> list[Prompt]:
    """The suite's first ``count`` prompts of each domain. Raises BenchError."""
    suite = load_prompts()
    of_domain = [[prompt for prompt in suite if prompt.domain == domain] for domain in DOMAINS]
    most = min(map(len, of_domain))
    if not 1 <= count <= most:
        raise BenchError(f"The number of prompts must be 1 to {most}, not {count}.")
    return [prompt for prompts in of_domain for prompt in prompts[:count]]


def bench(options: Options, pair: Pair, spec: PairSpec, say: Progress) -> Report:
    """Measures all that ``options`` ask for of the pair that ``spec`` named. Raises LoadError."""
    load_start = load_average()
    if options.conversation:
        check_follow_up(pair, options.conversation)  # before anything is measured that would be lost
    prompts = [
        (prompt, encode_chat(pair.tokenizer, [{"role": "user", "content": prompt.prompt}]))
        for prompt in choose_prompts(options.prompts)
    ]
    ways = tuple(options.ways) if pair.drafter else ()  # without a draft every way is plain
    if any(way.auto for way in ways):
        say("Measuring what passes cost", None)  # anew: what is kept may be of a busier moment
        pair = dataclasses.replace(pair, costs=measure_again(pair, say))
    engine = Engine(pair, cache_bytes=0)  # every prompt is read anew, as the peers read it
    runs = {way.name: redline(engine, way) for way in (Way(0), *ways)}
    context = max(len(ids) for _, ids in prompts) + options.max_new_tokens + MAX_DRAFT_TOKENS
    others, notes = peer_runs(options.against, pair, spec, context, say)
    warm_up(runs, prompts[0], options, say)
    others, failed = usable(others, prompts[0], options, say)
    samples = measure(runs | others, prompts, options, say)
    say("Timing single passes", None)
    max_rows = max(FEWEST_ROWS_TIMED, *(way.k + 1 for way in ways), 1)
    passes = time_passes(pair, prompts[0][1], max_rows, PASS_REPEATS)
    say("Measuring how fast memory is read", None)
    limit = measure_limit(pair)
    follow_up = session = None
    if options.conversation:
        say("Timing a follow-up", None)
        follow_up = time_follow_up(pair, options.conversation, options.repeats)
    if options.session:
        session = hold_session(pair, options.session, say)
    return Report(
        machine=machine(pair.info.device),
        load_start=load_start,
        load_end=load_average(),
        pair=dataclasses.asdict(pair.info),
        options=options,
        ways=ways,
        samples=samples,
        passes=passes,
        limit=limit,
        follow_up=follow_up,
        session=session,
        notes=(*notes, *failed),
        costs=pair.costs,
    )


def write_json(report: Report, path: str) -> None:
    """Raises BenchError."""
    text = json.dumps(as_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def _estimate(given: argparse.Namespace) -> int:
    """The run of ``--roofline``; its exit status."""
    try:
        if given.target or given.draft:
            raise bench_roofline.RooflineError(
                "An estimate is of a pair of the catalogue: choose one with --pair in place of --target."
            )
        found = bench_roofline.run(given.roofline, given.pair, given.quantize, given.alpha, given.host_speed)
    except (CardError, bench_roofline.RooflineError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    return put_out(found)


def main(
    arguments: Sequence[str] | None = None, load: Callable[[PairSpec, Progress], Pair] = load_pair
) -> int:
    """The command; returns its exit status. ``load`` gives the pair.

    2 where nothing could be measured or the JSON not be written, else that of ``core.text.terminal.put_out``.
    """
    given = _parser().parse_args(arguments)
    use_utf8()
    if given.synthetic:
        return bench_synthetic.run("cuda", json=given.json)
    if given.roofline is not None:
        return _estimate(given)
    try:
        options = parse_options(given)
        spec = pair_spec(given, os.environ) or embedded_spec()
        check_installed(options.against)
        with heard(progress_printer(sys.stderr)) as say:
            report = bench(options, load(spec, say), spec, say)
            say("", None)
    except (BenchError, SettingsError, SpecError, LoadError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    kept = 0
    if given.json:
        try:
            write_json(report, given.json)
        except BenchError as error:
            print(printable(str(error)), file=sys.stderr)
            kept = 2
    return put_out(as_text(report).rstrip("\n")) or kept


if __name__ == "__main__":
    sys.exit(main())
