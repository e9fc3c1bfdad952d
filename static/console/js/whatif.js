// The what-if pages: rows of the form are added and taken away, and futures are walked by keys.

import { refreshRegions } from "./swap.js";

const form = () => document.querySelector("[data-what-if-form]");
const changed = (element) => element.dispatchEvent(new Event("input", { bubbles: true }));

function add(kind, filled) {
  const place = document.querySelector(`[data-rows="${CSS.escape(kind)}"]`);
  const row = place.querySelector("template").content.cloneNode(true).firstElementChild;
  for (const [column, value] of Object.entries(filled)) row.querySelector(`[name="${CSS.escape(`${kind}-${column}`)}"]`).value = value;
  place.querySelector("tbody").append(row);
  show(place);
  row.querySelector("select, input").focus();
  changed(row);
}

function show(place) {
  const any = place.querySelector("tbody tr") !== null;
  place.querySelector("[data-table]").hidden = !any;
  const none = place.querySelector("[data-none]");
  if (none) none.hidden = any;
}

function remove(button) {
  const [row, place] = [button.closest("tr"), button.closest("[data-rows]")];
  (row.nextElementSibling ?? row.previousElementSibling)?.querySelector("[data-remove]")?.focus();
  row.remove();
  show(place);
  changed(place);
}

function startForm() {
  form().addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-add], [data-remove]");
    if (button?.dataset.add) add(button.dataset.add, JSON.parse(button.dataset.filled || "{}"));
    else if (button) remove(button);
  });
  form().addEventListener("change", ({ target }) => {
    if (target.name === "start") for (const part of form().querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(target.value);
  });
  document.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    if (event.key === "Enter") document.querySelector("[data-run]:not(:disabled)")?.click();
  });
}

const choose = (letter) => {
  const radio = document.querySelector(`[type="radio"][name="future"][value="${letter}"]`);
  if (radio && !radio.checked) radio.click();
  radio?.focus();
  return Boolean(radio);
};

// Buttons and links that have a key.
export function pressed(event) {
  const button = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  button?.click();
  return Boolean(button);
}

// The keys of a what-if; the function says whether it did something.
function keys(event) {
  const radios = [...document.querySelectorAll('[type="radio"][name="future"]')];
  const key = event.key.toUpperCase();
  if (/^[1-6]$/.test(key)) return choose("ABCDEF"[key - 1]);
  if (event.shiftKey && /^[A-F]$/.test(key)) return choose(key);
  const at = radios.findIndex((radio) => radio.checked);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && !radios.includes(document.activeElement)) return choose(radios[at + step]?.value);
  return pressed(event);
}

function startWhatIf() {
  document.addEventListener("change", ({ target }) => {
    if (target.name !== "future" || target.type !== "radio") return;
    const url = new URL(location.href);
    url.searchParams.set("future", target.value);
    history.replaceState(null, "", url);
    refreshRegions(0);
  });
}

// Gives the keys of the page, or null on other pages.
export function startWhatIfs() {
  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("[data-copy-address]");
    if (button) navigator.clipboard?.writeText(location.href).then(() => { button.textContent = "Copied"; });
  });
  if (form()) startForm();
  if (document.querySelector(".compare-form")) return pressed;
  if (!document.querySelector("[data-what-if]")) return null;
  startWhatIf();
  return keys;
}
