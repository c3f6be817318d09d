"""Prints what a pair of the catalogue would write on a card, as an estimate, before there is one.

    python -m core.bench --device cuda --roofline CARD [--pair NAME] [--quantize auto|nf4|none]
        [--alpha 0.6 0.7 0.8] [--host-speed 1]
    python -m core.bench.roofline_table --write          # the table of docs/PERFORMANCE.md

CARD is one of ``core.bench.cards``. The estimate is ``core.bench.roofline``'s, for drafts of a model; forms
and dtype are those that the pair would run in on that card. On a machine with a card, CARD may be ``here``:
its copy bandwidth and its host's time for a launch, a view and a product in NF4 are measured then and take
the place of the table's. ``python -m core.bench --device cuda`` measures real rounds, and ``--synthetic``
sets both beside each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from core.bench import cards, roofline, roofline_here
from core.bench.cards import Card, CardError
from core.bench.fake_pairs import DOCUMENT
from core.bench.roofline import HOST, Host
from core.engine.auto_k import MOST
from core.figures.costs import Costs
from core.figures.metrics import expected_tokens
from core.models.asked import settled_form
from core.models.card import half_of
from core.models.memory import gigabytes
from core.pairs.catalogue import CATALOGUE, Entry

HERE = "here"
USUAL_PAIR = "qwen2.5-7b"
ALPHAS = (0.6, 0.7, 0.8)
FORMS = ("auto", "nf4", "none")  # of a target, whose costs are known


class RooflineError(ValueError):
    """An estimate that cannot be made; the message is one sentence."""


def run(
    name: str,
    pair: str | None = None,
    quantize: str | None = None,
    alphas: Sequence[float] = ALPHAS,
    host_speed: float = 1.0,
) -> str:
    """The text of the command. Raises CardError or RooflineError with one sentence."""
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise RooflineError(f"--alpha must be numbers from 0 to 1, not {alpha:g}.")
    if not 0 < host_speed < float("inf"):
        raise RooflineError(f"--host-speed must be above 0, not {host_speed:g}.")
    entry = CATALOGUE.get(wanted := (pair or USUAL_PAIR).strip().lower())
    if entry is None:
        raise RooflineError(f"There is no estimate for the pair {wanted!r}: choose {', '.join(CATALOGUE)}.")
    if (quantize or "auto") not in FORMS:
        raise RooflineError(f"There is no estimate for {quantize}: choose --quantize {', '.join(FORMS)}.")
    card, host = _card_and_host(name)
    host = host.faster(host_speed)
    form = settled_form(quantize or "auto", "cuda", False, 2 * entry.target_parameters)
    dtype = half_of(card.capability)
    needed = entry.needed_bytes("cuda", form, "none", dtype)
    if needed > card.memory:
        raise RooflineError(
            f"{entry.title} needs {gigabytes(needed)} with its target {_said(form)}, and {card.title} has"
            f" {gigabytes(round(card.memory))}: choose a smaller pair or a larger card."
        )
    return as_text(entry, form, dtype, card, host, alphas)


def _card_and_host(name: str) -> tuple[Card, Host]:
    if name.strip().lower() != HERE:
        return cards.find(name), HOST
    if not torch.cuda.is_available():
        raise CardError(f"There is no card here to measure: name one of {', '.join(cards.CARDS)}.")
    return roofline_here.measured(torch.device("cuda"))


def as_text(
    entry: Entry, form: str, dtype: str, card: Card, host: Host, alphas: Sequence[float] = ALPHAS
) -> str:
    """The estimate, in the lines that the command prints."""
    target, draft = roofline.models(entry, form, getattr(torch, dtype))
    work = roofline.count(entry.target_model.config, entry.draft_model.config, form, target.dtype)
    costs = roofline.costs(work, target, draft, card, host)
    faster = roofline.costs(work, target, draft, card, host.faster(2))
    read = [model.bytes_read(1, card, roofline.CONTEXT) / 1e9 for model in (target, draft)]
    capability = ".".join(map(str, card.capability))
    whose = "measured here" if card.measured else f"of which a copy is taken to reach {host.copy:.0%}"
    measured = (
        "An estimate: of this card and its host only a copy and single calls were timed, no round was run."
        if card.measured
        else "An estimate, not a measurement: nothing of this was run on a card."
    )
    lines = [
        measured,
        f"{entry.title} on {card.title}: {card.bandwidth / 1e9:,.0f} GB/s, {whose}; capability {capability}.",
        f"Target {_said(form)}, draft unquantised, in {dtype}, behind {roofline.CONTEXT} ids.",
        f"The target's pass: {work.passed.launches:,.0f} launches, {read[0]:.2f} GB read. A draft step:"
        f" {work.step.launches:,.0f} launches, {read[1]:.2f} GB.",
        f"Of the host: {1e6 * host.launch:.1f} µs a launch, {1e6 * host.view:.1f} a view,"
        f" {1e6 * host.nf4:.0f} more a product in NF4, {1e3 * host.round:.1f} ms a round.",
        "",
        *_table(costs, alphas),
        "",
        *_unpacking(target, card),
        *_bound(costs, roofline.costs(work, target, draft, card, host.faster(1e6))),
        f"With a host twice as fast: {'; '.join(_best(faster, alphas))}.",
        f"Not in it, so that the true figures are lower: {roofline.LEFT_OUT}.",
    ]
    if not card.measured:
        lines.append(
            "On a machine with a card --roofline here takes what its host and its memory reach, and "
            "--synthetic measures rounds."
        )
    return "\n".join(lines)


def _best(costs: Costs, alphas: Iterable[float]) -> Iterable[str]:
    """Plain speed, and for each acceptance the best K and its speed."""
    yield f"plain {1 / costs.round_seconds(0):.0f} tokens/s"
    for alpha in alphas:
        rates = [expected_tokens(alpha, k) / costs.round_seconds(k) for k in range(len(costs.verify))]
        best = max(range(len(rates)), key=rates.__getitem__)
        yield f"α = {alpha:g} {rates[best]:.0f} at K = {best}"


def _said(form: str) -> str:
    return "unquantised" if form == "none" else f"in {form.upper()}"


def _table(costs: Costs, alphas: Iterable[float]) -> Iterable[str]:
    yield f"draft step {1e3 * costs.draft:.2f} ms; tokens/s (× plain) by K and acceptance α:"
    yield "   K   target ms  " + "  ".join(f"{f'α = {alpha:g}':>14}" for alpha in alphas)
    plain = 1 / costs.round_seconds(0)
    for k, seconds in enumerate(costs.verify):
        cells = []
        for alpha in alphas:
            rate = expected_tokens(alpha, k) / costs.round_seconds(k)
            cells.append(f"{rate:>6.0f} ({rate / plain:.2f}×)")
        yield f"  {k:>2} {1e3 * seconds:>11.2f}  " + "  ".join(f"{cell:>14}" for cell in cells)


def _unpacking(target: roofline.Model, card: Card) -> Iterable[str]:
    """From which K on products unpack NF4 weights."""
    names = ("qkv", "out", "gate and up", "down")
    for k in range(MOST + 1):
        if any(which := target.unpacked(k + 1, card)):
            slow = ", ".join(name for name, unpacks in zip(names, which, strict=True) if unpacks)
            yield f"From K = {k} on bitsandbytes unpacks weights there before it multiplies ({slow})."
            return


def _bound(costs: Costs, free: Costs) -> Iterable[str]:
    """Whether host or card is what a plain round and a draft step wait for; ``free``: with a host that takes
    no time."""
    for what, with_host, without in (
        ("A plain round", costs.verify[0], free.verify[0]),
        ("A draft step", costs.draft, free.draft),
    ):
        waits = "the host's launches" if with_host > without else "the card's memory"
        yield f"{what} waits for {waits}: the card alone would take {1e3 * without:.2f} ms."


# --- The table of the documents ----------------------------------------------------------------------------

SHOWN = ("rtx-3060", "rtx-4090", "t4", "a100-80", "h200")
CASES = ((2, 0.6), (4, 0.6), (4, 0.7), (4, 0.8), (8, 0.8))  # K and acceptance
BEGIN, END = (
    "<!-- python -m core.bench.roofline_table --write -->",
    "<!-- end of core.bench.roofline_table -->",
)


def table(work: roofline.Work) -> str:
    """Tokens/s (× plain) of ``USUAL_PAIR`` in NF4 on some cards; ``work`` is that pair's."""
    lines = [["card", "plain", *(f"K = {k}, α = {alpha}" for k, alpha in CASES)]]
    lines.append(["---"] * len(lines[0]))
    for name in SHOWN:
        card = cards.CARDS[name]
        models = roofline.models(CATALOGUE[USUAL_PAIR], "nf4", getattr(torch, half_of(card.capability)))
        costs = roofline.costs(work, *models, card)
        plain = 1 / costs.round_seconds(0)
        rates = [expected_tokens(alpha, k) / costs.round_seconds(k) for k, alpha in CASES]
        lines.append([card.title, f"{plain:.0f}", *(f"{rate:.0f} ({rate / plain:.2f})" for rate in rates)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write() -> None:
    """Puts the table into docs/PERFORMANCE.md."""
    entry = CATALOGUE[USUAL_PAIR]
    work = roofline.count(entry.target_model.config, entry.draft_model.config, "nf4", torch.bfloat16)
    text = DOCUMENT.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    DOCUMENT.write_text(f"{text[:start]}\n\n{table(work)}\n\n{text[end:]}", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--roofline",
        metavar="CARD",
        help=f"instead, an estimate of speeds on a card that is not here: {', '.join(cards.CARDS)}; or"
        f" {HERE}, with what its host and memory reach (of the other flags --pair and --quantize count)",
    )
    parser.add_argument(
        "--alpha", nargs="+", type=float, default=list(ALPHAS), metavar="X", help="(0.6 0.7 0.8)"
    )
    parser.add_argument(
        "--host-speed", type=float, default=1.0, metavar="X", help="of --roofline: times the table's (1)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m core.bench.roofline_table", description="Write the estimates down."
    )
    parser.add_argument("--write", action="store_true", required=True, help="into docs/PERFORMANCE.md")
    parser.parse_args()
    write()
