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

SCRIPT = (
    f"const SOURCE = {json.dumps('/gradio_api/file=' + PLOTLY_SCRIPT.as_posix())};"
    + """
const plot = element.querySelector('.plot'), note = element.querySelector('.plot-note');
let drawing = null, again = false;
function library() {
  window.redlinePlotly ??= new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = (window.gradio_config?.root || '') + SOURCE;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { window.redlinePlotly = undefined; script.remove(); reject(); };
    document.head.appendChild(script);
  });
  return window.redlinePlotly;
}
function colour(name) { return getComputedStyle(element).getPropertyValue(name).trim(); }
async function draw() {
  const value = JSON.parse(props.value || '{}'), accepted = value.accepted || [];
  plot.hidden = !accepted.length;
  note.hidden = !!accepted.length;
  note.textContent = value.note || '';
  plot.setAttribute('aria-label', value.summary || '');
  if (!accepted.length) return;
  const Plotly = await library();
  const x = accepted.map((_, i) => i + 1), ink = colour('--desk-ink-soft'), line = colour('--desk-line');
  const bar = (y, color, name, text) => ({type: 'bar', x, y, name, marker: {color}, hovertemplate: text});
  const axis = {color: ink, gridcolor: line, zeroline: false, fixedrange: true};
  await Plotly.react(plot, [
    bar(accepted, colour('--desk-accepted'), 'accepted', 'round %{x}: %{y} accepted<extra></extra>'),
    bar(value.missed, colour('--desk-missed'), 'not kept', 'round %{x}: %{y} not kept<extra></extra>'),
    {type: 'scatter', mode: 'lines', x, y: value.mean, name: 'mean', line: {color: colour('--desk-red'), width: 2},
     hovertemplate: 'mean so far %{y:.2f}<extra></extra>'},
  ], {
    barmode: 'stack', bargap: accepted.length > 80 ? 0 : 0.15, height: 200, paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)', margin: {l: 24, r: 4, t: 26, b: 32}, font: {family: 'inherit', size: 11, color: ink},
    xaxis: {...axis, title: {text: 'round', standoff: 2, font: {size: 11}}, showgrid: false, tickformat: 'd'},
    yaxis: {...axis, dtick: value.top > 8 ? 4 : value.top > 4 ? 2 : 1, range: [0, value.top + 0.2]},
    legend: {orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: {size: 11}, entrywidth: 58, itemwidth: 30, traceorder: 'normal'},
  }, {displayModeBar: false, responsive: true});
}
// One drawing at a time: what arrives meanwhile is drawn once, after it.
function show() {
  if (drawing) { again = true; return; }
  drawing = draw().catch(() => { note.hidden = false; note.textContent = 'The plot could not be loaded.'; })
    .finally(() => { drawing = null; if (again) { again = false; show(); } });
}
watch('value', show);
new MutationObserver(show).observe(document.body, {attributeFilter: ['class']});
show();
"""
)


def RoundsChart(**kw: object) -> gr.HTML:
    """The component; its value is what ``rounds_value`` returns. Needs ``PLOTLY_SCRIPT`` as a static file."""
    template = "<h2 class='margin-title'>Accepted tokens per round</h2><div class='plot-note'></div><div class='plot' role='img' hidden></div>"
    return gr.HTML(rounds_value(()), html_template=template, js_on_load=SCRIPT, apply_default_css=False, **kw)


def rounds_value(rounds: Sequence[Round]) -> str:
    """What the chart draws, as JSON: for each round how many drafts were accepted and how many not.

    ``mean`` is the mean of accepted tokens over the rounds so far. Rounds without drafts count as 0.
    A reply in which nothing was drafted has nothing to draw; ``note`` says so.
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
    return json.dumps(
        {
            "accepted": accepted,
            "missed": [round.drafted - kept for round, kept in zip(rounds, accepted, strict=True)],
            "mean": mean,
            "top": max(round.drafted for round in rounds),
            "summary": summary,
        }
    )

