// Filters that apply themselves, forms that are sent once, dialogs for browsers without invoker commands, and copying.

import { swap } from "./swap.js";

const RESEND_MS = 5_000;
const ESTIMATE_MS = 300;

export function startFilters() {
  for (const form of document.querySelectorAll("[data-filters]")) {
    // A select changes with each arrow key: by keyboard the button applies, by pointer the choice does.
    let byKey = false;
    form.addEventListener("keydown", () => { byKey = true; });
    form.addEventListener("pointerdown", () => { byKey = false; });
    form.addEventListener("change", () => {
      if (byKey) form.querySelector(".apply").classList.add("needed");
      else form.requestSubmit();
    });
    form.addEventListener("formdata", ({ formData }) => {
      for (const [name, value] of [...formData]) if (value === "") formData.delete(name);
    });
  }
}

// A second click while a form is being sent does not send it again.
export function startSending() {
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post" || event.defaultPrevented) return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "yes";
    setTimeout(() => delete event.target.dataset.sent, RESEND_MS);
  });
}

// A form that says what it would change before it is sent.
export function startChanges() {
  document.addEventListener("change", (event) => {
    const form = event.target.closest?.("[data-changes]");
    if (!form) return;
    const changed = [...form.querySelectorAll("select")].filter((select) => !select.selectedOptions[0].defaultSelected);
    const said = changed.map((select) => `${select.dataset.part}: ${select.selectedOptions[0].text} instead of ${select.dataset.now}. ${select.selectedOptions[0].title}`);
    form.querySelector("[data-changed]").replaceChildren(...(said.length ? said : ["Nothing changes."]).flatMap((text, at) => at ? [document.createElement("br"), text] : [text]));
  });
}

// A form whose consequences the server says in another element while it is filled in. The address holds what was entered.
export function startEstimates() {
  const form = document.querySelector("form[data-estimates]");
  if (!form) return;
  let [timer, asks, again] = [0, false, false];
  // One answer at a time, and once more for what was entered meanwhile: the last one is of the form as it stands.
  const ask = async () => {
    again = asks;
    if (asks) return;
    asks = true;
    do {
      again = false;
      await swap(form.dataset.estimates.split(" "), location.href);
    } while (again);
    asks = false;
  };
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const entered = [...new FormData(form)].filter(([name, value]) => name !== "csrfmiddlewaretoken" && value !== "");
      history.replaceState(null, "", `?${new URLSearchParams(entered)}`);
      ask();
    }, ESTIMATE_MS);
  });
}

// Fills in *dialog* the times between which it holds, to the quarter of an hour, and their days.
export function openForTime(dialog, ends) {
  const [from, until] = ends.map((text) => new Date(Math.round(Date.parse(`${text.replace(" ", "T")}Z`) / 9e5) * 9e5)).sort((a, b) => a - b);
  const { elements } = dialog.querySelector("form");
  [elements.begins.value, elements.ends.value] = [from, until].map((at) => at.toISOString().slice(11, 16));
  const days = new Set();
  for (let at = from.getTime(); at < until; at += 864e5) days.add(new Date(at).getUTCDay());
  ["sun", "mon", "tue", "wed", "thu", "fri", "sat"].forEach((day, at) => { elements[`on-${day}`].checked = days.has(at); });
  dialog.showModal();
}

export function startDialogs() {
  // A link may lead to a dialog of another page, so that what an action costs is read before it is done.
  const named = document.getElementById(location.hash.slice(1));
  if (named?.localName === "dialog") {
    history.replaceState(null, "", location.pathname + location.search);
    named.showModal();
  }
  if ("commandForElement" in HTMLButtonElement.prototype) return;
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[commandfor]");
    const dialog = button && document.getElementById(button.getAttribute("commandfor"));
    if (button?.getAttribute("command") === "show-modal") dialog.showModal();
    if (button?.getAttribute("command") === "close") dialog.close();
  });
}

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Without HTTPS there is no clipboard API.
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("refused");
}

export function startCopying() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = false;
    const word = button.querySelector("[data-copy-word]");
    button.addEventListener("click", async () => {
      try {
        await copy(document.getElementById(button.dataset.copy).textContent);
        word.textContent = "Copied";
        document.querySelector("[data-announce]").textContent = "Copied";
      } catch {
        word.textContent = "Select it and copy";
      }
      setTimeout(() => { word.textContent = "Copy"; }, 4000);
    });
  }
}
