// In front of every chart's script. SOURCE is where Plotly is served; it is fetched once, when first drawn with.
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
// A colour of the style sheet, as it is now: light or dark.
function colour(name) { return getComputedStyle(element).getPropertyValue(name).trim(); }
// Draws at once and whenever the value or the theme changes. One drawing at a time: what arrives meanwhile is
// drawn once, after it.
function keepDrawn(draw, note) {
  let drawing = null, again = false;
  function show() {
    if (drawing) { again = true; return; }
    drawing = draw().catch(() => { note.hidden = false; note.textContent = 'The plot could not be loaded.'; })
      .finally(() => { drawing = null; if (again) { again = false; show(); } });
  }
  watch('value', show);
  new MutationObserver(show).observe(document.body, {attributeFilter: ['class']});
  let width = element.clientWidth;  // Plotly follows the window only; the settings take room from the page, too
  new ResizeObserver(() => {
    if (element.clientWidth === width || !(width = element.clientWidth)) return;
    for (const plot of element.querySelectorAll('.js-plotly-plot')) {
      if (plot.clientWidth) window.Plotly?.Plots.resize(plot);  // Plotly rejects for a plot that is hidden
    }
  }).observe(element);
  show();
}
