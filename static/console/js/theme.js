// Loaded blocking in <head>, so that the first paint has the right theme. The admin reads and writes the same key.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const stored = () => {
    try { return localStorage.getItem("theme"); } catch { return null; }
  };
  const show = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };
  show(stored());
  const next = { auto: "light", light: "dark", dark: "auto" };
  const words = { auto: "system", light: "light", dark: "dark" };
  const current = () => root.dataset.theme ?? "auto";
  const label = () => {
    for (const button of document.querySelectorAll("[data-theme-button]")) {
      button.hidden = false;
      button.textContent = `Theme: ${words[current()]}`;
    }
  };
  const changed = () => {
    label();
    document.dispatchEvent(new CustomEvent("themechange"));
  };
  window.changeTheme = () => {
    const theme = next[current()];
    try { localStorage.setItem("theme", theme); } catch { /* private window: this page only */ }
    show(theme);
    changed();
  };
  document.addEventListener("DOMContentLoaded", () => {
    label();
    document.addEventListener("click", (event) => {
      if (event.target.closest?.("[data-theme-button]")) window.changeTheme();
    });
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  window.addEventListener("storage", (event) => {
    if (event.key === "theme") { show(event.newValue); changed(); }
  });
})();
