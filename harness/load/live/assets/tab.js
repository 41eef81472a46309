// On Locust's own page: the charts of /llm below the table of the tab "LLM".
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
  setInterval(follow, 300);
})();
