// On Locust's own page: the charts of /llm below the table of the tab "LLM"; EDIT without what cannot be edited.
"use strict";
(() => {
  const frame = document.createElement("iframe");
  frame.title = "LLM load, live";
  frame.style.cssText = "display:none;width:100%;height:900px;border:0";
  const opened = () => new URLSearchParams(location.search).get("tab") === "llm";
  const follow = () => {
    const main = document.querySelector("main");
    const shown = main !== null && opened() && document.querySelector("[role=tab]") !== null;
    frame.style.display = shown ? "block" : "none";
    if (!shown) return;
    if (frame.parentNode !== main || main.lastElementChild !== frame) {
      frame.src = "./llm?framed";
      main.append(frame);
    }
    const inside = frame.contentDocument?.body;
    const height = inside ? Math.max(300, inside.scrollHeight + 4) : 900;
    if (Math.abs(frame.offsetHeight - height) > 4) frame.style.height = `${height}px`;
  };
  // EDIT closes whatever the answer is, so nobody would see that a parameter of a running load is refused.
  const fixed = () => {
    const heads = [...document.querySelectorAll("h2")];
    const edit = heads.find((head) => head.textContent === "Edit running load test")?.parentElement;
    for (const part of edit?.querySelectorAll(".MuiAccordion-root") || []) {
      if (part.textContent.startsWith("Custom parameters")) part.style.display = "none";
    }
  };
  setInterval(() => { follow(); fixed(); }, 300);
})();
