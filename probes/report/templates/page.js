"use strict";
(() => {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const each = (selector, act, within = document) => within.querySelectorAll(selector).forEach(act);
  const made = (tag, text = "", attributes = {}) => {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // ------------------------------------------------------------------------------------------------ colour scheme

  const hue = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  const theme = () => root.dataset.theme || "system";

  function showTheme() {
    document.getElementById("theme-name").textContent = theme();
    button.setAttribute("aria-label", `Colour scheme: ${theme() === "system" ? "as the system has it" : theme()}`);
    for (const figure of drawn) repaint(figure);
  }

  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try { localStorage.setItem("headwater-theme", next); } catch { /* not kept, then */ }
    showTheme();
  });
  system.addEventListener("change", showTheme);

  // --------------------------------------------------------------------------------------------------------- charts

  const drawn = new Set();
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toImage"],
    displayModeBar: coarse ? false : "hover",
  };

  const weights = () => [0, 0.25, 0.5, 0.75, 1].map((at, n) => [at, hue(`--weight-${n}`)]);

  // What of a layout depends on the colour scheme.
  function painted(layout) {
    const ink = hue("--ink"), line = hue("--line"), soft = hue("--soft");
    layout.font = { ...layout.font, color: soft, family: hue("--sans") };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: hue("--card"), bordercolor: line, font: { color: ink, family: hue("--sans") } };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink };
    for (const axis of ["xaxis", "yaxis"])
      layout[axis] = { ...layout[axis], gridcolor: line, linecolor: line, zerolinecolor: soft };
    return layout;
  }

  function inked(trace) {
    if (trace.meta?.ink) {
      if (trace.line) trace.line.color = hue("--ink");
      if (trace.marker) trace.marker.color = hue("--ink");
      if (trace.fillcolor) trace.fillcolor = hue("--shade");
    }
    if (trace.type === "bar") for (const bars of [trace.error_x, trace.error_y]) if (bars) bars.color = hue("--ink");
    if (trace.meta?.scale === "weights") {
      trace.colorscale = weights();
      trace.colorbar = { ...trace.colorbar, tickcolor: hue("--line") };
    }
    return trace;
  }

  // The values chosen per key: {model: Set, condition: Set, ...}.
  function chosen(figure) {
    const found = {};
    each("input[data-key]", (input) => {
      const values = (found[input.dataset.key] ??= new Set());
      if (input.checked) values.add(input.value);
    }, figure);
    return found;
  }

  const picked = (figure, axis) => figure.querySelector(`input[data-axis="${axis}"]:checked`)?.value;

  // The range of a logarithmic axis: all that is shown, but no more than so many decades below the largest value.
  function decades(data, most) {
    const values = data.filter((trace) => trace.visible).flatMap((trace) => trace.y.filter((y) => y > 0)).map(Math.log10);
    if (!values.length) return undefined;
    const top = values.reduce((a, b) => Math.max(a, b));
    const bottom = Math.max(values.reduce((a, b) => Math.min(a, b)), top - most);
    const margin = 0.04 * (top - bottom) || 0.5;
    return [bottom - margin, top + margin];
  }

  function state(figure) {
    const { plot } = charts[figure.dataset.chart];
    const wanted = chosen(figure), fraction = picked(figure, "x") === "fraction";
    const data = structuredClone(plot.data).map((trace) => {
      const meta = trace.meta ?? {};
      trace.visible = Object.entries(wanted).every(([key, values]) => !(key in meta) || values.has(String(meta[key])));
      if (fraction && meta.last) trace.x = trace.x.map((x) => x / meta.last);
      return inked(trace);
    });
    const layout = painted(structuredClone(plot.layout));
    layout.autosize = true;
    layout.dragmode = coarse ? false : "zoom";
    if (fraction) layout.xaxis.title = { text: "input position as a fraction, j / (T − 1)" };
    if (picked(figure, "y") === "linear") {
      layout.yaxis = { ...layout.yaxis, type: "linear", autorange: true, tickformat: "", rangemode: "tozero" };
      delete layout.yaxis.range;
      delete layout.yaxis.dtick;
      for (const note of layout.annotations ?? []) if (note.yref === "y") note.y = 10 ** note.y;
    } else if (layout.meta?.decades) layout.yaxis.range = decades(data, layout.meta.decades);
    return { data, layout };
  }

  function repaint(figure) {
    const { data, layout } = state(figure);
    Plotly.react(figure.querySelector(".plot"), data, layout, config);
    showHead(figure);
  }

  function draw(figure) {
    if (drawn.has(figure)) return;
    drawn.add(figure);
    const { data, layout } = state(figure), plot = figure.querySelector(".plot");
    Plotly.newPlot(plot, data, layout, config).then(() => {
      figure.dataset.drawn = "yes";
      if (charts[figure.dataset.chart].heads) plot.on("plotly_click", (event) => {
        const at = event.points[0];
        figure.querySelector(".head select").value = `${at.y}.${at.x}`;
        showHead(figure);
      });
    });
    showHead(figure);
  }

  each("figure.chart", (figure) => {
    figure.querySelector(".choices").addEventListener("change", () => (drawn.has(figure) ? repaint(figure) : draw(figure)));
  });

  // Charts far down are drawn when they come near.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  each("figure.chart", (figure) => near.observe(figure));
  addEventListener("beforeprint", () => each("figure.chart", draw));
  // And all others once there is nothing else to do, so that links land where they should.
  const later = window.requestIdleCallback || ((act) => setTimeout(act, 200));
  const rest = [...document.querySelectorAll("figure.chart")];
  later(function next() {
    if (!rest.length) return;
    draw(rest.shift());
    later(next);
  });

  // ---------------------------------------------------------------------------------------------------- a head's detail

  function showHead(figure) {
    const models = charts[figure.dataset.chart].heads;
    if (!models) return;
    const inputs = chosen(figure).model;
    const model = inputs?.size ? [...inputs][0] : Object.keys(models)[0];
    const { heads, patterns, more, first } = models[model];
    const select = figure.querySelector(".head select"), body = figure.querySelector(".head-body");
    if (select.dataset.model !== model) {
      const before = select.value;
      select.replaceChildren(...Object.keys(heads).map((name) => made("option", name in patterns ? `${name} (with pattern)` : name, { value: name })));
      select.value = before in heads ? before : first;
      select.dataset.model = model;
    }
    const name = select.value, list = made("dl");
    for (const [label, value] of heads[name]) {
      const row = made("div");
      row.append(made("dt", label), made("dd", value));
      list.append(row);
    }
    body.replaceChildren(made("h4", `${model}, block ${name.split(".")[0]}, head ${name.split(".")[1]}`), list);
    if (!(name in patterns)) {
      const note = made("p", "The result holds no pattern of this head; all of them with ");
      note.append(made("code", more));
      body.append(note);
      return;
    }
    const { size, bytes } = patterns[name];
    const values = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
    const z = Array.from({ length: size }, (_, i) =>
      Array.from({ length: size }, (_, j) => (j > i ? null : (values[i * size + j] / 255) ** 2)));
    const root2 = z.map((row) => row.map((w) => (w === null ? null : Math.sqrt(w))));
    const plot = made("div", "", { class: "pattern", role: "img", "aria-label": `Attention pattern of head ${name} on the first prompt` });
    body.append(plot);
    const ticks = [0, 0.01, 0.1, 0.3, 0.6, 1];
    const trace = inked({
      type: "heatmap", z: root2, customdata: z, zmin: 0, zmax: 1, meta: { scale: "weights" }, hoverongaps: false,
      colorbar: { thickness: 10, outlinewidth: 0, tickvals: ticks.map(Math.sqrt), ticktext: ticks.map(String), len: 0.9 },
      hovertemplate: "query %{y}, key %{x}<br>weight %{customdata:.3f}<extra></extra>",
    });
    const layout = painted({
      margin: { l: 52, r: 8, t: 8, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { size: 12 }, dragmode: coarse ? false : "zoom",
      xaxis: { title: { text: "key" }, showgrid: false, zeroline: false },
      yaxis: { title: { text: "query" }, showgrid: false, zeroline: false, autorange: "reversed" },
    });
    Plotly.newPlot(plot, [trace], layout, config);
  }

  each(".head select", (select) => select.addEventListener("change", () => showHead(select.closest("figure"))));

  // --------------------------------------------------------------------------------------------------------- claims

  const table = document.getElementById("claims-table");
  if (table) {
    const rows = [...table.tBodies], find = document.getElementById("find"), source = document.getElementById("source");
    const verdicts = [...document.querySelectorAll('input[name="verdict"]')];

    const filter = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = new Set(verdicts.filter((input) => input.checked).map((input) => input.value));
      let count = 0;
      for (const row of rows) {
        const { verdict, source: from, text } = row.dataset;
        row.hidden = !(wanted.has(verdict) && (!source.value || from === source.value) && words.every((word) => text.includes(word)));
        count += !row.hidden;
      }
      document.getElementById("shown").textContent = `${count} of ${rows.length} claims`;
    };
    document.getElementById("filters").addEventListener("input", filter);
    document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
    filter(); // a browser may have kept what was typed before

    const value = (row, column) => row.rows[0].cells[column].dataset.sort ?? row.rows[0].cells[column].textContent.trim();
    each("th button", (header) => header.addEventListener("click", () => {
      const cell = header.closest("th"), down = cell.getAttribute("aria-sort") === "ascending";
      each("th[aria-sort]", (other) => other.setAttribute("aria-sort", "none"), table);
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const column = Number(header.dataset.column);
      rows.sort((a, b) => value(a, column).localeCompare(value(b, column), "en", { numeric: true }) * (down ? -1 : 1));
      table.append(...rows);
    }), table);

    table.addEventListener("click", (event) => {
      const more = event.target.closest("button.more");
      if (!more) return;
      const detail = document.getElementById(more.getAttribute("aria-controls"));
      detail.hidden = !detail.hidden;
      more.setAttribute("aria-expanded", String(!detail.hidden));
    });
    each("a.count", (link) => link.addEventListener("click", () => {
      for (const input of verdicts) input.checked = input.value === link.dataset.verdict;
      filter();
    }));
  }

  showTheme();
})();
