"""Takes the bench's measurements: replies in every way and by every peer, passes, a follow-up, a session.

Everything that is compared takes turns within every repeat, so that a disturbance of the machine meets all
alike, and is warmed up first. Judges nothing; what the figures come to is in ``core.bench.figures``.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from core.bench.machine import resident_bytes, synchronise
from core.bench.measured import (
    DOMAINS,
    FLASHSPEC,
    LLAMA,
    TRANSFORMERS,
    Case,
    FollowUp,
    Options,
    Passes,
    Sample,
    Samples,
    Session,
    Spread,
    Way,
    spread,
)
from core.engine.loop import Engine
from core.engine.reuse import MAX_KEPT
from core.machine.progress import Progress
from core.pairs.pair import Pair
from core.pairs.spec import PairSpec
from core.records import Reply, Settings
from core.settings import parse_settings
from core.text.chat import encode_chat
from core.text.prompts import Prompt, load_prompts

log = logging.getLogger(__name__)

ASSISTED_K = (2, 4, 8)  # of transformers' assisted generation; it is compared by the best of them
FLASHSPEC_K = (4,)  # with drafts of the model alone, beside its own strategy
WARM_UP_TOKENS = 16
FOLLOW_UP_TOKENS = 8  # of each reply to a conversation
SESSION_TOKENS = 16  # of each reply of a session

# A prompt with its ids.
Asked = tuple[Prompt, Sequence[int]]
# Prompt, its ids, temperature, tokens at most, repeat. The repeat is the seed, too.
Run = Callable[[Prompt, Sequence[int], float, int, int], Sample]

# What each peer is imported as, and installed as.
LIBRARIES = {
    TRANSFORMERS: ("transformers", "transformers"),
    LLAMA: ("llama_cpp", "llama-cpp-python"),
    FLASHSPEC: ("flashspec", "flashspec"),
}


class BenchError(ValueError):
    """A measurement that cannot be made, or kept; the message is one sentence."""


# --- Replies -----------------------------------------------------------------------------------------------


def redline(engine: Engine, way: Way) -> Run:
    """Runs the engine in one way."""

    def run(
        prompt: Prompt, ids: Sequence[int], temperature: float, max_new_tokens: int, repeat: int
    ) -> Sample:
        settings = way.settings(temperature=temperature, max_new_tokens=max_new_tokens, seed=repeat)
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
    """Runs a peer (``generate`` of its module, with its model), told to sample as Redline does."""

    def run(
        prompt: Prompt, ids: Sequence[int], temperature: float, max_new_tokens: int, repeat: int
    ) -> Sample:
        times = generate(ids, end_ids, temperature, max_new_tokens, repeat, **assistance)
        return Sample(repeat=repeat, prompt=prompt.id, prompt_tokens=len(ids), prefill_seconds=None, **times)

    return run


def check_installed(peers: Sequence[str]) -> None:
    """Raises BenchError where a peer's library is missing."""
    for name in peers:
        module, package = LIBRARIES[name]
        if importlib.util.find_spec(module) is None:
            raise BenchError(
                f"{name} is not installed here: run `pip install {package}`, or leave {name} away from"
                " --against."
            )


def peer_runs(
    peers: Sequence[str], pair: Pair, spec: PairSpec, context: int, say: Progress
) -> tuple[dict[str, Run], list[str]]:
    """The same models run by the peers, with room for ``context`` ids, and a sentence for each one that
    cannot. Raises LoadError."""
    runs: dict[str, Run] = {}
    notes: list[str] = []
    if TRANSFORMERS in peers or FLASHSPEC in peers:
        from core.bench import with_transformers as bench_transformers

        say("Reading the same weights with transformers", None)
        target, draft = bench_transformers.load(spec, pair.info, say)
        if spec.draft and not draft:
            notes.append(f"No peer can run the draft {spec.draft}: name one of kind model for that.")
    if TRANSFORMERS in peers:
        generate = functools.partial(bench_transformers.generate, target)
        runs[TRANSFORMERS] = peer(generate, pair.end_ids)
        for k in ASSISTED_K if draft else ():
            runs[f"{TRANSFORMERS}, K = {k}"] = peer(
                generate, pair.end_ids, assistant=draft, num_draft_tokens=k
            )
    if LLAMA in peers:
        from core.bench import llama_cpp as bench_llama

        say("Trying whether llama.cpp runs here", None)
        file = bench_llama.model_file(spec.target)
        if fault := bench_llama.fault(file, pair.info.device):
            notes.append(fault)
        for name, lookup in () if fault else ((LLAMA, False), (f"{LLAMA}, lookup", True)):
            say("Reading the same weights with llama.cpp", None)
            model = bench_llama.open_model(file, context, pair.info.device, lookup)
            runs[name] = peer(functools.partial(bench_llama.generate, model), pair.end_ids)
    if FLASHSPEC in peers and draft:
        from core.bench import with_flashspec as bench_flashspec

        generate = functools.partial(bench_flashspec.generate, target, draft)
        runs[FLASHSPEC] = peer(generate, pair.end_ids)
        for k in FLASHSPEC_K:
            runs[f"{FLASHSPEC}, K = {k}"] = peer(generate, pair.end_ids, num_draft_tokens=k)
    return runs, notes


def warm_up(runs: dict[str, Run], asked: Asked, options: Options, say: Progress) -> None:
    """A few tokens in every way at every temperature."""
    for how, run in runs.items():
        say(f"Warming up: {how}", None)
        for temperature in options.temperatures:
            run(*asked, temperature, min(WARM_UP_TOKENS, options.max_new_tokens), 0)


