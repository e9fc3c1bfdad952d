// Single-key shortcuts, which can be switched off (WCAG 2.1.4), and the dialog that lists them.

const SWITCH = "single-keys";
const CHORD_MS = 1500;

function enabled() {
  try { return localStorage.getItem(SWITCH) !== "off"; } catch { return true; }
}

function search() {
  const field = document.querySelector("[data-search]");
  if (field) { field.focus(); field.select(); return; }
  const link = document.querySelector('[data-go="f"], [data-go="r"]');
  if (link) location.assign(`${link.href}#search`);
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

// *own* are the keys of the page: it is given each event, and says whether it did something.
export function startKeys(live, own = () => false) {
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
  if (location.hash === "#search") search();

  let chordUntil = 0;
  document.addEventListener("keydown", (event) => {
    if (!box.checked || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest('input:not([type="radio"]), select, textarea, [contenteditable], dialog[open]')) return;
    if (walkRows(event)) return;
    if (chordUntil > Date.now()) {
      chordUntil = 0;
      const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); location.assign(link.href); }
      return;
    }
    const actions = {
      "/": search,
      p: () => live?.togglePause(),
      t: () => window.changeTheme(),
      g: () => { chordUntil = Date.now() + CHORD_MS; },
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
