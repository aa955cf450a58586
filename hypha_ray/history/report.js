"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const places = [...document.querySelectorAll(".plot")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const drawn = new Set();

  // Values that begin with "--" are variables of the style, which light and dark schemes set to other colours.
  function coloured(value, style) {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, style)]));
  }

  function layoutOf(figure, place, style) {
    const own = figure.layout;
    const narrow = place.clientWidth < 520;
    const last = own.xrange?.[1] ?? Math.max(...figure.data.flatMap((trace) => trace.x));
    const ticks = last <= 9 && !own.xaxis ? { dtick: 1 } : { nticks: narrow ? 5 : 9 };
    const axis = { gridcolor: "--grid", linecolor: "--edge", zerolinecolor: "--edge", automargin: true };
    const round = { unifiedhovertitle: { text: "round %{x}" }, title: { text: "round", standoff: 8 } };
    const legend = { orientation: "h", traceorder: "normal", x: 0, y: 1, yanchor: "bottom", font: { size: narrow ? 11 : 12 } };
    if (narrow && own.showlegend && figure.data.length > 4) {  // Two columns above the chart, which gets room for them.
      Object.assign(legend, { entrywidth: 0.5, entrywidthmode: "fraction" });
      place.style.height = `${Number(place.dataset.height) + 22 * Math.ceil(figure.data.length / 2)}px`;
    } else {
      place.style.height = `${place.dataset.height}px`;
    }
    return coloured({
      ...own,
      autosize: true, height: place.clientHeight, margin: { l: 8, r: 8, t: own.showlegend ? 36 : 10, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: "--soft" },
      hoverlabel: { bgcolor: "--panel", bordercolor: "--edge", font: { color: "--ink" }, namelength: -1 },
      legend, dragmode: touch.matches ? false : "zoom",
      xaxis: { ...axis, ...round, ...ticks, tickformat: ",d", range: own.xrange, autorange: !own.xrange, ...own.xaxis },
      yaxis: { ...axis, exponentformat: "e", fixedrange: touch.matches, ...own.yaxis },
    }, style);
  }

  function draw(place) {
    const style = getComputedStyle(document.documentElement);
    const figure = figures[Number(place.dataset.figure)];
    const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
    Plotly.react(place, coloured(figure.data, style), layoutOf(figure, place, style), options);
    drawn.add(place);
  }

  // A chart is drawn when it is about to be seen: the page is there at once, however many charts it has.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "600px" });
  for (const place of places) watcher.observe(place);
  dark.addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => places.forEach(draw));

  const boxes = [...document.querySelectorAll(".kinds input")];
  function choose() {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
    for (const row of document.querySelectorAll(".events tbody tr")) row.hidden = hidden.has(row.dataset.kind);
  }
  for (const box of boxes) box.addEventListener("change", choose);
  choose();
})();
