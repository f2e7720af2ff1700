"use strict";
(() => {
  const root = document.documentElement;
  const read = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const charts = JSON.parse(document.getElementById("charts-data").textContent);

  const axis = (own) => ({ gridcolor: read("--line"), zerolinecolor: read("--line"), automargin: true, ...own });
  const layoutOf = (chart) => ({
    ...chart.layout,
    autosize: true,
    margin: { l: 56, r: 12, t: 8, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: read("--text"), family: "system-ui, sans-serif", size: 12 },
    hovermode: chart.layout.hovermode || (chart.name === "reasons" ? "closest" : "x unified"),
    hoverlabel: { bgcolor: read("--card"), bordercolor: read("--line"), font: { color: read("--text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: axis(chart.layout.xaxis || { title: { text: "step" } }),
    yaxis: axis(chart.layout.yaxis),
  });
  const draw = () => {
    if (typeof Plotly === "undefined") return;
    for (const chart of charts) {
      const place = document.getElementById("chart-" + chart.name);
      Plotly.react(place, chart.traces, layoutOf(chart), { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };

  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    draw();
  };
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  system.addEventListener("change", apply);

  const filter = document.getElementById("filter");
  if (filter) {
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of document.querySelectorAll("#rows tbody tr")) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        if (words.length) row.classList.add("found"); else row.classList.remove("found");
      }
    });
  }
  const all = document.getElementById("all-rows");
  if (all) {
    all.addEventListener("click", () => {
      document.getElementById("rows").classList.add("whole");
      all.hidden = true;
    });
  }
  apply();
  root.dataset.ready = "yes";
})();
