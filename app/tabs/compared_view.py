"""A comparison of drafters as HTML: how far it is, its table with bars, its name in the list.

Pure functions from ``core.record.compared``'s records and ``core.compare``'s steps to markup; all text in it
is escaped. The style sheet is ``assets/drafters.css``. No figure is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.chat.why import UNDEFINED
from app.widgets.display import as_html
from core.compare import Step
from core.drafters.names import DRAFTERS
from core.record.compared import DOMAINS, PLAIN, SPEEDUP, Comparison, Row, table
from core.record.domain_table import Estimate
from core.records import EXACT_VERIFIERS, Settings

# name, heading, small print, digits, factor
COLUMNS = (
    ("alpha", "α", "mean overlap", "{:.3f}", 1),
    ("draft_acceptance_rate", "Accepted", "of drafted", "{:.0f}%", 100),
    ("tokens_per_pass", "Per pass", "tokens", "{:.2f}", 1),
    ("seconds_per_round", "Drafting", "ms a round", "{:.1f}", 1e3),
    ("seconds_per_draft", "A draft", "ms a token", "{:.2f}", 1e3),
    ("tokens_per_second", "Tokens/s", "without prefill", "{:.1f}", 1),
)
USUAL = Settings().verifier
LEAST_SCALE = 1.5  # speed-ups that the bars have room for at least


def rule_name(verifier: str) -> str:
    """How drafts are judged, in few words."""
    exact = verifier in EXACT_VERIFIERS
    return f"{verifier} by {verifier}" if exact else f"{verifier.replace('-', ' ')}, not exact"


def title(comparison: Comparison) -> str:
    """A comparison in the list, as plain text."""
    names = dict.fromkeys(reply.drafter for reply in comparison.replies if reply.drafter != PLAIN)
    settings = comparison.settings
    when = comparison.created[:16].replace("T", " ")
    said = [f"{when} UTC", f"K = {settings.num_draft_tokens}", f"temperature {settings.temperature:g}"]
    said += [rule_name(settings.verifier)] * (settings.verifier != USUAL)
    said += ["not complete"] * (not comparison.complete)
    return f"{', '.join(said)}: {', '.join(names) or PLAIN} with {comparison.target}"


def progress(step: Step | None, running: bool, notes: Sequence[str] = ()) -> str:
    """How far a run is, and sentences about it; "" where there is nothing to say."""
    parts = []
    if running:
        share = step.done / step.total if step is not None and step.total else 0
        parts.append(f"<progress max='1' value='{share:.3f}' aria-label='Replies written'></progress>")
    if step is not None:
        parts.append(f"<span>{step.done} of {step.total} replies: {as_html(step.now)}</span>")
    elif running:
        parts.append("<span>Beginning</span>")
    parts += [f"<p class='notice'>{as_html(note)}</p>" for note in notes]
    return f"<div class='compare-progress' role='status'>{''.join(parts)}</div>" if parts else ""


def result(comparison: Comparison) -> str:
    """The table and its bars, code and then prose."""
    rows, settings = table(comparison), comparison.settings
    about = [as_html(comparison.target), f"K = {settings.num_draft_tokens}"]
    if settings.tree_width > 1:
        about.append(f"tree width {settings.tree_width}")
    about.append(f"temperature {settings.temperature:g}")
    about.append(f"up to {settings.max_new_tokens} tokens a reply")
    if settings.verifier != USUAL:
        about.append(f"judged {rule_name(settings.verifier)}" if settings.exact else "not exact")
    if not comparison.complete:
        about.append("not complete")
    parts = [f"<p class='compare-about'>{' · '.join(about)}</p>"]
    if not settings.exact:
        parts.append(
            f"<p class='notice'>Not exact: judged by the rule {as_html(settings.verifier)}, "
            "which changes what the target would write.</p>"
        )
    ends = [end for row in rows for end in _ends(row.figures[SPEEDUP])]
    scale = max([LEAST_SCALE, *(1.03 * end for end in ends)])
    for domain in DOMAINS:
        if own := [row for row in rows if row.domain == domain]:
            parts.append(_domain(domain, own, scale))
    return f"<div class='compare-result'>{''.join(parts)}</div>"


def _domain(domain: str, rows: Sequence[Row], scale: float) -> str:
    order = list(DRAFTERS)
    heads = "".join(f"<th scope='col'>{head}<small>{small}</small></th>" for _, head, small, _, _ in COLUMNS)
    body = []
    for row in sorted(rows, key=lambda row: (row.drafter != PLAIN, order.index(row.drafter))):
        cells = "".join(_cell(row.figures[name], form, by) for name, _, _, form, by in COLUMNS)
        body.append(
            f"<tr><th scope='row'>{as_html(row.drafter)}</th>"
            f"<td class='bar'>{_bar(row.figures[SPEEDUP], scale, row.drafter)}</td>{cells}</tr>"
        )
    return (
        f"<h3>{domain.capitalize()} <small>{_fastest(rows)}</small></h3>"
        "<div class='compare-scroll' tabindex='0'><table class='compare-table'><thead><tr>"
        "<th scope='col'>Drafter</th><th scope='col'>Speed-up<small>over plain</small></th>"
        f"{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _fastest(rows: Sequence[Row]) -> str:
    """One sentence: does drafting pay here, and by how many replies is that known?"""
    count = max(row.replies for row in rows)
    replies = f"{count} {'reply' if count == 1 else 'replies'} each"
    measured = [row for row in rows if row.figures[SPEEDUP].value is not None]
    if not measured:
        return replies
    best = max(measured, key=lambda row: row.figures[SPEEDUP].value)
    value, interval = best.figures[SPEEDUP].value, best.figures[SPEEDUP].interval
    if value <= 1:
        return f"nothing was faster than plain; {replies}"
    sure = "" if interval is None or interval[0] > 1 else ", which may be chance"
    return f"{as_html(best.drafter)} was fastest, {value:.2f}× plain{sure}; {replies}"


def _ends(estimate: Estimate) -> tuple[float, ...]:
    return () if estimate.value is None else estimate.interval or (estimate.value,)


def _bar(estimate: Estimate, scale: float, drafter: str) -> str:
    """The speed-up as a bar from 0, a line at 1, and a whisker over the interval."""
    value = 1.0 if drafter == PLAIN else estimate.value
    if value is None:
        return UNDEFINED
    low, high = estimate.interval or (value, value)
    kind = "base" if drafter == PLAIN else "gain" if value >= 1 else "loss"
    start, length, fill, one = (f"{100 * x / scale:.2f}%" for x in (low, high - low, value, 1))
    whisker, told = "", "1×" if drafter == PLAIN else f"{value:.2f}×"
    if high > low:
        whisker = f"<i class='whisker' style='left:{start};width:{length}'></i>"
        told += f" <small>{low:.2f} to {high:.2f}</small>"
    return (
        f"<div class='speed {kind}'><span class='track' aria-hidden='true'>"
        f"<i class='fill' style='width:{fill}'></i><i class='one' style='left:{one}'></i>{whisker}</span>"
        f"<b>{told}</b></div>"
    )


def _cell(estimate: Estimate, form: str, by: float) -> str:
    if estimate.value is None:
        return f"<td>{UNDEFINED}</td>"
    interval = ""
    if estimate.interval:
        low, high = (form.format(by * end) for end in estimate.interval)
        interval = f"<small>{low} to {high}</small>"
    return f"<td>{form.format(by * estimate.value)}{interval}</td>"
