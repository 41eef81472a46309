// On Locust's own page: the charts of /llm below the table of the tab "LLM"; EDIT without what cannot be edited.
"use strict";
(() => {
  let place = null;
  const opened = () => new URLSearchParams(location.search).get("tab") === "llm";
  const made = () => {
    const host = document.createElement("div"), inside = host.attachShadow({ mode: "open" });
    globalThis.llmLive = host;  // where page.js finds it
    fetch("./llm").then((answer) => answer.text()).then((text) => {
      const page = new DOMParser().parseFromString(text, "text/html");
      inside.append(page.querySelector("link[rel=stylesheet]"), ...page.body.childNodes);
      const script = document.createElement("script");
      script.src = "./llm/page.js";
      document.body.append(script);
    });
    return host;
  };
  const follow = () => {
    const main = document.querySelector("main");
    const shown = main !== null && opened() && document.querySelector("[role=tab]") !== null;
    if (shown) place ??= made();
    if (place === null) return;
    place.style.display = shown ? "block" : "none";
    if (shown && main.lastElementChild !== place) main.append(place);
  };
  // EDIT closes whatever the answer is: it offers only what can change, and the page says what was refused.
  const edit = () => {
    const heads = [...document.querySelectorAll("h2")];
    return heads.find((head) => head.textContent === "Edit running load test")?.parentElement;
  };
  const say = (text) => {
    const note = document.createElement("p");
    note.setAttribute("role", "alert");
    note.style.cssText = "margin:16px 0;padding:8px 16px;border-radius:4px;background:#b3261e;color:#fff;white-space:pre-line";
    note.textContent = text;
    document.querySelector("main").prepend(note);
    setTimeout(() => note.remove(), 15000);
  };
  const fixed = () => {
    for (const part of edit()?.querySelectorAll(".MuiAccordion-root") || []) {
      if (part.textContent.startsWith("Custom parameters")) part.style.display = "none";
    }
  };
  // Locust's page shows the message of an answer only when its status is 200.
  const ask = window.fetch;
  window.fetch = async (...given) => {
    const answer = await ask(...given);
    const refused = answer.status >= 400 && new URL(answer.url).pathname.endsWith("/swarm");
    if (!refused || !answer.headers.get("Content-Type")?.startsWith("application/json")) return answer;
    const body = await answer.blob();
    if (edit()) say(JSON.parse(await body.text()).message);
    return new Response(body, { headers: answer.headers });
  };
  setInterval(() => { follow(); fixed(); }, 300);
})();
