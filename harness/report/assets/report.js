"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const drawn = new Map(); // element -> its figure as packed in the page, for drawing again in another theme
  let palette = {};

  function readPalette() {
    const style = getComputedStyle(root);
    const value = (name) => style.getPropertyValue(name).trim();
    palette = {};
    for (let i = 1; i <= 8; i++) palette["@s" + i] = value("--s" + i);
    for (const name of ["ink", "muted", "line", "strong", "card", "area", "shade", "bad"]) palette["@" + name] = value("--" + name);
    palette.font = getComputedStyle(document.body).fontFamily;
  }

  // A copy of a figure with every "@name" replaced by the theme's colour.
  function coloured(value) {
    if (typeof value === "string") return palette[value] ?? value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value.slice() : value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    }
    return value;
  }

  function axis(own) {
    return {
      gridcolor: palette["@line"], linecolor: palette["@line"], zerolinecolor: palette["@line"],
      tickcolor: palette["@line"], automargin: true, ticks: "outside", ticklen: 4, ...own,
      title: own?.title ? { standoff: 10, font: { color: palette["@muted"], size: 12 }, ...own.title } : undefined,
    };
  }

  function layoutOf(own) {
    const layout = {
      height: 320, showlegend: false, hovermode: "closest", dragmode: false,
      paper_bgcolor: palette["@card"], plot_bgcolor: palette["@card"],
      font: { family: palette.font, size: 12, color: palette["@ink"] },
      margin: { l: 52, r: 18, t: 30, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: palette["@strong"], activecolor: palette["@ink"] },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
      hoverlabel: { bgcolor: palette["@card"], bordercolor: palette["@line"], font: { color: palette["@ink"], size: 13 } },
      ...own,
    };
    for (const key of Object.keys(layout)) if (/^[xy]axis\d*$/.test(key)) layout[key] = axis(layout[key]);
    return layout;
  }

  const CONFIG = {
    displaylogo: false, responsive: true, displayModeBar: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]],
  };

  // A chart as a file: plain buttons, so that keyboard and touch reach them as well.
  function saving() {
    for (const button of document.querySelectorAll("button[data-save]")) {
      button.addEventListener("click", () => {
        const plot = document.getElementById("chart-" + button.dataset.chart);
        const cell = button.dataset.chart === "timeline" ? "-" + document.getElementById("timeline-cell").value : "";
        const format = button.dataset.save;
        if (drawn.has(plot)) {
          Plotly.downloadImage(plot, { format, filename: button.dataset.chart + cell, scale: format === "png" ? 2 : 1 });
        }
      });
    }
  }

  async function draw(element, figure) {
    drawn.set(element, figure);
    const ready = coloured(figure);
    await Plotly.react(element, ready.data, layoutOf(ready.layout), CONFIG);
    // A screen reader gets the caption and the table; the drawing itself would only be a heap of nameless shapes.
    for (const drawing of document.querySelectorAll("svg:not([aria-hidden])")) drawing.setAttribute("aria-hidden", "true");
  }

  async function unpack(id) {
    const packed = document.getElementById(id).textContent.trim();
    const letters = atob(packed);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i); // Uint8Array.from takes ten times as long
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const pause = () => new Promise((done) => setTimeout(done, 0));

  async function drawAll() {
    const [library, text] = await Promise.all([unpack("plotly-gz"), unpack("charts-gz")]);
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
    const { charts, timelines } = JSON.parse(text);
    readPalette();
    // So that a print before all are drawn has all of them.
    for (const [id, figure] of Object.entries(charts)) drawn.set(document.getElementById("chart-" + id), figure);
    for (const [id, figure] of Object.entries(charts)) {
      await draw(document.getElementById("chart-" + id), figure);
      await pause();
    }
    const select = document.getElementById("timeline-cell");
    const place = document.getElementById("chart-timeline");
    if (select && place) {
      const show = () => {
        place.setAttribute("aria-label", "Timeline of " + select.value + "; its numbers are in the table below");
        return draw(place, timelines[select.value]);
      };
      select.addEventListener("change", show);
      await show();
    }
    document.body.dataset.charts = "ready";
    performance.mark("charts");
  }

  function again() {
    readPalette();
    for (const [element, figure] of drawn) draw(element, figure);
  }

  function labelToggle(button) {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
  }

  function themes() {
    const button = document.getElementById("theme");
    labelToggle(button);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
      labelToggle(button);
      again();
    });
    system.addEventListener("change", () => { labelToggle(button); again(); });
  }

  // Legends shared by several charts: a press hides or shows a row in all charts of the group.
  function legends() {
    for (const button of document.querySelectorAll("button[data-row]")) {
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        for (const same of document.querySelectorAll(`button[data-row="${button.dataset.row}"]`)) {
          same.setAttribute("aria-pressed", String(shown));
        }
        for (const [element, figure] of drawn) {
          if (!/^chart-(cdf|dots)-/.test(element.id)) continue;
          for (const trace of figure.data) {
            if (String(trace.meta) === button.dataset.row) trace.visible = shown;
          }
          draw(element, figure);
        }
      });
    }
  }

  // Paper is white and of one width: print in the light theme, with the figures that fit it.
  function printing() {
    const printWidth = (element) => {
      if (element.closest(".triple")) return 198;
      return element.closest(".pair") ? 312 : 660;
    };
    let before, opened;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      opened = [...document.querySelectorAll("details.printed:not([open])")];
      for (const details of opened) details.open = true;
      root.dataset.theme = "light";
      readPalette();
      for (const [element, figure] of drawn) {
        const ready = coloured(figure);
        const layout = { ...layoutOf(ready.layout), width: printWidth(element), autosize: false };
        layout.height = Math.min(layout.height, element.closest(".wide") ? layout.height : 240);
        Plotly.react(element, ready.data, layout, { staticPlot: true });
      }
    });
    addEventListener("afterprint", () => {
      for (const details of opened) details.open = false;
      if (before) root.dataset.theme = before; else delete root.dataset.theme;
      again();
    });
  }

  themes();
  legends();
  saving();
  printing();
  if (document.getElementById("plotly-gz")) drawAll().catch((error) => {
    const note = document.getElementById("charts-failed");
    note.hidden = false;
    note.append(" (" + error.message + ")");
    document.body.dataset.charts = "failed";
  });
})();
