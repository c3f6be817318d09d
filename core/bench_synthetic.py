"""Measures a 7B-shaped pair on a CUDA card without downloads, through the real engine.

    python -m core.bench_synthetic [--device cuda|cpu] [--small] [--json FILE]

Weights are random, in NF4 and in bfloat16, and made on the card; every pass runs in earnest and then says
what a script says (``core.synthetic``), so the acceptance to expect is known: it is printed beside what came
out.

First, checks: the sampling maths of the device against that of the CPU (``core.sampling``), a tiny model on
both, and whether rows of a pass depend on each other in any kernel used. Then tokens/s plain and for
K = 1 to 8, passes by number of rows, draft steps, launches and waits of a round, and bytes of weights a pass
over the measured speed of a copy. On a data-centre card it ends within 4 minutes; past that it skips what is
left. ``--small`` runs everything with tiny models, also on a CPU: that it works is then all it shows.

Needs torch, transformers and bitsandbytes, nothing else. Knows no real model, no text and no page.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core import device_rule, sampling
from core.drafters.model import ModelDrafter
from core.engine import Engine
from core.metrics import expected_tokens
from core.models import rows as row_test
from core.models.decoder import Decoder
from core.models.errors import is_out_of_memory
from core.models.linear.checks import product_dependence
from core.models.linear.forms import maker
from core.models.pair import Pair
from core.models.transformers_decoder import TransformersDecoder
from core.records import Fate, Round, Settings
from core.synthetic import LARGE, SMALL, NoText, random_decoder, random_model, scripted_pair, weight_bytes
from core.terminal import put_out, use_utf8

ACCEPTANCE = (0.6, 0.8)
MOST = 8  # the largest K
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


# --- What makes a host wait --------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts operations, and by name what would make the host wait for a card; on any device."""

    ASKS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")
    METHODS = ("tolist", "cpu", "numpy")  # do not pass where the mode looks

    def __init__(self):
        super().__init__()
        self.operations = 0
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.overloadpacket.__name__
        masked = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in self.ASKS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        with contextlib.ExitStack() as stack:
            for name in self.METHODS:
                counted = self._counted(name, getattr(torch.Tensor, name))
                stack.enter_context(mock.patch.object(torch.Tensor, name, counted))
            stack.enter_context(self)
            yield self

    def _counted(self, name: str, method: Callable) -> Callable:
        def counted(tensor, *args, **kwargs):
            self.waits[name] += 1
            return method(tensor, *args, **kwargs)

        return counted


@dataclass(frozen=True)
class Traffic:
    """A round's launches (operations where there is no card), waits of the host and copies to it."""

    launches: float
    waits: float
    copies: float | None


def traffic(pair: Pair, ids: Sequence[int], k: int, rounds: int = 6) -> Traffic:
    """Means over a few rounds with K = ``k`` that follow a first one."""
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=rounds * (k + 1) + k + 2)

    def play(watch: Callable[[], contextlib.AbstractContextManager]):
        generation = Engine(pair, cache_bytes=0, batched=True).generate(ids, settings)
        next(generation)
        with watch() as watched:
            for _ in itertools.islice(generation, rounds):
                pass
            if pair.info.device == "cuda":
                torch.cuda.synchronize()
        generation.close()
        return watched

    if pair.info.device != "cuda":
        watch = play(Watch().watching)
        return Traffic(watch.operations / rounds, watch.waits.total() / rounds, None)
    events = play(_profiler).key_averages()
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    copies = sum(event.count for event in events if event.key.startswith("Memcpy DtoH"))
    return Traffic(launches / rounds, len(play(_sync_warnings)) / rounds, copies / rounds)


def _profiler() -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])


@contextlib.contextmanager
def _sync_warnings() -> Iterator[list]:
    """A list of warnings, one for each time the host waits for the card."""
    found: list = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [one for one in given if "synchronizing CUDA operation" in str(one.message)]


# --- Checks ------------------------------------------------------------------------------------------------

FLOAT = maker("float32")
_FILTERS = (
    Settings(temperature=1.0),
    Settings(temperature=0),
    Settings(temperature=0.7, top_k=20),
    Settings(temperature=1.2, top_p=0.8),
    Settings(temperature=1.0, top_k=30, top_p=0.9, min_p=0.05),
    Settings(temperature=0.9, min_p=0.1, repetition_penalty=1.3),
)


