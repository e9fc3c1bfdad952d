// Single-key shortcuts, which can be switched off (WCAG 2.1.4), and the dialog that lists them.

const SWITCH = "single-keys";

function enabled() {
  try { return localStorage.getItem(SWITCH) !== "off"; } catch { return true; }
}

// In a table whose rows open: up and down between rows, right opens, left closes (Enter follows the link as everywhere).
function walkRows(event) {
  const toggle = event.target.closest?.("a.toggle");
  if (!toggle) return false;
  const toggles = [...document.querySelectorAll("a.toggle")];
  const open = toggle.getAttribute("aria-expanded") === "true";
  const moves = {
    ArrowUp: () => toggles[toggles.indexOf(toggle) - 1]?.focus(),
    ArrowDown: () => toggles[toggles.indexOf(toggle) + 1]?.focus(),
    ArrowRight: () => { if (!open) toggle.click(); },
    ArrowLeft: () => { if (open) toggle.click(); },
  };
  if (!moves[event.key]) return false;
  event.preventDefault();
  moves[event.key]();
  return true;
}

// *search* opens the search; *own* are the keys of the page: it is given each event, and says whether it did something.
export function startKeys(live, search, own = () => false) {
  const help = document.getElementById("help");
  if (!help) return;
  const openHelp = () => { if (!help.open) help.showModal(); };
  for (const button of document.querySelectorAll("[data-help]")) {
    button.hidden = false;
    button.addEventListener("click", openHelp);
  }
  const box = help.querySelector("[data-keys-switch]");
  box.checked = enabled();
  box.addEventListener("change", () => {
    try { localStorage.setItem(SWITCH, box.checked ? "on" : "off"); } catch { /* this page only */ }
  });

  document.addEventListener("keydown", (event) => {
    if (!box.checked || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest('input:not([type="radio"]), select, textarea, [contenteditable], dialog[open]')) return;
    if (walkRows(event)) return;
    const actions = {
      "/": search,
      p: () => live?.togglePause(),
      t: () => window.changeTheme(),
      "?": openHelp,
    };
    if (!actions[event.key]) {
      if (own(event)) event.preventDefault();
      return;
    }
    event.preventDefault();
    actions[event.key]();
  });
}
