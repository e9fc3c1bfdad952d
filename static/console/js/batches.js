// Keys of the batches page: 1 to 4 choose a section, up and down walk the batches, and letters press the buttons of a row.

// Gives the keys of the page, or undefined on other pages.
export function startBatches() {
  const sections = () => document.querySelectorAll(".tabs a");
  const links = () => [...document.querySelectorAll("a[data-batch]")];
  if (!sections().length && !document.getElementById("batches-panel")) return undefined;
  return ({ key, target }) => {
    const section = /^[1-4]$/.test(key) && sections()[Number(key) - 1];
    if (section) { section.click(); return true; }
    const row = target.closest?.("tr");
    const all = links();
    const step = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (step) {
      const at = all.findIndex((link) => link.closest("tr") === row);
      if (at < 0 && document.activeElement !== document.body) return false;
      const next = all[at + step];
      next?.focus();
      return Boolean(next);
    }
    const button = row?.querySelector(`[data-key="${CSS.escape(key)}"]`);
    button?.click();
    return Boolean(button);
  };
}
