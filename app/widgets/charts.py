"""The plot of accepted tokens per round, drawn by Plotly in the page.

Plotly's own script, as its package ships it, is served by this process and fetched when there is
something to draw; ``Plotly.react`` keeps the drawing in place while it grows, where ``gr.Plot``
would build it anew. Colours come from the style sheet, so that it follows light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gradio as gr
import plotly

from core.records import Fate, Round

PLOTLY_SCRIPT = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
ASSETS = Path(__file__).resolve().parents[2] / "assets"


def RoundsChart(**kw: object) -> gr.HTML:
    """The component; its value is what ``rounds_value`` returns. Needs ``PLOTLY_SCRIPT`` as a static file."""
    template = (
        "<h2 class='margin-title'>Accepted tokens per round</h2>"
        "<div class='plot-note'></div><div class='plot' role='img' hidden></div>"
    )
    return gr.HTML(
        rounds_value(()),
        html_template=template,
        js_on_load=chart_script("rounds_chart.js"),
        apply_default_css=False,
        **kw,
    )


def chart_script(name: str) -> str:
    """The script of that name in the assets, behind what loads Plotly and redraws (``plotly.js``)."""
    source = json.dumps("/gradio_api/file=" + PLOTLY_SCRIPT.as_posix())
    parts = [(ASSETS / file).read_text("utf-8") for file in ("plotly.js", name)]
    return "\n".join([f"const SOURCE = {source};", *parts])


def rounds_value(rounds: Sequence[Round]) -> str:
    """What the chart draws, as JSON: for each round how many drafts were accepted and how many not.

    ``mean`` is the mean of accepted tokens over the rounds so far. Rounds without drafts count as 0. ``k``,
    where K was chosen before each round, is what was chosen. A reply in which nothing was drafted has nothing
    to draw; ``note`` says so.
    """
    if not any(round.drafted for round in rounds):
        note = "Nothing was drafted in this reply." if rounds else "Accepted tokens per round appear here."
        return json.dumps({"note": note})
    accepted = [round.count(Fate.ACCEPTED) for round in rounds]
    total, mean = 0, []
    for count, kept in enumerate(accepted, 1):
        total += kept
        mean.append(float(f"{total / count:.3f}"))
    summary = f"Accepted tokens per round: {total} in {len(accepted)} rounds, {mean[-1]:.2f} in the mean."
    value: dict[str, object] = {
        "accepted": accepted,
        "missed": [round.drafted - kept for round, kept in zip(rounds, accepted, strict=True)],
        "mean": mean,
        "top": max(round.drafted for round in rounds),
    }
    if any(round.num_draft_tokens_reason == "auto" for round in rounds):
        value["k"] = ks = [round.num_draft_tokens for round in rounds]
        value["top"] = max(ks)
        summary += f" K was chosen before each round, from {min(ks)} to {max(ks)}."
    return json.dumps({**value, "summary": summary})
