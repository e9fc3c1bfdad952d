// The what-if pages: rows of the form are added and taken away, and a future is chosen.
import { refreshRegions } from "./swap.js";

const changed = (element) => element.dispatchEvent(new Event("input", { bubbles: true }));

function add(place, filled) {
  const row = place.querySelector("template").content.cloneNode(true).firstElementChild;
  for (const [column, value] of Object.entries(filled)) row.querySelector(`[name="${CSS.escape(`${place.dataset.rows}-${column}`)}"]`).value = value;
  place.querySelector("tbody").append(row);
  place.querySelector("[data-table]").hidden = false;
  row.querySelector("select, input").focus();
  changed(row);
}

function remove(place, row) {
  (row.nextElementSibling ?? row.previousElementSibling)?.querySelector("[data-remove]")?.focus();
  row.remove();
  place.querySelector("[data-table]").hidden = place.querySelector("tbody tr") === null;
  changed(place);
}

function startForm(form) {
  form.addEventListener("click", ({ target }) => {
    const [place, button] = [target.closest("[data-rows]"), target.closest("[data-add]")];
    if (button) add(place, JSON.parse(button.dataset.filled || "{}"));
    else if (target.closest("[data-remove]")) remove(place, target.closest("tr"));
  });
  form.addEventListener("change", async ({ target }) => {
    if (target.name === "start") for (const part of form.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(target.value);
    const text = form.elements[target.dataset.into];
    if (text) changed(Object.assign(text, { value: await target.files[0].text() }));
  });
  document.addEventListener("keydown", ({ ctrlKey, metaKey, key }) => {
    if ((ctrlKey || metaKey) && key === "Enter") document.querySelector("[data-run]:not(:disabled)")?.click();
  });
}

export function startWhatIfs() {
  const form = document.querySelector("[data-what-if-form]");
  if (form) startForm(form);
  document.addEventListener("change", ({ target }) => {
    if (target.name !== "future" || target.type !== "radio") return;
    const url = new URL(location.href);
    url.searchParams.set("future", target.value);
    history.replaceState(null, "", url);
    refreshRegions(0);
  });
}
