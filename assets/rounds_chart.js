// The script of app/widgets/charts.py's component; assets/plotly.js stands in front of it.
const plot = element.querySelector('.plot'), note = element.querySelector('.plot-note');
const HEIGHT = 200;
plot.style.height = `${HEIGHT}px`;  // once resized, Plotly goes by its element's
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
    {
      type: 'scatter', mode: 'lines', x, y: value.mean, name: 'mean', line: {color: colour('--desk-red'), width: 2},
      hovertemplate: 'mean so far %{y:.2f}<extra></extra>',
    },
    ...(value.k ? [{
      type: 'scatter', mode: 'lines', x, y: value.k, name: 'K', hovertemplate: 'round %{x}: K = %{y}<extra></extra>',
      line: {color: ink, width: 1.25, shape: 'hvh'},
    }] : []),
  ], {
    barmode: 'stack', bargap: accepted.length > 80 ? 0 : 0.15, height: HEIGHT,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    margin: {l: 24, r: 4, t: 26, b: 32}, font: {family: 'inherit', size: 11, color: ink},
    xaxis: {...axis, title: {text: 'round', standoff: 2, font: {size: 11}}, showgrid: false, tickformat: 'd',
      ...(value.accepted.length > 12 ? {} : {tick0: 1, dtick: 1})},  // else rounds would be numbered twice
    yaxis: {...axis, dtick: value.top > 8 ? 4 : value.top > 4 ? 2 : 1, range: [0, value.top + 0.2]},
    legend: {
      orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: {size: 11}, entrywidth: 58, itemwidth: 30,
      traceorder: 'normal',
    },
  }, {displayModeBar: false, responsive: true});
}
keepDrawn(draw, note);
