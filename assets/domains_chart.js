// The script of app/tabs/domains_tab.py's chart; assets/plotly.js stands in front of it.
const plot = element.querySelector('.plot'), note = element.querySelector('.plot-note');
const HEIGHT = 380;
plot.style.height = `${HEIGHT}px`;  // once resized, Plotly goes by its element's
const BOX = 0.34, FEWEST = 5, MOST = 400;  // a box from so many replies up; with more than MOST, outliers only
function draw() {
  const all = JSON.parse(props.value || '{}'), value = all.measures?.[all.metric] || {}, domains = value.domains || [];
  plot.hidden = !domains.length;
  note.hidden = !!domains.length;
  note.textContent = value.note || '';
  plot.setAttribute('aria-label', value.summary || '');
  if (!domains.length) return Promise.resolve();
  return library().then(Plotly => drawWith(Plotly, value, domains));
}
function drawWith(Plotly, value, domains) {
  const ink = colour('--desk-ink'), soft = colour('--desk-ink-soft'), line = colour('--desk-line');
  const dot = colour('--desk-dot'), red = colour('--desk-red'), narrow = element.clientWidth < 560;
  const family = getComputedStyle(element).fontFamily;
  const of = wanted => domains.flatMap((domain, i) => wanted(domain.values) ? domain.values.map((y, n) => ({
    x: i - 0.14, y, text: `${domain.label}: ${domain.texts[n]}`,
  })) : []);
  const replies = (points, more) => ({
    type: 'box', x: points.map(p => p.x), y: points.map(p => p.y), text: points.map(p => p.text), width: BOX,
    boxpoints: 'all', pointpos: 0, jitter: 0.55, hoveron: 'points', hovertemplate: '%{text}<extra></extra>',
    marker: {color: dot, size: 6, opacity: 0.75}, line: {color: soft, width: 1.25}, fillcolor: 'rgba(0,0,0,0)',
    name: 'a reply', showlegend: false, ...more,
  });
  const known = domains.map((domain, i) => ({...domain, x: i + 0.2}));
  const ends = (domain, end) => domain.interval ? Math.abs(domain.interval[end] - domain.value) : 0;
  const alone = domains.flatMap(({plain}, i) => plain === null ? [] : [[i - 0.38, plain], [i + 0.38, plain], [null, null]]);
  const traces = [
    replies(of(values => values.length >= FEWEST && values.length <= MOST)),
    replies(of(values => values.length > MOST), {boxpoints: 'outliers'}),
    replies(of(values => values.length < FEWEST), {line: {color: 'rgba(0,0,0,0)', width: 0}}),
    // The boxes' own entry in the legend would be a square.
    {type: 'scatter', mode: 'markers', x: [null], y: [null], name: 'a reply', marker: {color: dot, size: 7}},
    {
      type: 'scatter', mode: 'markers', x: known.map(d => d.x), y: known.map(d => d.value), text: known.map(d => d.text),
      name: 'all rounds, 95% interval', marker: {symbol: 'diamond', color: red, size: 10},
      error_y: {type: 'data', symmetric: false, array: known.map(d => ends(d, 1)), arrayminus: known.map(d => ends(d, 0)),
        color: red, thickness: 2, width: 5},
      hovertemplate: '%{text}<extra></extra>',
    },
    {
      type: 'scatter', mode: 'lines', x: alone.map(p => p[0]), y: alone.map(p => p[1]), name: 'the target alone',
      line: {color: soft, width: 1.5, dash: 'dot'}, showlegend: alone.length > 0,
      hovertemplate: 'the target alone: %{y:.1f}<extra></extra>',
    },
  ];
  const axis = {color: soft, gridcolor: line, zeroline: false, fixedrange: true, tickfont: {size: 12}};
  const title = text => ({text, standoff: 8, font: {size: 12.5, color: soft}});
  return Plotly.react(plot, traces, {
    height: HEIGHT, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', template: 'none',
    margin: {l: narrow ? 52 : 62, r: 8, t: 34, b: 46}, font: {family, size: 12, color: soft},
    hoverlabel: {bgcolor: colour('--desk-paper'), bordercolor: line, font: {color: ink, family, size: 13}},
    xaxis: {...axis, showgrid: false, range: [-0.5, domains.length - 0.5], tickvals: domains.map((_, i) => i),
      ticktext: domains.map(d => `${d.label}<br>${d.count}`), tickfont: {size: narrow ? 11 : 12.5, color: ink}},
    yaxis: {...axis, zeroline: true, zerolinecolor: line, zerolinewidth: 1, title: title(value.axis), tickformat: value.percent ? '.0%' : '', rangemode: 'tozero',
      ...(value.share ? {range: [0, 1.03], tick0: 0, dtick: 0.2} : {})},
    legend: {orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: {size: 12, color: soft}, itemclick: false,
      itemdoubleclick: false},
  }, {displayModeBar: false, responsive: true});
}
keepDrawn(draw, note);
