// Single-key shortcuts, which can be switched off (WCAG 2.1.4), and the dialog that lists them.

const SWITCH = "single-keys";

function enabled() {
  try { return localStorage.getItem(SWITCH) !== "off"; } catch { return true; }
}

const STEPS = { ArrowDown: 1, ArrowUp: -1 };
const LISTS = ":is(.batches-table, .applications-table, .running-table, .waterfall) tbody th a";

// Up and down walk rows that open and those of the page's list, from elsewhere to its first; right opens, left closes.
function walk({ key, target }) {
  const toggle = target.closest?.("a.toggle");
  if (toggle && ["ArrowRight", "ArrowLeft"].includes(key)) {
    if ((key === "ArrowRight") !== (toggle.getAttribute("aria-expanded") === "true")) toggle.click();
    return true;
  }
  const links = [...document.querySelectorAll(`a.toggle, ${LISTS}`)];
  const row = target.closest?.("tr");
  const at = row ? links.findIndex((link) => link.closest("tr") === row) : -1;
  const next = at >= 0 ? links[at + STEPS[key]] : STEPS[key] && target === document.body && document.querySelector(LISTS);
  next?.focus?.();
  return Boolean(next);
}

// Clicks what has the key: in the row that has the focus, or of the page.
function press({ key, target }) {
  const named = `[data-key="${CSS.escape(key)}"]`;
  const button = target.closest?.("tr")?.querySelector(named) ?? document.querySelector(`${named}:not(tr button)`);
  button?.focus();
  button?.click();
  return Boolean(button);
}

// *search* opens the search; *own* are the keys of the page: it is given each event, and says whether it did something.
export function startKeys(live, search, own) {
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
    const actions = {
      "/": search,
      p: () => live?.togglePause(),
      t: () => window.changeTheme(),
      "?": openHelp,
    };
    if (actions[event.key]) actions[event.key]();
    else if (!walk(event) && !own?.(event) && !press(event)) return;
    event.preventDefault();
  });
}