def filters_differ(device: torch.device, width: int = 1000) -> float:
    """The largest difference of a probability from the CPU's, over the filters, in rows of every kind."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(MOST + 1, width, generator=generator)
    prefix = torch.randint(width, (50,), generator=generator).tolist()
    seen = torch.zeros(width, dtype=torch.bool)
    seen[prefix] = True
    worst = 0.0
    for settings in _FILTERS:
        found = device_rule.distributions(rows.to(device), settings, seen.to(device).expand_as(rows)).p.cpu()
        for row, logits in zip(found, rows, strict=True):
            p, _ = sampling.distributions(logits, settings, prefix)
            worst = max(worst, (row - p.over(torch.arange(width))).abs().max().item())
    return worst


def verdicts_differ(device: torch.device, cases: int, width: int = 400, k: int = 5) -> int:
    """In how many of ``cases`` for each verifier a block is judged differently from the CPU's reference."""
    generator, differing = torch.Generator().manual_seed(2), 0
    for case, verifier in itertools.product(range(cases), sampling.VERIFIERS):
        p, other = (torch.rand(k + 1, width, generator=generator) ** 3 for _ in range(2))
        p, q = (rows / rows.sum(1, keepdim=True) for rows in (p, (p + other * (case % 4))[:k]))
        draws = torch.rand(2 * k + 1, generator=generator, dtype=torch.float64)
        uniform = iter(draws.tolist()).__next__
        proposals = []
        for row in map(sampling.Distribution, q):
            proposals.append(sampling.Proposal(sampling.sample(row, uniform()), row, row))
        target = [sampling.Distribution(row) for row in p]
        *drafts, own = sampling.VERIFIERS[verifier](target.__getitem__, proposals, uniform)
        expected = (sum(outcome.fate is Fate.ACCEPTED for outcome in drafts), own.id)
        rows = device_rule.Rows(p, p, torch.ones(k + 1, dtype=torch.bool), p.amax(1))
        rows = device_rule.Rows(*(getattr(rows, name).to(device) for name in rows.__slots__))
        ids = torch.tensor([proposal.id for proposal in proposals], device=device)
        count = torch.tensor(k, device=device)
        found = device_rule.judge(rows, q.to(device), ids, count, draws.to(device), verifier)
        differing += (found.kept.item(), found.own.item()) != expected
    return differing


def _tiny(kind: str, sizes: dict, device: torch.device) -> Decoder | TransformersDecoder:
    """A float32 model of spread-out predictions, the same on every device."""
    torch.manual_seed(0)
    model = random_model(sizes, torch.device("cpu"), torch.float32, spread=0.15).to(device)
    return TransformersDecoder(model) if kind == "transformers" else Decoder.from_model(model, FLOAT)


def tiny_differs(kind: str, device: torch.device) -> tuple[float, int, int]:
    """A tiny float32 pair on the device and on the CPU: the largest difference of a probability, and of how
    many replies how many differ in an id, batched there against step by step here."""
    ids = list(range(24))
    pairs = []
    for place in (device, torch.device("cpu")):
        target, draft = (_tiny(kind, sizes, place) for sizes in SMALL)
        pair = scripted_pair(target, draft, 0.5, "none")
        drafter = ModelDrafter(draft, vocabulary=target.vocabulary)
        pairs.append(replace(pair, target=target, drafter=drafter, tokenizer=NoText()))
    rows = [pair.target.logits(ids, pair.target.new_cache()).softmax(-1) for pair in pairs]
    replies = []
    for pair, on_device in zip(pairs, (True, False), strict=True):
        engine = Engine(pair, batched=on_device)
        settings = [Settings(temperature=1.0, seed=n, max_new_tokens=16) for n in range(4)]
        generations = [engine.generate(ids, setting) for setting in settings]
        for generation in generations:
            for _ in generation:
                pass
        replies.append([generation.reply.token_ids for generation in generations])
    different = sum(one != other for one, other in zip(*replies, strict=True))
    return (rows[0] - rows[1]).abs().max().item(), different, len(replies[0])


def kernels_depend(decoder: Decoder) -> dict[str, float]:
    """For the products of a layer and the head: how far a row's result depends on the rows beside it."""
    layer = decoder.layers[0]
    names = ("qkv", "out", "gate_up", "down", "head")
    return {
        name: product_dependence(product, product.shape[1], MOST + 1, decoder.device, torch.bfloat16)
        for name, product in zip(names, (*layer.products, decoder.head), strict=True)
    }


@torch.inference_mode()
def filters_depend(device: torch.device, width: int) -> float:
    """The same for the filter chain."""
    rows = 3 * torch.randn(MOST + 1, width, generator=torch.Generator().manual_seed(3)).to(device)
    worst = 0.0
    for settings in _FILTERS[:-1]:
        whole = device_rule.distributions(rows, settings).p
        alone = torch.cat([device_rule.distributions(row[None], settings).p for row in rows])
        worst = max(worst, (whole - alone).abs().max().item())
    return worst


