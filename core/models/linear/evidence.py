"""Which forms products take on this machine, by evidence: each that could run is checked, then timed.

A processor's flags do not say it. A kernel that is fast on one machine took a second for a token on another
with the same flags, and another gave wrong sums without a word. So at the first load of a model on a machine
every form of ``core.models.linear.forms`` is

- held against float64 on hard inputs: sums as large as they get, one huge activation among small ones,
  rows of zeros, 1 to 17 rows; what cannot run here drops out at this point, and so does what takes over
  ``HOPELESS`` times as long as the quickest, after that one call;
- asked whether a row depends on the rows beside it;
- timed in the model's sizes, as a pass would run it (weights out of the near caches), at 1, K + 1 and 8
  rows and at a prompt's 256.

The fastest right ones run. What was found is kept in a folder by processor, versions, number of threads
and sizes, so that the same machine always gives the same numbers. What was found beside much other work,
which misleads, is kept until the machine is found quiet. Knows sizes and no model; and not how far a form's
rounding takes a model from what it was, which ``core.fidelity`` measures.

Run: ``python -m core.models.linear`` shows what was found here (``--again`` looks anew).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from core.kept import keep
from core.models import Progress, silent
from core.models.linear import forms
from core.models.linear.forms import maker
from core.models.linear.products import MANY, Linear
from core.threads import BUSY, busy_percent, use

log = logging.getLogger(__name__)

VERSION = 2  # of what is measured, and how: raise it when that changes
KEPT = "products.json"
ROWS = (1, 4, 8, MANY)  # of the passes that are timed; 4 are those of K = 3
CHECKED_ROWS = 17  # a round has no more
HOPELESS = 50
NEAR = 3
SLOW = 0.1  # seconds of a call that is not repeated
QUICK, FEW_ROWS = 0.005, (2, 4, 17)  # of a form whose first call takes longer, fewer row counts are checked
BUDGET = 2.0  # seconds of timing after which no other turn begins
DISTURBED = "Other work disturbed these times: they are taken anew at a start when the machine is quiet."
LOOKING = "Finding the fastest right products on this processor"
WORTH = 2
FASTER = 0.5
CLEARLY = 0.8
UNLIKE = "a row of a prompt depends on where it stands"
FLOAT = "float32"
TOLERANCE = {"int8": 1e-5, "int4": 0.01, "bfloat16": 0.01, "float32": 1e-5}
LAYERS = 2  # layers that are timed, for all there are
MOST_WEIGHTS = 2_000_000  # of a matrix that is timed; of a larger one so many stand for all
REPEATS = 3
# A reply of which the whole is shortest wins: passes over one row, over a round's, and over a prompt's.
TYPICAL = {1: 10, 4: 40, MANY: 1}


@dataclass(frozen=True)
class Sizes:
    """Of a model's products, (out, in): those of one of ``count`` layers, and the head's. Activations of a
    layer's last product have outliers."""

    layers: tuple[tuple[int, int], ...]
    count: int
    head: tuple[int, int]


