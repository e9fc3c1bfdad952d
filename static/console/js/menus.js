// Menus of rows by keyboard: Enter or an arrow opens one on its first entry, arrows walk, Escape (the browser's) closes it.

const STEPS = { ArrowDown: 1, ArrowUp: -1 };

function walk(event) {
  const button = event.target.closest?.("button[popovertarget]");
  const open = event.target.closest?.(".row-menu");
  if (button && event.key === "ArrowDown") {
    document.getElementById(button.getAttribute("popovertarget")).showPopover({ source: button });
  } else if (open && (STEPS[event.key] || event.key === "Home" || event.key === "End")) {
    const entries = [...open.querySelectorAll("a, button")];
    const last = entries.length - 1;
    const at = entries.indexOf(document.activeElement);
    const next = event.key === "Home" ? 0 : event.key === "End" ? last : (at + STEPS[event.key] + entries.length) % entries.length;
    entries[next].focus();
  } else return;
  event.preventDefault();
}

export function startMenus() {
  document.addEventListener("keydown", walk, true);
  document.addEventListener("toggle", ({ target, newState }) => {
    if (newState === "open" && target.matches(".row-menu")) target.querySelector("a, button")?.focus();
  }, true);
}
