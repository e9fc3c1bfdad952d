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

export function drawAttention(attention) {
  for (const badge of document.querySelectorAll("[data-instances-down]")) {
    badge.hidden = !attention.instances;
    if (badge.firstChild.data !== String(attention.instances)) badge.firstChild.data = String(attention.instances);
  }
  const list = document.querySelector("[data-attention]");
  if (!list) return;
  const text = JSON.stringify(attention.items);
  if (list.dataset.shown === text) return;
  const before = new Set([...list.querySelectorAll('[data-slot="title"]')].map((link) => link.textContent));
  const template = document.querySelector("[data-attention-template]");
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(
    ...attention.items.map((item) =>
      filled(template, item.severity, { severity: item.severity, title: item.title, detail: item.detail }, item.href)),
  );
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  list.dataset.shown = text;
  document.querySelector("[data-all-well]").hidden = attention.items.length > 0;
  document.querySelector("[data-models]")?.toggleAttribute("hidden", attention.items.length > 1);
  document.querySelector("[data-attention-more]").textContent =
    attention.total > attention.items.length ? `${attention.items.length} of ${attention.total}, worst first` : "";
  const fresh = attention.items.filter((item) => !before.has(item.title));
  const grave = fresh.filter((item) => item.severity === "critical");
  if (grave.length) document.querySelector("[data-alert]").textContent = grave.map((item) => item.title).join(". ");
  else if (fresh.length) document.querySelector("[data-announce]").textContent = fresh.map((item) => item.title).join(". ");
}

function time(epochS, kind) {
  const element = document.createElement("time");
  element.dateTime = new Date(epochS * 1000).toISOString();
  element.dataset[kind] = epochS;
  return element;
}

function moment(epochS, zone) {
  const element = time(epochS, "moment");
  const parts = new Intl.DateTimeFormat("en-GB", {
    timeZone: zone, day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  element.textContent = parts.format(new Date(epochS * 1000)).replace(",", "");
  return element;
}

// Newest first; each list keeps as many as it says. *nowS* and *zone* are the server's.
export function drawEvents(events, zone) {
  const list = document.querySelector("[data-event-list]");
  if (list) {
    const template = document.querySelector("[data-event-template]");
    for (const event of events.filter(({ kind }) => !kind.startsWith("sign_in"))) {
      const { title, reason, actor, at } = event;
      list.prepend(filled(template, event.severity, { title, reason, actor, at: time(at, "age") }, event.href));
    }
    while (list.children.length > Number(list.dataset.eventList)) list.lastElementChild.remove();
    document.querySelector("[data-no-events]")?.toggleAttribute("hidden", list.children.length > 0);
  }
  const table = document.querySelector("[data-event-rows]");
  if (table) {
    const template = document.querySelector("[data-event-row-template]");
    const body = table.tBodies[0];
    for (const event of events) {
      const { title, reason, actor, kind, severity, at } = event;
      body.prepend(filled(template, severity, { title, reason, actor, kind, severity, moment: moment(at, zone) }, event.href));
    }
    while (body.rows.length > Number(table.dataset.eventRows)) body.rows[body.rows.length - 1].remove();
  } else {
    document.querySelector("[data-new-events]")?.removeAttribute("hidden");
  }
}