def usable(
    runs: dict[str, Run], asked: Asked, options: Options, say: Progress
) -> tuple[dict[str, Run], list[str]]:
    """The peers that get through their warm-up, and a sentence for each one that fails: it ends no bench."""
    good, notes = {}, []
    for name, run in runs.items():
        try:
            warm_up({name: run}, asked, options, say)
        except Exception as error:
            log.info("%s failed", name, exc_info=True)
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes.append(f"{name} cannot run this pair ({line}).")
        else:
            good[name] = run
    return good, notes


def measure(runs: dict[str, Run], prompts: Sequence[Asked], options: Options, say: Progress) -> Samples:
    """Samples of every prompt at every temperature in every way, ways taking turns."""
    samples: Samples = {}
    steps = [(t, p, ids) for t in options.temperatures for p, ids in prompts]
    for repeat in range(1, options.repeats + 1):
        for number, (temperature, prompt, ids) in enumerate(steps):
            before = (repeat - 1) * len(steps) + number
            for turn, (how, run) in enumerate(runs.items()):
                done = (before + turn / len(runs)) / (options.repeats * len(steps))
                say(f"Measuring replies: {how}", done)
                sample = run(prompt, ids, temperature, options.max_new_tokens, repeat)
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
    cache = pair.target.new_cache()
    pair.target.prefill(context, cache)

    def target(rows: int) -> None:
        cache.crop(len(context))
        pair.target.logits([last] * rows, cache)

    kinds: list[Callable[[], object]] = [functools.partial(target, n) for n in range(1, max_rows + 1)]
    if drafter is not None:
        state = drafter.new_state()
        drafter.prefill(context, state, cache)

        def draft() -> None:
            state.crop(len(context))
            drafter.model.next_logits([last], state)

        def draft_step() -> None:
            state.crop(len(context))
            cache.crop(len(context))
            drafter.draft(ids, 1, settings, lambda: 0.5, state, cache)

        # Where drafts are no model's, there is no pass apart from what they are drawn with.
        kinds += [draft, draft_step] if hasattr(drafter, "model") else [draft_step]
    times: list[list[float]] = [[] for _ in kinds]
    for turn in range(repeats + 1):
        for kind, taken in zip(kinds, times, strict=True):
            synchronise(pair.info.device)
            start = time.perf_counter()
            kind()
            synchronise(pair.info.device)
            if turn:  # the first one warms up
                taken.append(time.perf_counter() - start)
    found = list(map(_quartiles, times))
    drafting = [None, None, *found[max_rows:]][-2:]
    return Passes(len(context), tuple(found[:max_rows]), *drafting)


# --- Conversations -----------------------------------------------------------------------------------------


def check_follow_up(pair: Pair, tokens: int) -> None:
    """Raises BenchError where a conversation of ``tokens`` ids and its follow-up do not fit the target."""
    context = pair.target.context_length
    told = conversation(pair.tokenizer, min(tokens, context))
    ids = encode_chat(pair.tokenizer, [*told, *_follow_up("")])
    if len(ids) + 2 * FOLLOW_UP_TOKENS > context:
        raise BenchError(
            f"A conversation of {tokens:,} tokens and a follow-up do not fit {pair.info.target}, which has"
            f" room for {context:,}: ask for a shorter one with --conversation."
        )


def _follow_up(answer: str) -> list[dict[str, str]]:
    question = "Thank you. And what else comes to your mind about that?"
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


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
    settings = parse_settings(temperature=0, max_new_tokens=FOLLOW_UP_TOKENS, seed=0)

    def reply(engine: Engine, messages: list[dict[str, str]]) -> Reply:
        return _finished(engine, encode_chat(pair.tokenizer, messages), settings)

    told = conversation(pair.tokenizer, tokens)
    warm, cold = [], []
    for _ in range(repeats):
        engine = Engine(pair)
        before = reply(engine, told)
        asked = [*told, *_follow_up(before.visible_text)]
        warm.append(reply(engine, asked))
        cold.append(reply(Engine(pair), asked))
    return FollowUp(
        prompt_tokens=warm[0].prompt_tokens,
        new_tokens=warm[0].prompt_tokens - warm[0].reused_tokens,
        cold_seconds=spread(r.ttft_seconds for r in cold),
        warm_seconds=spread(r.ttft_seconds for r in warm),
        share=spread(w.ttft_seconds / c.ttft_seconds for w, c in zip(warm, cold, strict=True)),
    )


def _finished(engine: Engine, ids: Sequence[int], settings: Settings) -> Reply:
    generation = engine.generate(ids, settings)
    for _ in generation:
        pass
    return generation.reply


def hold_session(pair: Pair, replies: int, say: Progress) -> Session:
    """Resident memory over ``replies`` short replies of one engine to the prompts of the suite in turn.

    Memory is first looked at after as many replies as an engine keeps caches of.
    """
    engine = Engine(pair)
    asked = itertools.cycle(
        [encode_chat(pair.tokenizer, [{"role": "user", "content": p.prompt}]) for p in load_prompts()]
    )

    def reply(seed: int) -> None:
        settings = parse_settings(temperature=0.8, max_new_tokens=SESSION_TOKENS, seed=seed)
        _finished(engine, next(asked), settings)

    for seed in range(MAX_KEPT):
        reply(seed)
    before = most = resident_bytes()
    for number in range(replies):
        say("Holding a long session", number / replies)
        reply(MAX_KEPT + number)
        most = max(most, resident_bytes())
    return Session(replies, MAX_KEPT, before, resident_bytes(), most)
