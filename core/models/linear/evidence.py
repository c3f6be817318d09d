"""Which forms products take on this machine, by evidence: each that could run is checked, then timed.

A processor's flags do not say it. A kernel that is fast on one machine took a second for a token on another
with the same flags, and another gave wrong sums without a word. So at the first load of a model on a machine
every form of ``core.models.linear.forms`` is held against float64 and asked whether its rows depend on each
other (``core.models.linear.checks``); what is right is timed in the model's sizes, as a pass would run it
(``core.models.linear.timings``).

The fastest right ones run. What was found is kept in a folder by processor, versions, number of threads
and sizes, so that the same machine always gives the same numbers. What was found beside much other work,
which misleads, is kept until the machine is found quiet. Knows sizes and no model; and not how far a form's
rounding takes a model from what it was, which ``core.fidelity`` measures.

Run: ``python -m core.models.linear`` shows what was found here (``--again`` looks anew).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from core.machine.busy import BUSY, Others, busy_percent
from core.machine.kept import keep
from core.machine.progress import Progress, silent
from core.machine.threads import use
from core.models import processor
from core.models.linear import forms
from core.models.linear.checks import HOPELESS, attends_alike, check, hard_weight, reads_alike
from core.models.linear.findings import FLOAT, TYPICAL, WORTH, Evidence, Found, Sizes, typical
from core.models.linear.forms import maker
from core.models.linear.products import MANY
from core.models.linear.timings import LOOKING, attention_seconds, timed

log = logging.getLogger(__name__)

VERSION = 4  # of what is measured, and how, and of the code that is timed: raise it when that changes
KEPT = "products.json"
NEAR = 3
FASTER = 0.5
CLEARLY = 0.8
UNLIKE = "a row of a prompt depends on where it stands"


def find(sizes: Sizes, folder: Path | None = None, again: bool = False, say: Progress = silent) -> Found:
    """What to run in a model of these ``sizes``: as kept in ``folder``, or looked for now and kept there.

    What was found while the machine was busy is looked for anew where it is not busy any more.
    """
    name = _name(sizes)
    with _finding:  # two that look at once would time each other
        if not again:
            if name in _found:
                return _found[name]
            kept = None if folder is None else _kept(folder / KEPT, name)
            if kept is not None and not (kept.disturbed and busy_percent() <= BUSY):
                _found[name] = kept
                return kept
        threads = torch.get_num_threads()
        use(_THREADS)
        try:
            _found[name] = look(sizes, say=say)
        finally:
            use(threads)
        if folder is not None:
            _keep(folder / KEPT, name, _found[name])
        return _found[name]


def remember(sizes: Sizes, found: Found, folder: Path) -> None:
    """Keeps what else was found of the machine with the forms."""
    name = _name(sizes)
    _found[name] = found
    _keep(folder / KEPT, name, found)


_finding = threading.Lock()
_found: dict[str, Found] = {}  # in this process, which may have no folder to keep it in


@torch.inference_mode()
def look(sizes: Sizes, names: Sequence[str] = forms.NAMES, say: Progress = silent) -> Found:
    """What to run, looked for now. Takes two seconds or three, and as long as a check of each form where the
    machine is slow."""
    clock = Others()
    table, quickest, first_call = [], math.inf, {}
    for done, form in enumerate(names):
        say(f"{LOOKING}: checking {form}", done / len(names) / 2)
        entry, first_call[form] = check(form, sizes, HOPELESS * quickest)
        table.append(entry)
        if entry.right:
            quickest = min(quickest, first_call[form])
    table = timed(_shortlist(table, first_call), sizes, say)
    table += _beside(table, sizes)
    attended = attention_seconds(sizes)
    targets = [entry for entry in table if forms.is_close(entry.form)]
    return Found(
        layers=_fastest(targets),
        # 4 bits would change what a target says, and so would one part, for the final norm leaves outliers.
        head=_fastest((e for e in table if e.form.startswith((forms.TWO, *forms.DENSE))), "head"),
        draft=min((e for e in table if e.right), key=lambda e: e.draft).form,
        attention=_attention(attended, sizes),
        table=tuple(table),
        attended=attended,
        others=clock.percent(),
    )


def _fastest(entries: Iterable[Evidence], of: str = "layers") -> str:
    """The fastest right form. Dense products, whose rows depend on how many there are, have to be ``WORTH``
    times as fast as quantised ones."""
    taken = {e.form: typical(getattr(e, of)) for e in entries if e.right}
    return min(taken, key=lambda form: taken[form] * (WORTH if forms.family(form) in forms.DENSE else 1))


def _shortlist(table: Sequence[Evidence], first_call: Mapping[str, float]) -> list[Evidence]:
    """Of int8 kernels those alone whose first call took about as long as the quickest's: each that is timed
    has to pack weights."""
    listed = []
    for entry in table:
        for parts in (forms.ONE, forms.TWO):
            alike = [e.form for e in table if e.right and e.form.startswith(parts)]
            if entry.form in alike and first_call[entry.form] > NEAR * min(first_call[e] for e in alike):
                entry = replace(entry, verdict="slower than another int8 kernel in a first call")
        listed.append(entry)
    return listed


def _beside(table: Sequence[Evidence], sizes: Sizes) -> list[Evidence]:
    """int4 with prompts read by each other form that is so much faster at it that the memory is worth it. Not
    float32: twice as fast at long prompts on some processors, it is slower at the short ones of a chat."""
    int4 = next((entry for entry in table if entry.form == "int4" and entry.right), None)
    if int4 is None:
        return []
    found = []
    for other in table:
        with_it = forms.BESIDE + other.form
        if (
            other.right
            and other.form.startswith((forms.TWO, "bfloat16"))
            and other.layers[-1] < FASTER * int4.layers[-1]
        ):
            tried = (hard_weight(*size) for size in (sizes.layers[0], sizes.layers[-1]))
            verdict = "" if all(reads_alike(maker(with_it)(weight)) for weight in tried) else UNLIKE
            layers = (*int4.layers[:-1], other.layers[-1])
            error = max(int4.error, other.error)
            found.append(replace(int4, form=with_it, error=error, layers=layers, verdict=verdict))
    return found


def _attention(attended: Mapping[str, Sequence[float]], sizes: Sizes) -> str:
    """The dtype of attention: float32, or the one of 16 bits where that is faster by far and as steady."""
    taken = {name: TYPICAL[4] * few + TYPICAL[MANY] * many for name, (few, many) in attended.items()}
    faster = taken["bfloat16"] < CLEARLY * taken[FLOAT] or not attends_alike(FLOAT, sizes)
    return "bfloat16" if faster and attends_alike("bfloat16", sizes) else FLOAT


def _name(sizes: Sizes) -> str:
    """What the evidence depends on, in one word."""
    narrowed = [os.environ.get(name) for name in NARROWING]
    what = (VERSION, processor.description(), narrowed, torch.__version__, _THREADS, sizes)
    return hashlib.sha256(repr(what).encode()).hexdigest()


NARROWING = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
)
# Those that torch begins with: which are used later is a choice made with the forms that run.
_THREADS = torch.get_num_threads()


def _kept(path: Path, name: str) -> Found | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))[name]
        table = tuple(Evidence(**_tuples(entry)) for entry in kept.pop("table"))
        found = Found(**{**kept, "table": table, "attended": _tuples(kept["attended"])})
        for form in (found.layers, found.head, found.draft):
            maker(form)  # a KeyError where another version knew it
        return found if found.attention in forms.DENSE else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _tuples(values: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _keep(path: Path, name: str, found: Found) -> None:
    try:
        keep(path, name, asdict(found))
    except OSError as error:
        log.warning("Which products were found right and quick is not kept: %s", error)