EMBEDDED = Sizes(((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576))


@dataclass(frozen=True)
class Evidence:
    """What was found of one form.

    ``error``: the largest against float64, as a share of what is summed, signs aside; None where it did not
    run. ``alone``: the largest difference between a row of several and the same alone, as a share of the
    largest number, 0 where bit-equal. ``layers`` and ``head`` are seconds for ``ROWS`` rows, empty where not
    timed. ``verdict`` says why it cannot be chosen, and is empty where it can.
    """

    form: str
    error: float | None = None
    alone: float = 0.0
    layers: tuple[float, ...] = ()
    head: tuple[float, ...] = ()
    verdict: str = ""

    @property
    def right(self) -> bool:
        return not self.verdict


@dataclass(frozen=True)
class Found:
    """The forms to run, of a target's ``layers`` and ``head`` and of a ``draft``, and the dtype of
    ``attention``.

    ``table`` is the evidence, and ``attended`` that on attention: seconds of a layer's at 4 and 256 rows
    behind 1,024 ids, by dtype. ``rows_tested`` says whether the model made of these forms was asked how far
    its rows depend on each other, and ``rows_note`` is the sentence about it, None where they do not.
    ``others`` is the share of the machine's time, in percent, that other processes took meanwhile.
    """

    layers: str
    head: str
    draft: str
    attention: str
    table: tuple[Evidence, ...]
    attended: dict[str, tuple[float, ...]]
    rows_tested: bool = False
    rows_note: str | None = None
    others: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether so much else was running that the times mislead."""
        return self.others > BUSY

    @property
    def sentence(self) -> str | None:
        """What to say where nothing quantised is right and quick."""
        quantised = [entry for entry in self.table if forms.family(entry.form) not in forms.DENSE]
        if forms.family(self.layers) not in forms.DENSE or any(entry.right for entry in quantised):
            return None
        return (
            "No quantised product is right and quick on this processor, so the weights run in "
            f"{self.layers}, which is slower: python -m core.models.linear shows why."
        )

    @property
    def reads_bfloat16(self) -> bool:
        """Whether dense products of many rows are faster in bfloat16 than in float32."""
        many = {entry.form: entry.layers[-1] for entry in self.table if entry.right and entry.layers}
        return many.get("bfloat16", math.inf) < many[FLOAT]

    def best(self, family: str) -> str:
        """The fastest right form of a family for activations with outliers, and with nothing beside; the
        fastest dense one where none takes at most ``WORTH`` times as long as that, for who asks for a family
        asks for less memory, too."""
        right = {entry.form: _typical(entry.layers) for entry in self.table if entry.right}
        dense = min((form for form in right if form in forms.DENSE), key=right.__getitem__)
        left_out = forms.ONE, forms.BESIDE
        own = [form for form in right if forms.family(form) == family and not form.startswith(left_out)]
        fastest = min(own, key=right.__getitem__, default=dense)
        return fastest if right[fastest] <= WORTH * right[dense] else dense


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
    clock = _Others()
    table, quickest, first_call = [], math.inf, {}
    for done, form in enumerate(names):
        say(LOOKING, done / len(names) / 2)
        entry, first_call[form] = check(form, sizes, HOPELESS * quickest)
        table.append(entry)
        if entry.right:
            quickest = min(quickest, first_call[form])
    table = _timed(_shortlist(table, first_call), sizes, say)
    table += _beside(table, sizes)
    attended = attention_seconds()
    targets = [entry for entry in table if forms.is_close(entry.form)]
    return Found(
        layers=_fastest(targets),
        # 4 bits would change what a target says, and so would one part, for the final norm leaves outliers.
        head=_fastest((e for e in table if e.form.startswith((forms.TWO, *forms.DENSE))), "head"),
        draft=min((e for e in table if e.right), key=lambda e: e.layers[0] + e.head[0] / 3).form,
        attention=_attention(attended),
        table=tuple(table),
        attended=attended,
        others=clock.percent(),
    )


class _Others:
    """How much of the machine's time processes other than this one take, from now on."""

    def __init__(self) -> None:
        self._before = self._now()

    def percent(self) -> float:
        wall, busy, own = (now - before for now, before in zip(self._now(), self._before, strict=True))
        cores = os.cpu_count() or 1
        return max(0.0, 100 * (busy - own) / (wall * cores)) if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        import psutil  # which the run on a card does without

        times = psutil.cpu_times()._asdict()
        busy = sum(seconds for name, seconds in times.items() if name not in _IDLE)
        return time.monotonic(), busy, time.process_time()


_IDLE = ("idle", "iowait", "guest", "guest_nice")  # the last two are counted as user's, too


def _fastest(entries: Iterable[Evidence], of: str = "layers") -> str:
    """The fastest right form. Dense products, whose rows depend on how many there are, have to be ``WORTH``
    times as fast as quantised ones."""
    taken = {e.form: _typical(getattr(e, of)) for e in entries if e.right}
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


def reads_alike(product: Linear) -> bool:
    """Whether a row of a prompt comes out the same wherever the prompt is cut, bit for bit."""
    x = torch.randn(MANY, product.shape[1], generator=torch.Generator().manual_seed(3))
    whole = product.many(x)
    cuts = ((0, 1), (0, 255), (7, 3), (100, 17), (100, 156), (255, 1))
    return all(torch.equal(product.many(x[at : at + rows]), whole[at : at + rows]) for at, rows in cuts)


def check(form: str, sizes: Sizes, most_seconds: float = math.inf) -> tuple[Evidence, float]:
    """Whether ``form`` is right here, and seconds of a call; more than ``most_seconds`` end the check."""
    evidence, worst, alone, taken = Evidence(form), 0.0, 0.0, 0.0
    for out, inside in {sizes.layers[0], sizes.layers[-1]}:
        out = min(out, 1024)
        weight = hard_weight(out, inside)
        if not forms.takes(form, weight):
            return replace(evidence, verdict=f"does not take a matrix of {out} × {inside}"), taken
        x = hard_inputs(inside, forms.half(form))
        try:
            product = maker(form)(weight)
            product(x)  # kernels set themselves up at their first call
            start = time.perf_counter()
            y = product(x)
            taken = time.perf_counter() - start
        except (RuntimeError, AttributeError) as error:
            return replace(evidence, verdict=f"does not run here ({_first_line(error)})"), taken
        worst = max(worst, _error(y, x, forms.rounded(form, weight)))
        for _ in range(2) if taken < SLOW else ():  # one call may be disturbed
            start = time.perf_counter()
            product(x)
            taken = min(taken, time.perf_counter() - start)
        if taken > most_seconds and forms.family(form) not in forms.DENSE:
            quick = 1e3 * most_seconds / HOPELESS
            verdict = f"too slow: {1e3 * taken:.0f} ms where the quickest takes {quick:.2g}"
            return replace(evidence, error=worst, verdict=verdict), taken
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))  # whose sums are rounded
        single = torch.cat([product(row[None]) for row in x])
        for rows in range(2, CHECKED_ROWS + 1) if taken < QUICK else FEW_ROWS:
            difference = (product(x[:rows]) - single[:rows]).abs().max() / single.abs().max()
            alone = max(alone, difference.item())
    verdict = ""
    if worst > TOLERANCE[forms.family(form)] and form != FLOAT:  # what is left where nothing is right
        verdict = f"wrong by {worst:.0%}"
    elif alone and forms.family(form) not in forms.DENSE:
        verdict = f"a row depends on the rows beside it, by {alone:.0e}"  # the dense ones are a last resort
    return replace(evidence, error=worst, alone=alone, verdict=verdict), taken


