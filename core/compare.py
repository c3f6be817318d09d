"""Drafters side by side: the same prompts, the same target, one run, every figure with its interval.

    python -m core.compare [--drafters model,ngram,...] [--prompts 4] [--k 3] [--temperature 0.7]
        [--tree-width 1] [--max-new-tokens 64] [--seed 1] [--json FILE] [--db FILE | --no-record]
        [--pair NAME | --target MODEL [--draft MODEL]] ...

Without ``--drafters`` all that the pair offers take part; plain decoding always does, as what the others are
held against. Replies are written one at a time, and the drafters take turns on every prompt in an order that
rotates, so that a slow minute of the machine meets all alike. Each drafter writes a short reply first that
does not count. The run is kept in the database and shown on the page under Drafters. Ctrl-C ends it after the
round in flight and keeps what was measured.

Knows no page. The figures and the record are ``core.record.compared``'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.models.errors import LoadError
from core.models.sources import SpecError
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import embedded_spec
from core.record.compared import (
    DOMAINS,
    PLAIN,
    SPEEDUP,
    Compared,
    Comparison,
    Row,
    flat,
    new_comparison,
    sums_of,
    table,
    with_replies,
)
from core.records import Settings
from core.settings import SettingsError, parse_integer, parse_settings
from core.text.chat import encode_chat
from core.text.detokenise import PromptError
from core.text.prompts import Prompt, load_prompts
from core.text.terminal import printable, progress_printer, put_out, use_utf8

if TYPE_CHECKING:
    from core.engine.loop import Engine

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
GIVE_WAY_SECONDS = 0.01  # before each reply, so that whoever waits for the engine has it first
MAX_PROMPTS = 20  # the alternating beginning of the suite


class CompareError(ValueError):
    """A comparison that cannot be made; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far a comparison is: ``done`` of ``total`` replies, what runs ``now``, and all so far.

    ``problems`` are sentences about drafters that could not take part and replies that failed.
    """

    done: int
    total: int
    now: str
    comparison: Comparison
    problems: tuple[str, ...]


def prompts_for(count: object) -> list[Prompt]:
    """The first ``count`` prompts of the suite of code and as many of prose. Raises CompareError."""
    try:
        number = parse_integer("Prompts of each kind", count, 1, MAX_PROMPTS // 2)
    except SettingsError as error:
        raise CompareError(str(error)) from None
    suite = load_prompts()
    chosen = [[p for p in suite if p.domain == domain][:number] for domain in DOMAINS]
    return [prompt for prompts in zip(*chosen, strict=True) for prompt in prompts]


def compare(
    engine: Engine,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    settings: Settings,
    cancel: threading.Event | None = None,
) -> Iterator[Step]:
    """Runs the comparison, a step before every reply and one at the end.

    ``drafters`` are of ``Pair.drafters``; plain is added. The engine's lock is taken for a reply at a time,
    so other people's replies may come between. Set ``cancel`` and the run ends after the round in flight; a
    reply that was not finished does not count. Raises CompareError where nothing is to be compared: no
    drafter of this pair's is named, no prompt is given, or K is 0.
    """
    cancel = cancel or threading.Event()
    pair = engine.pair
    names = [name for name in dict.fromkeys([PLAIN, *drafters]) if name in pair.drafters]
    if len(names) < 2:
        offered = ", ".join(name for name in pair.drafters if name != PLAIN)
        raise CompareError(f"Choose at least one drafter to compare with plain decoding: {offered}.")
    if not settings.num_draft_tokens:
        raise CompareError("With K = 0 nothing is drafted: choose at least one draft token to compare.")
    comparison = new_comparison(pair.info.pair, pair.info.target, settings, len(prompts))
    replies: list[Compared] = []
    problems: list[str] = []
    total = len(names) * len(prompts)

    def step(now: str) -> Step:
        complete = len(replies) == total
        return Step(done, total, now, with_replies(comparison, replies, complete), tuple(problems))

    done = 0
    for name in list(names):
        yield step(f"making {name} ready")
        if cancel.is_set():
            break
        try:
            _reply(engine, name, prompts[0], replace(settings, max_new_tokens=WARM_UP_TOKENS), cancel)
        except (LoadError, PromptError, CompareError) as error:
            problems.append(str(error))
            names.remove(name)
            total = len(names) * len(prompts)
    if names == [PLAIN] and not cancel.is_set():
        raise CompareError(" ".join(("None of the chosen drafters can be used.", *problems)))
    order = [
        (number, prompt, names[(number + turn) % len(names)])
        for number, prompt in enumerate(prompts)
        for turn in range(len(names))
    ]
    for number, prompt, name in order:
        now = f"{name}, {prompt.domain}, prompt {number + 1} of {len(prompts)}"
        time.sleep(GIVE_WAY_SECONDS)
        yield step(f"{now}, after the reply that is being written" if engine.busy else now)
        if cancel.is_set():
            break
        try:
            if (found := _reply(engine, name, prompt, settings, cancel)) is not None:
                replies.append(found)
                done += 1
        except CompareError as error:
            problems.append(str(error))
            done += 1
    yield step("done" if done == total else "cancelled")


def _reply(
    engine: Engine, name: str, prompt: Prompt, settings: Settings, cancel: threading.Event
) -> Compared | None:
    """One reply; None where it was cancelled. Raises CompareError where it ended with an error."""
    pair = engine.pair.drafting(name)
    if name == PLAIN:
        settings = replace(settings, num_draft_tokens=0)
    ids = encode_chat(pair.tokenizer, [{"role": "user", "content": prompt.prompt}])
    generation = engine.generate(ids, settings, cancel=cancel, drafter=name)
    with contextlib.closing(generation):
        rounds = list(generation)
    if generation.reply.finish_reason == "cancelled":
        return None
    if generation.reply.finish_reason == "error":
        raise CompareError(f"{name}, {prompt.domain}: {generation.reply.error}")
    draft = "" if name == PLAIN else pair.info.draft
    return Compared(name, draft, prompt.domain, prompt.id, sums_of(rounds))


# --- The command -------------------------------------------------------------------------------------------

_COLUMNS = (
    ("alpha", "α", ".3f", 1),
    ("draft_acceptance_rate", "accepted", ".1%", 1),
    ("tokens_per_pass", "per pass", ".2f", 1),
    ("seconds_per_round", "draft ms a round", ".1f", 1e3),
    ("seconds_per_draft", "a drafted token", ".2f", 1e3),
    ("tokens_per_second", "tokens/s", ".1f", 1),
    (SPEEDUP, "× plain", ".2f", 1),
)


def report(comparison: Comparison) -> str:
    """The table for a terminal, a line for each drafter and domain."""
    lines = [f"{'':18}" + "".join(f"{title:>22}" for _, title, _, _ in _COLUMNS)]
    for row in sorted(table(comparison), key=lambda row: DOMAINS.index(row.domain)):
        cells = "".join(f"{_cell(row, name, form, scale):>22}" for name, _, form, scale in _COLUMNS)
        lines.append(f"{row.domain + ', ' + row.drafter:18}{cells}")
    if not comparison.settings.exact:
        lines.append(f"NOT EXACT: judged by {comparison.settings.verifier}, which changes the text.")
    return "\n".join(lines)


def _cell(row: Row, name: str, form: str, scale: float) -> str:
    estimate = row.figures[name]
    if estimate.value is None:
        return "–"
    text = format(estimate.value * scale, form)
    if estimate.interval:
        low, high = (format(end * scale, form) for end in estimate.interval)
        text += f" [{low}, {high}]"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.compare", description="Compare ways to draft.")
    usual = Settings()
    parser.add_argument("--drafters", metavar="NAMES", help="comma-separated (all that the pair offers)")
    parser.add_argument("--prompts", default=4, metavar="N", help="of code, and of prose (%(default)s)")
    parser.add_argument("--k", default=usual.num_draft_tokens, metavar="N", help="draft tokens (%(default)s)")
    parser.add_argument("--temperature", default=usual.temperature, metavar="X", help="(%(default)s)")
    parser.add_argument("--tree-width", default=1, metavar="N", help="1 is a chain (%(default)s)")
    parser.add_argument("--verifier", default=usual.verifier, metavar="NAME", help="(%(default)s)")
    parser.add_argument("--threshold", metavar="X", help="of a rule that is not exact")
    parser.add_argument("--max-new-tokens", default=64, metavar="N", help="a reply (%(default)s)")
    parser.add_argument("--seed", default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the table there")
    parser.add_argument("--db", metavar="FILE", help="the record (REDLINE_DB, or data/redline.db)")
    parser.add_argument("--no-record", action="store_true", help="keep nothing in the database")
    add_pair_arguments(parser)
    given = parser.parse_args(arguments)
    use_utf8()
    say = progress_printer(sys.stderr)
    try:
        settings = parse_settings(
            temperature=given.temperature,
            num_draft_tokens=given.k,
            tree_width=given.tree_width,
            verifier=given.verifier,
            acceptance_threshold=given.threshold,
            max_new_tokens=given.max_new_tokens,
            seed=given.seed,
        )
        prompts = prompts_for(given.prompts)
        from core.engine.loop import Engine
        from core.pairs.load import load_pair

        pair = load_pair(pair_spec(given, os.environ) or embedded_spec(), say)
        names = [name.strip() for name in given.drafters.split(",")] if given.drafters else pair.drafters
        for name in names:
            if name not in pair.drafters:
                pair.drafting(name)  # says which there are
        last = _measured(Engine(pair), names, prompts, settings, say)
    except (SettingsError, SpecError, LoadError, PromptError, CompareError) as error:
        say("", None)
        print(printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("", None)
        return 130
    # Kept first: what was measured must not hang on whoever reads what is said.
    kept = given.no_record or not last.comparison.replies or _recorded(last.comparison, given.db)
    written = given.json is None or _written(last.comparison, given.json)
    for problem in last.problems:
        print(printable(problem), file=sys.stderr)
    said = put_out(report(last.comparison))
    return 130 if last.now == "cancelled" else said if kept and written else 1


def _measured(
    engine: Engine,
    drafters: Sequence[str],
    prompts: Sequence[Prompt],
    settings: Settings,
    say: Callable[[str, float | None], None],
) -> Step:
    """The last step of a comparison that Ctrl-C ends after the round in flight."""
    cancel = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: cancel.set())
    try:
        for last in compare(engine, drafters, prompts, settings, cancel):
            say(last.now, last.done / max(last.total, 1))
    finally:
        signal.signal(signal.SIGINT, before)
    say("", None)
    return last


def _recorded(comparison: Comparison, db: str | None) -> bool:
    from core.record.store import Store

    with contextlib.closing(Store(db)) as store:
        store.add_comparison(comparison)
        if store.problem:
            print(printable(store.problem), file=sys.stderr)
        return store.problem is None


def _written(comparison: Comparison, path: Path) -> bool:
    try:
        path.write_text(json.dumps(flat(comparison), indent=1), encoding="utf-8")
    except OSError as error:
        print(printable(f"{path} cannot be written ({error.strerror})."), file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
