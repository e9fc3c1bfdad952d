// Fragments of HTML that the server draws and sends when they change: each goes into the elements that name it.
import { focusedIn } from "./swap.js";

// What is new in a list of warnings is announced to screen readers, the grave at once.
function announce(before, element) {
  const fresh = [...element.querySelectorAll("[data-announce-as]")].filter(({ textContent }) => !before.has(textContent));
  const grave = fresh.filter(({ dataset }) => dataset.announceAs === "critical");
  const place = document.querySelector(grave.length ? "[data-alert]" : "[data-announce]");
  if (fresh.length) place.textContent = (grave.length ? grave : fresh).map(({ textContent }) => textContent).join(". ");
}

export function show(html) {
  for (const element of document.querySelectorAll("[data-fragment]")) {
    const text = html[element.dataset.fragment];
    if (text === undefined) continue;
    const focused = focusedIn(element);
    const before = new Set([...element.querySelectorAll("[data-announce-as]")].map(({ textContent }) => textContent));
    element.innerHTML = text;
    if (focused) element.querySelector(focused)?.focus({ preventScroll: true });
    if (element.matches("[data-announces]")) announce(before, element);
  }
}
