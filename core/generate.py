"""The terminal twin: one reply of a pair, streamed, by the same engine call the page makes.

    python -m core.generate --prompt TEXT [--system TEXT] [--messages FILE] [--k 3 | --k auto]
        [--drafter NAME] [--tree-width N] [--verifier token] [--threshold X]
        [--temperature 0.7] [--top-k N] [--top-p X] [--min-p X]
        [--repetition-penalty X] [--seed 1] [--max-new-tokens 128]
        [--stop TEXT]... [--domain auto] [--show-discarded] [--json]
        [--pair NAME | --target MODEL [--draft MODEL]] [--quantize FORM] [--draft-quantize FORM]
        [--device NAME] [--dtype NAME]

The last two lines choose the pair as ``app.py`` does (``core.pairs.flags``); without them, and without the
variables that stand for them, it is the embedded one. What is missing of a pair is downloaded without asking.

``--k auto`` chooses K before each round, by what passes cost on this machine (``core.engine.calibration``,
measured once) and by the reply's own acceptance; on a card that is what happens without ``--k``. ``--verifier
block`` judges a round's drafts together. ``--drafter`` chooses another way to draft than the pair's own
(``core.drafters.names``).

On a terminal every token shows its fate (``core.text.terminal``; ``NO_COLOR`` is respected); a file or a pipe
gets the reply's text. ``--json`` prints one JSON object a line: each round (``"type": "round"``), then the
reply (``"type": "reply"``), with the field names of ``core.records`` and ``core.figures.metrics``, which are
the database's; undefined figures are null. Progress, notes on the pair, legend and figures go to standard
error.

Exit status: 0; 1 if the reply ended with an error or cannot be written; 2 for input that cannot be used, with
one sentence; 130 after Ctrl-C, which ends the reply after the round in flight and keeps what was said; 141 if
the reader of standard output went away. Knows no page and no database.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.drafters.names import DRAFTERS, TREE_DRAFTERS
from core.engine.auto_k import MOST
from core.figures.metrics import Figures, summarize
from core.machine.heartbeat import heard
from core.machine.progress import Progress
from core.models.errors import LoadError
from core.models.sources import SpecError
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import PairSpec, embedded_spec
from core.record.json_lines import JsonWriter
from core.records import EXACT_VERIFIERS, Reply, Round, Settings, writes_exactly
from core.settings import LOSSY, SettingsError, parse_settings
from core.text.chat import fit_chat, prompt_limit
from core.text.detokenise import PromptError, clean_text
from core.text.domains import CHOICES
from core.text.terminal import (
    BROKEN_PIPE,
    PlainWriter,
    RedlineWriter,
    legend,
    let_go_of_output,
    not_written,
    printable,
    progress_printer,
    use_utf8,
)

if TYPE_CHECKING:
    from core.pairs.pair import Pair

ROLES = ("system", "user", "assistant")
BAD_INPUT, INTERRUPTED = 2, 130  # exit statuses; the second as a shell reports the signal


class InputError(ValueError):
    """Input that cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line, checked."""

    messages: list[dict[str, str]]
    settings: Settings
    pair: PairSpec
    domain: str
    json: bool
    show_discarded: bool
    drafter: str | None = None  # None is the pair's own
    k_named: bool = True  # or else K is what is usual where the pair runs


# --- Input -------------------------------------------------------------------------------------------------


def parse_request(arguments: Sequence[str] | None = None) -> Request:
    """The request of a command line and of the environment's pair.

    Raises InputError, SettingsError or SpecError; exits for unknown options.
    """
    given = _parser().parse_args(arguments)
    if given.domain not in CHOICES:
        raise InputError(f"Domain must be one of {', '.join(CHOICES)}, not {given.domain!r}.")
    auto = given.k == "auto"
    k = Settings().num_draft_tokens if given.k is None else given.k
    settings = parse_settings(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        num_draft_tokens=MOST if auto else k,
        auto_draft_tokens=auto,
        max_new_tokens=given.max_new_tokens,
        stop=[clean_text(stop) for stop in given.stop],
        seed=given.seed,
        verifier=given.verifier,
        acceptance_threshold=given.threshold,
        tree_width=given.tree_width,
    )
    pair = pair_spec(given, os.environ) or embedded_spec()
    return Request(
        _messages(given),
        settings,
        pair,
        given.domain,
        given.json,
        given.show_discarded,
        given.drafter,
        k_named=given.k is not None,
    )


def _parser() -> argparse.ArgumentParser:
    # Values stay text here: core.settings checks them, with one sentence for whatever cannot be used.
    parser = argparse.ArgumentParser(
        prog="python -m core.generate",
        description="One reply of a pair, every token's fate shown.",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the question")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="earlier turns: a JSON list of {role, content}; --prompt follows them",
    )
    usual = Settings()
    parser.add_argument(
        "--k",
        metavar="N",
        help=f"draft tokens a round, 0 is plain, auto chooses up to {MOST} (on a card auto, else"
        f" {usual.num_draft_tokens})",
    )
    parser.add_argument(
        "--verifier",
        default=usual.verifier,
        metavar="NAME",
        help=f"how drafts are judged: {' or '.join(EXACT_VERIFIERS)}, both exact (%(default)s); for teaching"
        f" and not exact: {', '.join(LOSSY)}",
    )
    parser.add_argument("--threshold", metavar="X", help="of a rule that is not exact (its usual one)")
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help=f"how drafts are made, where the pair offers it: {', '.join(DRAFTERS)} (the pair's own)",
    )
    parser.add_argument(
        "--tree-width",
        default=usual.tree_width,
        metavar="N",
        help=f"candidates a position, for {', '.join(TREE_DRAFTERS)}; 1 is a chain (%(default)s)",
    )
    parser.add_argument(
        "--temperature", default=usual.temperature, metavar="X", help="0 is argmax (%(default)s)"
    )
    parser.add_argument("--top-k", default=usual.top_k, metavar="N", help="0 is off (%(default)s)")
    parser.add_argument("--top-p", default=usual.top_p, metavar="X", help="1 is off (%(default)s)")
    parser.add_argument("--min-p", default=usual.min_p, metavar="X", help="0 is off (%(default)s)")
    parser.add_argument(
        "--repetition-penalty", default=usual.repetition_penalty, metavar="X", help="1 is off (%(default)s)"
    )
    parser.add_argument("--seed", default=1, metavar="N", help="-1 draws one (%(default)s)")
    parser.add_argument("--max-new-tokens", default=128, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the reply; may be repeated"
    )
    parser.add_argument(
        "--domain", default="auto", metavar="NAME", help=f"{', '.join(CHOICES)} (%(default)s)"
    )
    parser.add_argument("--show-discarded", action="store_true", help="drafts never tested, on a terminal")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: rounds, then the reply")
    add_pair_arguments(parser)
    return parser


def _messages(given: argparse.Namespace) -> list[dict[str, str]]:
    messages = read_messages(given.messages) if given.messages is not None else []
    if given.system is not None:
        if messages and messages[0]["role"] == "system":
            raise InputError(f"{given.messages} begins with a system message: leave --system away.")
        messages.insert(0, {"role": "system", "content": given.system})
    if given.prompt is not None:
        messages.append({"role": "user", "content": given.prompt})
    if not any(message["role"] == "user" for message in messages):
        raise InputError("There is nothing to answer: give a question with --prompt TEXT.")
    if messages[-1]["role"] != "user":
        raise InputError(
            f"The last message of {given.messages} is not a user's: give a question with --prompt."
        )
    if not messages[-1]["content"].strip():
        raise InputError("The prompt is empty; please write something.")
    return [{**message, "content": clean_text(message["content"])} for message in messages]


def read_messages(path: str) -> list[dict[str, str]]:
    """The turns in a file: a JSON list of {role, content}. Raises InputError."""
    try:
        turns = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not JSON: {error}.") from error
    if not isinstance(turns, list):
        raise InputError(f'{path} must hold a list: [{{"role": "user", "content": "..."}}].')
    messages = []
    for number, turn in enumerate(turns, 1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise InputError(
                f"Message {number} of {path} needs a role ({', '.join(ROLES)}) and a content that is text."
            )
        if role == "system" and number > 1:
            raise InputError(f"Message {number} of {path} is a system message: only the first can be one.")
        messages.append({"role": role, "content": content})
    return messages


# --- JSON --------------------------------------------------------------------------------------------------


# --- The reply ---------------------------------------------------------------------------------------------


def figures_line(reply: Reply, figures: Figures) -> str:
    """The reply's figures in one line; "–" where one is undefined."""
    return " · ".join(
        (
            f"{figures.emitted} tokens in {figures.rounds} rounds",
            *_drafting(reply, figures),
            f"{_shown(figures.tokens_per_pass, '.2f')} tokens per pass",
            f"{_shown(figures.tokens_per_second, '.1f')} tokens/s",
            f"{_shown(figures.draft_acceptance_rate, '.1%')} of {figures.drafted} drafts accepted",
            f"α {_shown(figures.alpha, '.3f')}",
            f"first token {_shown(reply.ttft_seconds, '.2f')} s (prefill {reply.prefill_seconds:.2f} s)",
            f"seed {reply.settings.seed}",
            f"ended: {reply.finish_reason}",
        )
    )


