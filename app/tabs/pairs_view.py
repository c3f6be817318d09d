"""Pairs in words and HTML: what runs and what it costs, what another would need, what is asked before.

Pure functions; all text in them is escaped. Knows no component.
"""

from __future__ import annotations

from app.serving import choosing
from app.widgets.display import as_html
from app.widgets.masthead import precision
from core.drafters.names import title as drafter_title
from core.engine.auto_k import MOST, AutoK
from core.figures.costs import Costs
from core.models.checkpoint import Checkpoint
from core.models.embedded import NAME
from core.models.memory import OVERHEAD, free_bytes, gigabytes
from core.models.sources import EMBEDDED
from core.pairs.catalogue import CATALOGUE, Entry
from core.pairs.spec import PairSpec
from core.records import PairInfo

FORM_NAMES = {
    "auto": "What suits the device",
    "none": "Not quantised",
    "int8": "int8, for processors",
    "int4": "int4, for processors",
    "nf4": "NF4",
    "llm-int8": "LLM.int8",
}
EMBEDDED_PAIR = f"{NAME} and drafts made for it. They come with Redline."
TOO_LITTLE = (
    "This needs more memory than is free: unload what runs first, quantise further, or choose a smaller pair."
)
GATES = {True: "gated: the hub asks for a login and consent", False: "not gated"}


def failure(sentence: str) -> str:
    return f"<div class='loading failed' role='alert'><p>{as_html(sentence)}</p></div>"


def rows(pairs: list[tuple[str, str | None]]) -> str:
    """A list of names and values, each inert; what is None or empty is left out."""
    shown = (
        f"<div><dt>{as_html(name)}</dt><dd>{as_html(value)}</dd></div>" for name, value in pairs if value
    )
    return f"<dl class='facts'>{''.join(shown)}</dl>"


def model(role: str, name: str, pairs: list[tuple[str, str | None]]) -> str:
    """One of the two models that run."""
    head = f"<p class='role'>{role}</p><h3>{as_html(name)}</h3>"
    return f"<section class='model'>{head}{rows(pairs)}</section>"


def running(info: PairInfo, notes: list[str], cache_bytes: int, cache_limit: int) -> str:
    """The pair that runs, as it runs."""
    target = [
        ("Runs as", precision(info.quantization, info.dtype)),
        ("Context", f"{info.context_length:,} tokens"),
        ("Fingerprint", info.target_fingerprint[:12]),
    ]
    draft = [
        ("Runs as", precision(info.draft_quantization, info.draft_dtype)),
        ("Context", f"{info.draft_context_length:,} tokens"),
        ("Fingerprint", info.draft_fingerprint[:12]),
    ]
    kept = f"{megabytes(cache_bytes)} of {megabytes(cache_limit)}" if cache_limit else None
    shown = model("Target", info.target, target)
    shown += model("Draft", info.draft, draft) if info.draft else model("Draft", "none", [])
    shown += rows(
        [
            ("Device", info.device),
            ("Drafting", drafter_title(info.drafter)),
            ("Read and kept", kept),
        ]
    )
    said = [*notes, *([info.exactness_note] if info.exactness_note else [])]
    return shown + "".join(f"<p class='notice'>{as_html(sentence)}</p>" for sentence in said)


def passes(costs: Costs | None, acceptance: float) -> str:
    """What the pair's passes take on this machine, and the K that is best by it; "" where nobody knows.

    ``acceptance`` is the one to expect before anything was drafted, 0 to 1.
    """
    if costs is None:
        return ""
    best = AutoK(costs, acceptance).choose("other", MOST)
    lines = []
    for k, took in enumerate(costs.verify):
        promised = f"{costs.speedup(acceptance, [k]):.2f}×"
        cells = f"<td>{milliseconds(took)}</td><td>{promised}{'<i>best</i>' if k == best else ''}</td>"
        name = k or "0, plain"
        lines.append(f"<tr{' class=best' if k == best else ''}><th scope='row'>{name}</th>{cells}</tr>")
    return (
        "<section class='model passes'><p class='role'>What passes cost here</p>"
        f"{rows([('Draft step', milliseconds(costs.draft))])}"
        "<table class='costs'><thead><tr><th scope='col'>K</th><th scope='col'>Pass over K + 1 rows</th>"
        f"<th scope='col'>Speed at {acceptance:.0%} acceptance</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></section>"
    )


