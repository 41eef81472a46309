// Runs before the page is painted, so that a stored choice of theme does not flash.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be closed to file:// pages; the system's theme is used */ }
document.documentElement.classList.add("js");