def _drafting(reply: Reply, figures: Figures) -> Iterator[str]:
    """What is out of the ordinary in how drafts were made and judged."""
    settings = reply.settings
    if settings.auto_draft_tokens:
        yield f"K auto, mean {_shown(figures.mean_draft_tokens, '.2f')}"
    if not writes_exactly(settings, reply.pair.drafter):
        threshold = settings.acceptance_threshold
        yield f"NOT EXACT: {settings.verifier}" + ("" if threshold is None else f" {threshold:g}")
        yield f"drift {_shown(figures.drift, '.3f')}"
    elif settings.verifier != Settings().verifier:
        yield f"judged by {settings.verifier}"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


@contextlib.contextmanager
def _interrupts_set(cancel: threading.Event) -> Iterator[None]:
    """Ctrl-C sets ``cancel``; a second one interrupts at once."""

    def handle(number: int, frame: object) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _writer(request: Request, marked: bool, colour: bool) -> JsonWriter | RedlineWriter | PlainWriter:
    if request.json:
        return JsonWriter(sys.stdout, request.domain)
    if not marked:
        return PlainWriter(sys.stdout)
    drafts = request.settings.num_draft_tokens > 0
    return RedlineWriter(sys.stdout, colour=colour, discarded=request.show_discarded, plain_marked=drafts)