def product_dependence(
    linear: Linear,
    in_features: int,
    max_rows: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest difference any earlier row shows when the last row's input grows a hundredfold.

    Every row count from 2 to ``max_rows`` is tried, and each row is compared with its own one-row
    product too; 0.0 means bit-equal throughout. (``core.models.rows`` tests whole models.)
    """
    x = torch.randn(max_rows, in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    worst = 0.0
    single = torch.cat([linear(x[i : i + 1]) for i in range(max_rows)])
    for rows in range(2, max_rows + 1):
        calm = linear(x[:rows])
        loud_input = x[:rows].clone()
        loud_input[-1] *= 100
        loud = linear(loud_input)
        for difference in (calm[:-1] - loud[:-1], calm - single[:rows]):
            worst = max(worst, difference.abs().max().item())
    return worst


def hard_weight(out: int, inside: int) -> torch.Tensor:
    """A matrix (out, in) float32, half of whose rows are as large as its numbers get, and one is zero."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out, inside, generator=generator)
    weight[: out // 4] = weight[: out // 4].sign()
    weight[out // 4 : out // 2] = 1.0
    weight[-1] = 0.0
    return weight


def hard_inputs(inside: int, half: int) -> torch.Tensor:
    """``CHECKED_ROWS`` rows of whole numbers up to ``half``, which every form holds without rounding."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-half, half + 1, (CHECKED_ROWS, inside), generator=generator).float()
    x[:, 0] = half  # a row's largest number is its scale
    x[0], x[1], x[2] = half, -half, 0
    x[3, ::2], x[3, 1::2] = half, -half
    x[4, 1:] = x[4, 1:].sign()  # one huge activation among small ones
    return x


def _error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest difference from the product in float64, as a share of the sum of the sizes in it."""
    x, weight = x.double(), weight.double()
    sizes = (x.abs() @ weight.abs().T).clamp_min(1e-30)
    error = ((y.double() - x @ weight.T).abs() / sizes).amax().item()
    return error if math.isfinite(error) else math.inf


def _timed(table: Sequence[Evidence], sizes: Sizes, say: Progress) -> list[Evidence]:
    """The table with seconds for all that is right. Passes of the forms take turns, so that what disturbs the
    machine meets all of them. On a slow machine there is one turn, and what a prompt's rows take is reckoned
    from what few take, at most."""
    flush = torch.empty(64 * 1024 * 1024, dtype=torch.uint8)
    weights: dict[tuple[int, int], torch.Tensor] = {}
    models = {entry.form: _Model(entry.form, sizes, weights) for entry in table if entry.right}
    seconds = {form: [[math.inf] * len(ROWS), [math.inf] * len(ROWS)] for form in models}
    begun = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() - begun > BUDGET:
            break
        for done, (form, model) in enumerate(models.items()):
            say(LOOKING, 0.5 + (repeat + done / len(models)) / REPEATS / 2)
            for place, rows in enumerate(ROWS):
                if rows == MANY and repeat:
                    continue
                few = seconds[form][0][place - 1]  # of as many rows as stand before
                if rows == MANY and MANY / ROWS[place - 1] * few > BUDGET / 2:
                    seconds[form][0][place] = MANY / ROWS[place - 1] * few
                    seconds[form][1][place] = seconds[form][1][0]
                    continue
                flush.fill_(repeat)
                for kind, work in enumerate((model.layers, model.head)):
                    start = time.perf_counter()
                    work(rows)
                    taken = time.perf_counter() - start
                    seconds[form][kind][place] = min(seconds[form][kind][place], taken)
    return [
        replace(
            entry,
            layers=tuple(models[entry.form].layers_scale * s for s in seconds[entry.form][0]),
            head=tuple(models[entry.form].head_scale * s for s in seconds[entry.form][1]),
        )
        if entry.form in models
        else entry
        for entry in table
    ]


class _Model:
    """The products of a model of these sizes in one form, or so many of them that they can stand for all."""

    def __init__(self, form: str, sizes: Sizes, weights: dict[tuple[int, int], torch.Tensor]):
        """``weights`` holds matrices by size, for all models to share."""
        makers = [maker(form)] * (len(sizes.layers) - 1) + [maker(forms.in_two(form))]
        self.stack = [
            [
                make(_weight(size, MOST_WEIGHTS, weights))
                for make, size in zip(makers, sizes.layers, strict=True)
            ]
            for _ in range(LAYERS)
        ]
        self.top = makers[-1](_weight(sizes.head, 2 * MOST_WEIGHTS, weights))
        whole = sizes.count * sum(math.prod(size) for size in sizes.layers)
        self.layers_scale = whole / sum(math.prod(p.shape) for layer in self.stack for p in layer)
        self.head_scale = math.prod(sizes.head) / math.prod(self.top.shape)
        widths = {inside for _, inside in (*sizes.layers, sizes.head)}
        self.inputs = {(rows, width): torch.randn(rows, width) for rows in ROWS for width in widths}

    def layers(self, rows: int) -> None:
        for layer in self.stack:
            for product in layer:
                product.unscaled(self.inputs[rows, product.shape[1]], rows == MANY)

    def head(self, rows: int) -> None:
        """A pass scores a prompt's last id alone."""
        product = self.top
        product.unscaled(self.inputs[1 if rows == MANY else rows, product.shape[1]])


def _weight(size: tuple[int, int], most: int, weights: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """A matrix of this size, or as many of its rows as come to ``most`` weights, 64 at least."""
    out, inside = size
    rows = min(out, max(64, most // inside // 64 * 64))
    if (rows, inside) not in weights:
        weights[rows, inside] = torch.randn(rows, inside)
    return weights[rows, inside]


@torch.inference_mode()
def attends_alike(name: str) -> bool:
    """Whether a row of attention in this dtype is the same in passes of more and of fewer blocks of rows."""
    generator = torch.Generator().manual_seed(4)
    query, keys = (torch.randn(1, 3, n, 64, generator=generator).to(forms.DENSE[name]) for n in (56, 512))
    mask = torch.zeros(56, 512, dtype=forms.DENSE[name])

    def attended(rows: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(query[:, :, :rows], keys, keys, attn_mask=mask[:rows])

    whole = attended(56)
    return all(torch.equal(attended(rows), whole[:, :, :rows]) for rows in range(8, 56, 8))


def _attention(attended: Mapping[str, Sequence[float]]) -> str:
    """The dtype of attention: float32, or the one of 16 bits where that is faster by far and as steady."""
    taken = {name: TYPICAL[4] * few + TYPICAL[MANY] * many for name, (few, many) in attended.items()}
    faster = taken["bfloat16"] < CLEARLY * taken[FLOAT] or not attends_alike(FLOAT)
    return "bfloat16" if faster and attends_alike("bfloat16") else FLOAT


@torch.inference_mode()
def attention_seconds() -> dict[str, tuple[float, ...]]:
    """Seconds of attention as a layer of the embedded target has it, behind 1,024 ids, by dtype, for 4 and
    for 256 rows of a pass."""
    found = {}
    for name, dtype in forms.DENSE.items():
        keys = torch.randn(1, 3, 1280, 64).to(dtype)
        seconds = []
        for rows in (4, MANY):
            query = torch.randn(1, 3, -(-3 * rows // 8) * 8, 64).to(dtype)
            mask = torch.zeros(query.shape[2], keys.shape[2], dtype=dtype)
            least = math.inf
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
                least = min(least, time.perf_counter() - start)
            seconds.append(least)
        found[name] = tuple(seconds)
    return found


def _typical(seconds: Sequence[float]) -> float:
    """Seconds that a reply's passes take, of those that one takes at each of ``ROWS``."""
    return sum(TYPICAL.get(rows, 0) * taken for rows, taken in zip(ROWS, seconds, strict=True))


def _name(sizes: Sizes) -> str:
    """What the evidence depends on, in one word."""
    narrowed = [os.environ.get(name) for name in NARROWING]
    what = (VERSION, _processor(), narrowed, torch.__version__, _THREADS, sizes)
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


@functools.cache
def _processor() -> tuple[str, ...]:
    """What the system says of this processor: its name and what it can do."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        first = ["model name: " + _mac_name()]
    told = (line for line in first if line.startswith(("model name", "flags", "CPU", "Features")))
    return platform.machine(), platform.processor(), *told


def _mac_name() -> str:
    """What a Mac calls its processor, which Python's platform does not tell; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