def milliseconds(took: float) -> str:
    return f"{1000 * took:.1f} ms"


def facts(name: str, how: dict[str, str]) -> str:
    """What speaks for and against a pair of the picker, before anything is fetched."""
    free = _free(how["device"])
    entry = CATALOGUE.get(name)
    if entry is None:
        said = f"<p class='quiet'>{EMBEDDED_PAIR}</p>" if name == EMBEDDED else ""
        return said + rows([("Memory free", free)])
    needed, there = choosing.needed_bytes(entry, how), free_bytes(choosing.device_of(how["device"]))
    short = there is not None and needed > there
    return rows(_entry_rows(entry, how, free)) + (f"<p class='notice'>{TOO_LITTLE}</p>" if short else "")


def _entry_rows(entry: Entry, how: dict[str, str], free: str | None) -> list[tuple[str, str | None]]:
    missing = [source for source in (entry.target, entry.draft) if not choosing.is_here(source)]
    return [
        ("Target", f"{entry.target} ({billions(entry.target_parameters)})"),
        ("Draft", f"{entry.draft} ({billions(entry.draft_parameters)})"),
        ("Size ratio", f"{entry.size_ratio:.1f} : 1"),
        ("Memory needed", gigabytes(choosing.needed_bytes(entry, how))),
        ("Memory free", free),
        (
            "On this disk",
            "all of it" if not missing else "the other model" if len(missing) == 1 else "nothing yet",
        ),
        ("Licence", f"{entry.licence}, {GATES[entry.gated]}"),
    ]


def question_about(pair: PairSpec) -> str:
    """What is asked before a pair of the catalogue is loaded, if anything. Raises LoadError."""
    download = choosing.bytes_to_download(pair)
    return f"<p role='alert'>This downloads {gigabytes(download)}.</p>" if download else ""


def question_about_own(pair: PairSpec) -> str:
    """What is asked before a pair that no catalogue describes is loaded: what its small files tell of it.

    Raises LoadError for what they tell against it.
    """
    from core.pairs.plan import plan_models  # which imports transformers

    plans = plan_models(pair)
    device = plans[0].device
    models = [plan.checkpoint for plan in plans]
    download = sum(model.weight_bytes for model in models if not model.cached)
    needed, there = sum(plan.need.bytes for plan in plans) + OVERHEAD, free_bytes(device)
    asked = f"This downloads {gigabytes(download)}." if download else "Nothing is left to download."
    shown = rows(
        [
            *zip(("Target", "Draft"), map(_named_model, models), strict=False),
            ("Size ratio", _size_ratio([model.parameters for model in models])),
            ("Memory needed", gigabytes(needed)),
            ("Memory free", _free(pair.device)),
            ("Licence", "; ".join(dict.fromkeys(map(_terms, models)))),
        ]
    )
    short = there is not None and needed > there
    return f"<p role='alert'>{asked}</p>{shown}" + (f"<p class='notice'>{TOO_LITTLE}</p>" if short else "")


def _named_model(model: Checkpoint) -> str:
    return f"{model.name} ({billions(model.parameters)})" if model.parameters else model.name


def _size_ratio(parameters: list[int | None]) -> str | None:
    return f"{parameters[0] / parameters[1]:.1f} : 1" if len(parameters) == 2 and all(parameters) else None


def _terms(model: Checkpoint) -> str:
    """Licence and gating, as far as they are known: a folder knows no gate."""
    licence = model.licence or "not stated"
    return licence if model.gated is None else f"{licence}, {GATES[model.gated]}"


def _free(device: str) -> str | None:
    device = choosing.device_of(device)
    free = free_bytes(device)
    return None if free is None else f"{gigabytes(free)} {'on the card' if device == 'cuda' else 'in memory'}"


def billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else gigabytes(count)
