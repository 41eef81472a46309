// On Locust's own page: the charts of /llm below the table of the tab "LLM"; EDIT without what cannot be edited.
"use strict";
(() => {
  let panel = null;
  const isTabOpen = () => new URLSearchParams(location.search).get("tab") === "llm";
  const createPanel = () => {
    const host = document.createElement("div"), shadow = host.attachShadow({ mode: "open" });
    globalThis.llmLive = host;  // where page.js finds it
    fetch("./llm").then((answer) => answer.text()).then((text) => {
      const page = new DOMParser().parseFromString(text, "text/html");
      shadow.append(page.querySelector("link[rel=stylesheet]"), ...page.body.childNodes);
      const script = document.createElement("script");
      script.src = "./llm/page.js";
      document.body.append(script);
    });
    return host;
  };
  const updatePanel = () => {
    const main = document.querySelector("main");
    const shown = main !== null && isTabOpen() && document.querySelector("[role=tab]") !== null;
    if (shown) panel ??= createPanel();
    if (panel === null) return;
    panel.style.display = shown ? "block" : "none";
    if (shown && main.lastElementChild !== panel) main.append(panel);
  };
  // EDIT closes whatever the answer is: it offers only what can change, and the page says what was refused.
  const findEditDialog = () => {
    const heads = [...document.querySelectorAll("h2")];
    return heads.find((head) => head.textContent === "Edit running load test")?.parentElement;
  };
  const showAlert = (text) => {
    const note = document.createElement("p");
    note.setAttribute("role", "alert");
    note.style.cssText = "margin:16px 0;padding:8px 16px;border-radius:4px;background:#b3261e;color:#fff;white-space:pre-line";
    note.textContent = text;
    document.querySelector("main").prepend(note);
    setTimeout(() => note.remove(), 15000);
  };
  const hideFixedParameters = () => {
    for (const part of findEditDialog()?.querySelectorAll(".MuiAccordion-root") || []) {
      if (part.textContent.startsWith("Custom parameters")) part.style.display = "none";
    }
  };
  // Locust's page shows the message of an answer only when its status is 200.
  const originalFetch = window.fetch;
  window.fetch = async (...args) => {
    const answer = await originalFetch(...args);
    const refused = answer.status >= 400 && new URL(answer.url).pathname.endsWith("/swarm");
    if (!refused || !answer.headers.get("Content-Type")?.startsWith("application/json")) return answer;
    const body = await answer.blob();
    if (findEditDialog()) showAlert(JSON.parse(await body.text()).message);
    return new Response(body, { headers: answer.headers });
  };
  setInterval(() => { updatePanel(); hideFixedParameters(); }, 300);
})();
