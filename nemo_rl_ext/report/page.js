"use strict";
(() => {
  const root = document.documentElement;
  const read = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const charts = document.getElementById("charts-data").textContent;
  const library = document.getElementById("charts-library").textContent;
  // The colours of charts.py that stand for those of the theme.
  const themed = { "#010203": "--text", "#010204": "--line", "#010205": "--card" };
  let views = [];

  const load = async () => {
    const bytes = Uint8Array.from(atob(library), (letter) => letter.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    Bokeh.logger.set_level("off");
  };
  const draw = async () => {
    if (typeof Bokeh === "undefined") return;
    for (const view of views) view.clear();
    const items = JSON.parse(charts.replace(/#01020[345]/g, (color) => read(themed[color])));
    views = await Promise.all(items.map((item) => Bokeh.embed.embed_item(item)));
  };

  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    return draw();
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
  const ready = () => { root.dataset.ready = "yes"; };
  if (!library) ready();
  else if (typeof DecompressionStream === "undefined") document.getElementById("no-charts").hidden = false;
  else load().then(draw).then(ready);
})();
