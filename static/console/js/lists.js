// The attention list and lists of events, filled from their templates; what is new and grave is announced.

function filled(template, severity, slots, href) {
  const item = template.content.firstElementChild.cloneNode(true);
  item.dataset.severity = severity;
  item.querySelector("use").setAttribute("href", `#mark-${severity}`);
  for (const slot of item.querySelectorAll("[data-slot]")) {
    const content = slots[slot.dataset.slot];
    if (content instanceof Node) slot.replaceChildren(content);
    else slot.textContent = content ?? "";
    if (slot.dataset.slot === "title") slot.href = href;
  }
  return item;
}

// What a list of one model says of an entry that concerns all of them.
const fleetWide = (only, model) => (only && !model ? "whole fleet" : "");

export function drawAttention(attention) {
  for (const badge of document.querySelectorAll("[data-badge]")) {
    const count = attention[badge.dataset.badge];
    badge.hidden = !count;
    if (badge.firstChild.data !== String(count)) badge.firstChild.data = String(count);
  }
  const list = document.querySelector("[data-attention]");
  if (!list) return;
  const only = list.dataset.only;
  const { items, total } = only ? attention.models[only] ?? attention.models[""] : attention;
  const text = JSON.stringify(items);
  if (list.dataset.shown === text) return;
  const before = new Set([...list.querySelectorAll('[data-slot="title"]')].map((link) => link.textContent));
  const template = document.querySelector("[data-attention-template]");
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(
    ...items.map(({ severity, title, detail, href, model }) =>
      filled(template, severity, { severity, title, detail, fleet: fleetWide(only, model) }, href)),
  );
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  list.dataset.shown = text;
  document.querySelector("[data-all-well]").hidden = items.length > 0;
  document.querySelector("[data-attention-more]").textContent =
    total > items.length ? `${items.length} of ${total}, worst first` : "";
  const fresh = items.filter((item) => !before.has(item.title));
  const grave = fresh.filter((item) => item.severity === "critical");
  if (grave.length) document.querySelector("[data-alert]").textContent = grave.map((item) => item.title).join(". ");
  else if (fresh.length) document.querySelector("[data-announce]").textContent = fresh.map((item) => item.title).join(". ");
}

function age(epochS) {
  const element = document.createElement("time");
  element.dateTime = new Date(epochS * 1000).toISOString();
  element.dataset.age = epochS;
  return element;
}

// Newest first; the list keeps as many as it says.
export function drawEvents(events) {
  const list = document.querySelector("[data-event-list]");
  if (list) {
    const template = document.querySelector("[data-event-template]");
    const { only } = list.dataset;
    const shown = events.filter(({ kind, model, routine }) => !kind.startsWith("sign_in") && !routine && (!only || !model || model === only));
    for (const { title, reason, actor, at, model, severity, href } of shown) {
      const slots = { title, reason, actor, at: age(at), fleet: fleetWide(only, model) };
      list.prepend(filled(template, severity, slots, href));
    }
    while (list.children.length > Number(list.dataset.eventList)) list.lastElementChild.remove();
    document.querySelector("[data-no-events]")?.toggleAttribute("hidden", list.children.length > 0);
  }
  document.querySelector("[data-new-events]")?.removeAttribute("hidden");
}
