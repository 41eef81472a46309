// Poll the numbers every two seconds and draw them. All received texts are set as text, never as markup.
"use strict";
(() => {
  const POLL_MS = 2000, TIMEOUT_MS = 8000, HEIGHT = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
  const GIB = 2 ** 30, SVG = "http://www.w3.org/2000/svg";
  // In the tab of Locust's page everything is in a shadow tree; its own page has none.
  const host = globalThis.llmLive, root = host?.shadowRoot || document;
  const outer = host || document.documentElement;
  const $ = (id) => root.getElementById(id);
  let last = null, points = [], span = "now", chosenClass = "all", pointer = null;

  // Locust's page stores its theme in localStorage. This page follows it, also while both are open.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => {
    let stored = null;
    try { stored = localStorage.theme; } catch { /* no storage: use the theme of the system */ }
    outer.dataset.theme = stored === "dark" || stored === "light" ? stored : dark.matches ? "dark" : "light";
  };
  theme();
  dark.addEventListener("change", theme);
  addEventListener("storage", theme);
  if (host) setInterval(theme, 300);  // a page gets no event for its own changes

  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const svgElement = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const isKnown = (value) => value !== null && value !== undefined;
  const number = (value) => {
    if (!isKnown(value)) return "–";
    const size = Math.abs(value);
    if (size >= 10000) return `${+(value / 1000).toPrecision(3)}k`;
    return size >= 100 ? String(Math.round(value)) : String(+value.toPrecision(3));
  };
  const ms = (value) => isKnown(value) ? number(value * 1000) : "–";
  const scaled = (value, factor) => isKnown(value) ? value * factor : null;

  // A latency of a row: a value, only a lower bound ("> 12", because requests still wait), or not known.
  const isAbove = (n, key) => !isKnown(n?.[key]) && isKnown(n?.[`${key}_above`]);
  const latency = (n, key) => n?.[key] ?? n?.[`${key}_above`];
  const latencyMs = (n, key) => {  // from 10 s on in seconds
    const seconds = latency(n, key);
    return (isAbove(n, key) ? "> " : "") + (seconds >= 10 ? `${number(seconds)} s` : ms(seconds));
  };
  const tooFew = (n, key, p) => isKnown(latency(n, `${key}_${p}`)) || !(n[`${key}_n`] < last.needed[p]) ? ""
    : `needs ${last.needed[p]} requests, and there are ${n[`${key}_n`]}`;

  const SHARES = [50, 90, 95, 99];
  const columns = () => [
    ["requests", (n) => String(n.ended)], ["in flight", (n, name) => String(name === "all" ? last.in_flight : last.in_flight_of[name] || 0)],
    ["no token yet", (n, name) => String(name === "all" ? last.waiting : last.waiting_of[name] || 0)], ["failed", (n) => String(n.failed), (n) => n.failed > 0],
    ["succeeded req/s", (n) => number(n.requests_per_s)], ["tok/s", (n) => number(n.output_tok_s)],
    ["goodput req/s", (n) => number(n.goodput)], ["in SLOs %", (n) => number(scaled(n.attainment, 100))],
    ...last.latencies.flatMap(([key, title]) => [
      ...SHARES.map((p) => [`${title} p${p} ms`, (n) => latencyMs(n, `${key}_p${p}`), undefined, (n) => tooFew(n, key, `p${p}`)]),
      [`${title} slowest ms`, (n) => latencyMs(n, `${key}_max`)],
    ]),
  ];

  function table() {
    const head = element("tr");
    const body = [];
    for (const title of ["user class", ...columns().map(([title]) => title)]) {
      const cell = element("th", title);
      cell.scope = "col";
      head.append(cell);
    }
    for (const [name, numbers] of Object.entries(last[span])) {
      if (name === "all" && Object.keys(last[span]).length === 2) continue;
      const row = element("tr"), title = element("th", name);
      title.scope = "row";
      row.append(title, ...columns().map(([, of, bad, why]) => {
        const cell = element("td", of(numbers, name), bad?.(numbers) ? "bad" : "");
        if (why?.(numbers)) cell.title = why(numbers);
        return cell;
      }));
      body.push(row);
    }
    $("classes").replaceChildren(head, ...body);
    $("which-span").textContent = `By user class, ${span === "now" ? `last ${last.window_s} s` : "whole test"}`;
    $("how").textContent = "Requests are counted when they end, without those of the warm-up. Tokens count when they arrive, a chunk as about one until its request ends."
      + " TTFT and E2E include requests in flight: \"> 5\" means that so many still wait that only this bound is known."
      + ` Percentiles are within ${last.resolution * 100} %; one that needs more requests is "–".`
      + (isKnown(last.workers) ? " Workers report every 3 s." : "")
      + (last.slos ? ` Goodput: requests a second that met ${last.slos}.` : " Goodput needs SLOs, in the start form.")
      + " A report is made from the exact records.";
  }

  function tiles() {
    const n = last.now.all, server = last.server, made = [];
    const tile = (title, value, unit, bad, kind) => {
      const box = element("div", undefined, ["tile", bad ? "bad" : "", kind].join(" ")), name = element("span", title), big = element("b", value);
      if (unit && value !== "–") big.append(element("small", ` ${unit}`));
      box.append(name, big);
      made.push(box);
    };
    tile("in flight", String(last.in_flight), `by ${last.users} ${last.users === 1 ? "user" : "users"}`);
    // From 10 s on in seconds. A tail that the requests do not carry is the slowest of them.
    const time = (title, key) => {
      const seconds = latency(n, key), long = seconds >= 10;
      tile(title, (isAbove(n, key) ? "> " : "") + (long ? number(seconds) : ms(seconds)), long ? "s" : "ms");
    };
    const tail = ["p95", "p90"].find((p) => isKnown(latency(n, `ttft_${p}`)));
    tile("no token yet", String(last.waiting), isKnown(last.oldest_waiting_s) ? `oldest ${number(last.oldest_waiting_s)} s` : "");
    const of = (key) => n[`${key}_n`] ? ` of ${number(n[`${key}_n`])}` : "";
    time(`TTFT p50${of("ttft")}`, "ttft_p50");
    time(`TTFT ${tail || "slowest"}${of("ttft")}`, `ttft_${tail || "max"}`);
    time(`TPOT p50${of("tpot")}`, "tpot_p50");
    tile("output", number(n.output_tok_s), "tok/s");
    tile("succeeded", number(n.requests_per_s), "req/s");
    if (last.slos) tile("goodput", number(n.goodput), "req/s");
    tile("failed, whole test", String(last.whole.all.failed), "", last.whole.all.failed > 0);
    if (server) {
      if (isKnown(server.running)) tile("server: running", number(server.running));
      if (isKnown(server.waiting)) tile("server: waiting", number(server.waiting));
      if (isKnown(server.kv_usage)) tile("server: KV cache", number(server.kv_usage * 100), "%");
    }
    for (const [name, gpu] of Object.entries(last.gpus || {})) {
      const memory = memoryOf(gpu), parts = [[gpu.busy_percent, "%"], [memory, "GiB"], [gpu.power_w, "W"]];
      const texts = parts.filter(([value]) => isKnown(value)).map(([value, unit]) => `${number(value)} ${unit}`);
      if (texts.length) tile(`GPU ${name}`, texts.join(" · "), "", false, "wide");
    }
    $("tiles").replaceChildren(...made);
  }

  // The GPU memory of an APU is in both kinds of memory.
  const memoryOf = (gpu) => isKnown(gpu?.vram_used_bytes) || isKnown(gpu?.gtt_used_bytes)
    ? ((gpu.vram_used_bytes || 0) + (gpu.package ? gpu.gtt_used_bytes || 0 : 0)) / GIB : null;

  function notes() {
    $("why").hidden = !last.given_up;
    $("why").textContent = last.given_up || "";
    $("recent").textContent = `Now, and of the last ${last.window_s} s:`;
    const infos = [], warnings = [];
    if (last.client_limited) warnings.push(`CLIENT-LIMITED: a load process runs, or waits for a core that others have, ${Math.round(100 * last.client_limited)} % of the time; these numbers are those of the load generator as well. Use more processes or machines, keep others from its core, or take fewer users.`);
    if (last.other_client) {
      const other = last.other_client, rate = isKnown(other.answers_per_s) ? `${number(other.answers_per_s)} answers` : `${number(other.tokens_per_s)} tokens`;
      warnings.push(`OTHER CLIENT: the server generated ${number(other.tokens)} tokens more than this load can have had; in the last seconds about ${rate} a second were not ours. These numbers include that load. End the other client, or use a server of its own.`);
    }
    if (last.missing) warnings.push(`LOST: ${last.missing} of ${last.workers + last.missing} load processes ${last.missing === 1 ? "gives" : "give"} no sign of life; these numbers are without what ${last.missing === 1 ? "it sends" : "they send"}.`);
    if (last.simulated) infos.push("SIMULATED ENGINE: these numbers come from a model, not from hardware.");
    if (!last.watched) infos.push("Only the numbers of the load: stock Locust does not read the server's queue or the GPU; harness live does.");
    else {
      if (!last.server) infos.push("The server gives no metrics at the moment: its queue and KV cache are not known.");
      if (!last.gpus) infos.push("No AMD GPU is read on this machine.");
    }
    if (last.warmup) infos.push(`${last.warmup === 1 ? "1 warm-up request has" : `${last.warmup} warm-up requests have`} ended: tokens count, latencies and requests do not.`);
    $("notes").replaceChildren(...warnings.map((text) => element("li", text, "bad")), ...infos.map((text) => element("li", text)));
  }

  function failures() {
    $("failed").hidden = last.failures.length === 0;
    const head = element("tr");
    head.append(...["kind", "count", "the last one"].map((title) => element("th", title)));
    head.lastChild.style.textAlign = "left";
    $("failures").replaceChildren(head, ...last.failures.map((one) => {
      const row = element("tr");
      row.append(element("th", one.kind), element("td", String(one.count), "bad"), element("td", one.message, "text"));
      row.firstChild.scope = "row";
      return row;
    }));
  }

  function classes() {
    const names = Object.keys(last.whole).filter((name) => name !== "all");
    $("which").hidden = names.length < 2;
    const wanted = ["all", ...names];
    const there = [...$("class").options].map((option) => option.value);
    if (wanted.join() !== there.join()) {
      $("class").replaceChildren(...wanted.map((name) => { const o = element("option", name); o.value = name; return o; }));
      if (!wanted.includes(chosenClass)) chosenClass = "all";
      $("class").value = chosenClass;
    }
  }

  // For each chart: title, unit, and lines as [name, value of a point, whether it is a lower bound]. A chart without
  // values is not drawn.
  function chartSpecs() {
    const of = (key, factor = 1) => (p) => scaled(p.classes[chosenClass]?.[key], factor);
    const times = (key) => [(p) => scaled(latency(p.classes[chosenClass], key), 1000), (p) => isAbove(p.classes[chosenClass], key)];
    const lines = (key) => {
      const hasTail = points.some((p) => isKnown(latency(p.classes[chosenClass], `${key}_p90`)));
      return [...SHARES.map((s) => [`p${s}`, ...times(`${key}_p${s}`)]), ...(hasTail ? [] : [["slowest", ...times(`${key}_max`)]])];
    };
    const gpus = [...new Set(points.flatMap((p) => Object.keys(p.gpus || {})))].sort();
    const each = (what) => gpus.map((name) => [name, (p) => what(p.gpus?.[name] || {})]);
    return [
      ...last.latencies.map(([key, title]) => [title, "ms", lines(key)]),
      ["Output tokens", "tok/s", [["received", of("output_tok_s")], ["by the server", (p) => p.server?.tok_s]]],
      ["Requests", "/s", [["succeeded", of("requests_per_s")], ["goodput", of("goodput")], ["failed", of("failed_per_s")]]],
      ["Users and requests in flight", "", [["users", (p) => p.users], ["in flight", (p) => p.in_flight], ["no token yet", (p) => p.waiting]]],
      ["Oldest request without a token", "s", [["age", (p) => p.oldest_waiting_s ?? 0]]],
      ["Server's queue", "requests", [["running", (p) => p.server?.running], ["waiting", (p) => p.server?.waiting]]],
      ["KV cache in use", "%", [["KV cache", (p) => scaled(p.server?.kv_usage, 100)]]],
      ["GPU busy", "%", each((gpu) => gpu.busy_percent)],
      ["GPU memory", "GiB", each(memoryOf)],
      ["GPU power", "W", each((gpu) => gpu.power_w)],
    ];
  }

  // The end of an axis, which starts at 0: 100 of a percentage, an even number of a count, and no tiny one without need.
  const axisMax = (max, unit) => {
    if (unit === "%" && max <= 100) return 100;
    const isCount = unit === "" || unit === "requests", least = isCount ? 2 : unit === "/s" ? 0.1 : 1;
    if (!(max > least)) return least;
    const power = 10 ** Math.floor(Math.log10(max));
    const steps = isCount && power === 1 ? [2, 4, 6, 8, 10] : [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15];
    return steps.find((step) => step * power >= (isCount ? max : max * 1.0001)) * power;
  };
  const clock = (seconds) => {
    const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)}`;
  };

  function chart(title, unit, lines) {
    const values = lines.map(([, of]) => points.map(of));
    const shown = lines.map((line, i) => i).filter((i) => values[i].some(isKnown)).slice(0, 8);
    if (!shown.length) return null;
    const figure = element("figure"), caption = element("figcaption"), width = Math.max(240, figureWidth());
    caption.append(element("b", unit ? `${title}, ${unit}` : title));
    const first = points[0].t, over = Math.max(points.at(-1).t - first, 2);  // less would show one time twice
    const top = axisMax(Math.max(...shown.flatMap((i) => values[i].filter(isKnown))), unit);
    const x = (t) => LEFT + (t - first) / over * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title} over time` });
    for (const part of [0, 0.5, 1]) {
      svg.append(svgElement("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(part * top), y2: y(part * top) }));
      svg.append(svgElement("text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, number(part * top)));
    }
    for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const at = first + part * over;
      svg.append(svgElement("text", { x: x(at), y: HEIGHT - 5, "text-anchor": anchor }, clock(at)));
    }
    const at = pointer === null ? null : nearest(first + pointer * over);
    if (at !== null) svg.append(svgElement("line", { class: "at", x1: x(points[at].t), x2: x(points[at].t), y1: TOP, y2: HEIGHT - BOTTOM }));
    shown.forEach((i, place) => {
      let path = "", open = false;
      values[i].forEach((value, k) => {
        if (isKnown(value)) path += `${open ? "L" : "M"}${x(points[k].t).toFixed(1)} ${y(value).toFixed(1)}`;
        open = isKnown(value);
      });
      svg.append(svgElement("path", { class: `course c${place + 1}`, d: path }));
      const k = at === null ? points.length - 1 : at, value = values[i][k];
      if (isKnown(value)) svg.append(svgElement("circle", { class: `dot c${place + 1}`, cx: x(points[k].t), cy: y(value), r: 3 }));
      const bound = lines[i][2]?.(points[k]) ? "> " : "";
      caption.append(element("span", `${lines[i][0]} ${bound}${number(value)}`, `key c${place + 1}`));
    });
    if (at !== null) caption.firstChild.textContent += ` at ${clock(points[at].t)}`;
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const part = ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT);
      pointer = Math.min(1, Math.max(0, part));
      requestAnimationFrame(charts);
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", () => { pointer = null; requestAnimationFrame(charts); });
    figure.append(caption, svg);
    return figure;
  }

  const nearest = (t) => {
    let best = 0;
    points.forEach((p, i) => { if (Math.abs(p.t - t) < Math.abs(points[best].t - t)) best = i; });
    return best;
  };
  const figureWidth = () => {
    const box = $("charts").clientWidth, columns = Math.max(1, Math.floor((box + 14) / (Math.min(box, 380) + 14)));
    return Math.floor((box - 14 * (columns - 1)) / columns) - 26;
  };

  function charts() {
    $("course").hidden = !points.length;
    if (!points.length) return;
    const made = chartSpecs().map(([title, unit, lines]) => chart(title, unit, lines)).filter(Boolean);
    // Replace the contents of the figures, not the figures: a pointer over one stays there.
    const there = [...$("charts").children];
    if (there.length !== made.length) $("charts").replaceChildren(...made);
    else made.forEach((figure, i) => {
      there[i].firstChild.replaceWith(figure.firstChild);
      const svg = there[i].lastChild, fresh = figure.lastChild;
      svg.setAttribute("viewBox", fresh.getAttribute("viewBox"));
      svg.setAttribute("aria-label", fresh.getAttribute("aria-label"));
      svg.replaceChildren(...fresh.childNodes);
    });
    (host || document.body).dataset.charts = String($("charts").children.length);
  }

  function show() {
    root.querySelector("[data-span=now]").textContent = `last ${last.window_s} s`;
    const state = { ready: "not started", spawning: "ramping up", running: "running", stopping: "stopping", cleanup: "stopping", stopped: "stopped" };
    $("state").textContent = [state[last.state] || last.state, `${last.users} ${last.users === 1 ? "user" : "users"}`,
      isKnown(last.workers) ? `${last.workers} load ${last.workers === 1 ? "process" : "processes"}` : ""].filter(Boolean).join(", ");
    $("state").className = "";
    notes(); tiles(); table(); failures(); classes(); charts();
  }

  async function poll() {
    const since = last && points.length ? `?series=${last.series}&after=${points.at(-1).t}` : "";
    try {
      const answer = await fetch(`llm/live.json${since}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!answer.ok || answer.redirected) throw new Error(`status ${answer.status}`);
      const received = await answer.json();
      points = last && received.series === last.series ? points.concat(received.points) : received.points;
      last = received;
      show();
    } catch (error) {
      $("state").textContent = `no answer from Locust (${error.message})`;
      $("state").className = "bad";
    }
    setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
  }

  for (const button of root.querySelectorAll("[data-span]")) {
    button.addEventListener("click", () => {
      span = button.dataset.span;
      for (const other of root.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", String(other === button));
      if (last) table();
    });
  }
  $("class").addEventListener("change", () => { chosenClass = $("class").value; charts(); });
  addEventListener("resize", () => requestAnimationFrame(charts));
  poll();
})();