# --- Measurements ------------------------------------------------------------------------------------------


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(works: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Median seconds of each, done to the end, taking turns after a turn that warms up."""
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, times in zip(works, taken, strict=True):
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            if turn:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def copy_speed(size: int, device: torch.device) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes on the device."""
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    goal = torch.empty_like(source)
    return 2 * size / min(timed([lambda: goal.copy_(source)] * 5, device, 2))


@torch.inference_mode()
def passes(pair: Pair, ids: Sequence[int], repeats: int) -> tuple[list[float], float, float]:
    """Seconds of the target's pass over 1, 2, ... rows, of the draft's over one, and of a draft step."""
    target, draft = pair.target, pair.drafter.model
    device, settings = target.device, Settings(temperature=1.0)
    caches = target.new_cache(), draft.new_cache()
    target.prefill(ids, caches[0])
    draft.prefill(ids, caches[1])
    rows = torch.tensor(ids[: MOST + 1], device=device)
    u = torch.tensor([0.5], dtype=torch.float64, device=device)

    def score(count: int) -> None:
        caches[0].crop(len(ids))
        target.device_logits(rows[:count], caches[0])

    def propose() -> torch.Tensor:
        caches[1].crop(len(ids))
        return draft.device_logits(rows[:1], caches[1])

    def step() -> None:
        device_rule.draw(device_rule.distributions(propose(), settings).p, u)

    works = [lambda count=count: score(count) for count in range(1, MOST + 2)]
    *by_rows, draft_pass, draft_step = timed([*works, propose, step], device, repeats)
    return by_rows, draft_pass, draft_step


def speed(pair: Pair, ids: Sequence[int], k: int, tokens: int, seed: int) -> list[Round]:
    """The rounds of a reply."""
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=tokens, seed=seed)
    generation = Engine(pair, cache_bytes=0, batched=True).generate(ids, settings)
    rounds = list(generation)
    if generation.reply.error:
        raise RuntimeError(generation.reply.error)
    return rounds


def summary(rounds: Sequence[Round], k: int, acceptance: float) -> dict[str, float | None]:
    """Figures of rounds with K = ``k``, beside what the script promises of whole ones."""
    whole = [r for r in rounds if r.num_draft_tokens == k]
    accepted = sum(r.count(Fate.ACCEPTED) for r in rounds)
    tested = accepted + sum(r.count(Fate.REJECTED) for r in rounds)
    overlaps = [token.overlap for r in rounds for token in r.tokens if token.overlap is not None]
    seconds = sum(r.seconds for r in rounds)
    milliseconds = {
        name: 1e3 * statistics.median(getattr(r, f"{name}_seconds") for r in whole)
        for name in ("draft", "target", "overhead")
    }
    return {
        "k": k,
        "tokens_per_second": sum(r.emitted for r in rounds) / seconds,
        "tokens_per_pass": statistics.mean(r.emitted for r in whole),
        "expected_tokens_per_pass": expected_tokens([acceptance] * k, k),
        "tested": tested,
        "acceptance": accepted / tested if tested else None,
        "alpha": statistics.mean(overlaps) if overlaps else None,
    } | milliseconds


# --- The command -------------------------------------------------------------------------------------------


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


def _machine(device: torch.device) -> dict[str, str | None]:
    packages = ("torch", "transformers", "bitsandbytes")
    versions = {name: metadata.version(name) for name in packages}
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return versions | {"device": device.type, "card": card, "system": platform.platform(terse=True)}


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


def run(device: str = "cuda", small: bool = False, json: str | None = None) -> int:
    """The whole run; returns an exit status, 2 where it cannot be made."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        print(
            "There is no CUDA card here: python -m core.bench_synthetic --device cpu --small tries it with"
            " tiny models.",
            file=sys.stderr,
        )
        return 2
    if place.type == "cpu" and not small:
        print("A 7B-shaped pair is for a card: give --small with --device cpu.", file=sys.stderr)
        return 2
    report, sizes = Report(), TINY if small else FULL
    report.figures["machine"] = machine = _machine(place)
    report.say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    if small:
        report.say("Tiny models: this shows that everything works; the speeds mean nothing.")
    check(report, place, sizes)
    report.figures["pairs"] = {}
    for form in ("nf4", "bfloat16"):
        if report.over:
            report.say(f"\nTarget in {form}: left out, the time is up")
            continue
        try:
            report.figures["pairs"][form] = measure(report, form, place, sizes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            report.say(f"  The card's memory is too small for a target in {form}.")
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    report.figures["seconds"] = report.seconds
    report.say(f"\n{report.seconds:.0f} s in all")
    return _write(report.figures, json) if json else 0


def _write(figures: dict, path: str) -> int:
    try:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{path} cannot be written: {(error.strerror or str(error)).lower()}.", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    use_utf8()
    parser = argparse.ArgumentParser(
        prog="python -m core.bench_synthetic", description="Measure a random pair on a CUDA card."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything works")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as JSON")
    return run(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