def answer(pair: Pair, request: Request) -> int:
    """Streams the reply to standard output; returns the exit status. Raises PromptError."""
    from core.engine.loop import Engine

    limit = prompt_limit(pair.info.context_length, request.settings.max_new_tokens)
    prompt = fit_chat(pair.tokenizer, request.messages, limit)
    if prompt.dropped_messages:
        print(f"The oldest {prompt.dropped_messages} messages do not fit and were left out.", file=sys.stderr)
    for note in prompt.notes:
        print(note, file=sys.stderr)
    stops = dict.fromkeys((*request.settings.stop, *prompt.stop))
    settings = replace(request.settings, stop=tuple(stops))
    marked = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    colour = not os.environ.get("NO_COLOR")
    writer = _writer(request, marked, colour)
    cancel = threading.Event()
    rounds: list[Round] = []
    generation = Engine(pair).generate(prompt.ids, settings, cancel=cancel, domain=request.domain)
    with _interrupts_set(cancel), contextlib.closing(generation):
        with contextlib.suppress(KeyboardInterrupt):
            for round_ in generation:
                rounds.append(round_)
                writer.round(round_)
        generation.close()
        reply = generation.reply
        writer.end(reply)
    if not request.json:
        if marked and request.settings.num_draft_tokens:
            print(legend(colour, request.show_discarded), file=sys.stderr)
        print(figures_line(reply, summarize(rounds)), file=sys.stderr)
    if reply.error:
        print(printable(reply.error), file=sys.stderr)
    return {"cancelled": INTERRUPTED, "error": 1}.get(reply.finish_reason, 0)


def _measured(pair: Pair, request: Request, progress: Progress) -> Request:
    """The request, with K fixed where what passes cost cannot be measured."""
    from core.engine.calibration import costs_if_any

    progress("Measuring what passes cost", None)
    pair.costs = costs_if_any(pair, progress)
    if pair.costs is not None or pair.drafter is None:
        return request
    progress("", None)
    k = Settings().num_draft_tokens
    print(f"What passes cost could not be measured: K is fixed at {k}.", file=sys.stderr)
    settings = replace(request.settings, num_draft_tokens=k, auto_draft_tokens=False)
    return replace(request, settings=settings)


def _load(spec: PairSpec, progress: Progress) -> Pair:
    from core.pairs.load import load_pair  # PyTorch takes seconds to import: bad input is answered before

    return load_pair(spec, progress)


def main(arguments: Sequence[str] | None = None, load: Callable[[PairSpec, Progress], Pair] = _load) -> int:
    """The command; returns its exit status. ``load(spec, progress)`` gives the pair."""
    use_utf8()
    try:
        request = parse_request(arguments)
        with heard(progress_printer(sys.stderr)) as progress:
            progress("Loading PyTorch", None)
            pair = load(request.pair, progress).drafting(request.drafter)
            if not request.k_named and pair.info.device == "cuda" and pair.drafter is not None:
                settings = replace(request.settings, num_draft_tokens=MOST, auto_draft_tokens=True)
                request = replace(request, settings=settings)
            if request.settings.auto_draft_tokens:
                request = _measured(pair, request, progress)
            progress("", None)
        for note in pair.notes:
            print(printable(note), file=sys.stderr)
        try:
            return answer(pair, request)
        except BrokenPipeError:
            raise
        except OSError as error:  # of writing: the engine puts its own faults into the reply
            return not_written(error)
    except (InputError, SettingsError, SpecError, PromptError, LoadError) as error:
        print(printable(str(error)), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # while loading
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        let_go_of_output()
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
