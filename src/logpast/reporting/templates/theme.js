"use strict";
// The button that switches between the light and the dark theme. The choice is kept where the browser allows it.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const show = () => {
    const button = document.getElementById("theme");
    if (button) button.textContent = current() === "dark" ? "Light" : "Dark";
  };
  try { root.dataset.theme = localStorage.getItem("logpast-theme") || ""; } catch { /* no storage for local files */ }
  window.switchTheme = () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem("logpast-theme", root.dataset.theme); } catch { /* it lasts as long as the page */ }
    show();
    dispatchEvent(new Event("themechange"));
  };
  dark.addEventListener("change", () => { show(); dispatchEvent(new Event("themechange")); });
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", window.switchTheme);
    show();
  });
})();
