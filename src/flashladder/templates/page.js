"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const filters = document.getElementById("filters");
  const tipped = new Map();

  const dark = () => root.dataset.theme === "dark";

  /** Vega's colours of text and lines, and what stands for them in a specification. */
  function styled(spec) {
    const text = dark() ? "#ececec" : "#1b1b1b", line = dark() ? "#3c4147" : "#dededb";
    const copy = JSON.parse(JSON.stringify(spec), (key, value) => (value === "$text" ? text : value));
    const ramp = dark() ? ["#b35806", "#2c2f33", "#2166ac"] : ["#e08214", "#f4f4f2", "#4393c3"];
    const font = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
    copy.width = "container";
    copy.autosize = { type: "fit-x", contains: "padding" };
    copy.background = null;
    copy.config = {
      font, view: { stroke: null },
      axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 11, titleFontWeight: "normal" },
      legend: { labelColor: text, titleColor: text, titleFontWeight: "normal" },
      text: { color: text }, rule: { color: text }, line: { color: text }, title: { color: text },
      range: { heatmap: ramp, ramp },
    };
    return copy;
  }

  /** Draws a chart; the arrow keys read its rows. */
  async function draw(place, spec, rows) {
    const drawn = await vegaEmbed(place, styled(spec), {
      actions: false, renderer: "svg", tooltip: { theme: dark() ? "dark" : "light" },
    });
    place.querySelector("svg").setAttribute("aria-hidden", "true");
    const old = tipped.get(place);
    if (old) old.finalize();
    tipped.set(place, drawn);
    place.rows = rows.filter((row) => row.say);
    place.at = -1;
  }

  function step(event) {
    const place = event.currentTarget, moves = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
    if (!(event.key in moves) || !place.rows || !place.rows.length) return;
    event.preventDefault();
    place.at = Math.min(Math.max(place.at + moves[event.key], 0), place.rows.length - 1);
    document.getElementById(place.id + "-said").textContent = place.rows[place.at].say;
  }

  /** The rows of a specification that its arrow keys read. */
  function read(spec) {
    if (spec.data) return spec.data.values;
    return spec.layer.flatMap((layer) => (layer.mark.type === "point" ? layer.data.values : []));
  }

  const chosen = () => Object.fromEntries(new FormData(filters));
  const keeps = (choice) => (row) => Object.entries(choice).every(([name, value]) => !value || row[name] === value);

  /** A row's name without what the filters fix. */
  function label(row, choice) {
    return [row.shape, choice.mask ? "" : row.mask, choice.dtype ? "" : row.dtype].filter(Boolean).join(" ");
  }

  async function drawShapes() {
    const choice = chosen();
    const found = data.ratios.filter(keeps(choice));
    const measured = new Set(found.filter((row) => row.ratio).map((row) => row.peer));
    const rows = found.filter((row) => measured.has(row.peer)).map((row) => ({ ...row, label: label(row, choice) }));
    const height = data.heat.height * new Set(rows.map((row) => row.label)).size;
    await draw(document.getElementById("heat"), { ...data.heat, height, data: { values: rows } }, rows);
    const groups = new Map();
    for (const row of data.rates.filter(keeps(choice))) {
      const title = `head dimension ${row.dim}, ${row.mask}, ${row.dtype}`;
      groups.set(title, [...(groups.get(title) || []), row]);
    }
    const grid = document.getElementById("scaling");
    grid.replaceChildren();
    for (const [title, values] of groups) {
      const figure = document.createElement("figure"), heading = document.createElement("h4");
      const place = document.createElement("div");
      heading.textContent = title;
      place.className = "chart";
      place.setAttribute("role", "img");
      place.setAttribute("aria-label", `TFLOP/s over sequence length, ${title}; the table below holds the same.`);
      figure.append(heading, place);
      grid.append(figure);
      await draw(place, { ...data.scaling, data: { values } }, []);
    }
    if (!groups.size) grid.textContent = "Nothing of the headline set was timed with these choices.";
  }

  function filterTable() {
    const keep = keeps(chosen()), rows = [...document.querySelectorAll("#shape-table tbody tr")];
    for (const row of rows) row.hidden = !keep(row.dataset);
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("count").textContent = `${shown} of ${rows.length} shapes`;
  }

  let drawing = Promise.resolve();
  function redraw(all) {
    drawing = drawing.then(async () => {
      root.removeAttribute("data-ready");
      if (all) for (const [id, spec] of Object.entries(data.charts)) await draw(document.getElementById(id), spec, read(spec));
      if (filters) await drawShapes();
      root.dataset.ready = "true";
    });
  }

  function setTheme() {
    const wanted = theme.value === "auto" ? (system.matches ? "dark" : "light") : theme.value;
    if (root.dataset.theme === wanted) return;
    root.dataset.theme = wanted;
    redraw(true);
  }

  const every = document.getElementById("open-all");
  every.addEventListener("click", () => {
    const details = [...document.querySelectorAll(".card details")], open = details.some((d) => !d.open);
    for (const d of details) d.open = open;
    every.textContent = open ? "Close all details" : "Open all details";
  });
  addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("details")) d.open = true; });
  for (const place of document.querySelectorAll(".chart[tabindex]")) place.addEventListener("keydown", step);
  theme.addEventListener("change", setTheme);
  system.addEventListener("change", setTheme);
  if (filters) {
    filters.addEventListener("submit", (event) => event.preventDefault());
    filters.addEventListener("change", () => { filterTable(); redraw(false); });
    filterTable();
  }
  setTheme();
})();
