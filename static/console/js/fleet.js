// Instances and nodes selected for one act: ranges with Shift, their number and names, and what the act does.

const boxes = () => [...document.querySelectorAll("[data-select]")];

export function startSelection() {
  const said = document.querySelector("[data-selected]");
  if (!said) return;
  let last = null;
  const show = () => {
    const chosen = boxes().filter((box) => box.checked);
    said.textContent = chosen.length ? `${chosen.length} selected` : "";
    const names = chosen.map((box) => box.getAttribute("aria-label").replace("Select ", ""));
    document.querySelector("[data-selected-names]").textContent = names.join(", ");
  };
  document.addEventListener("click", ({ target, shiftKey }) => {
    if (!target.matches?.("[data-select]")) return;
    const all = boxes().filter((box) => box.name === target.name);
    const from = all.findIndex((box) => box.value === last);
    const to = all.indexOf(target);
    if (shiftKey && from >= 0) for (const box of all.slice(Math.min(from, to), Math.max(from, to))) box.checked = target.checked;
    last = target.value;
    show();
  });
  const { elements } = document.getElementById("bulk-form");
  elements.verb.addEventListener("change", ({ target }) => {
    document.querySelector("[data-chosen]").textContent = target.selectedOptions[0].dataset.about ?? "";
  });
  document.querySelector("[data-select-none]").addEventListener("click", () => {
    for (const box of boxes()) box.checked = false;
    show();
  });
  document.addEventListener("swapped", show);
  show(); // a browser may have kept some over a reload
}
