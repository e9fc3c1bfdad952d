// The lanes of the queues page: blocks are laid along the time axis, follow the live state, and are walked by keys.
import { FORMATS } from "./format.js";
import { refreshRegions, swap } from "./swap.js";

const SMALL_PX = 14; // narrower blocks that follow each other are one
const LEAST_PX = 24; // the least target
const rows = (table) => {
  const columns = Object.entries(table ?? {});
  return (columns[0]?.[1] ?? []).map((_, at) => Object.fromEntries(columns.map(([name, values]) => [name, values[at]])));
};
const write = (element, text) => { if (element && element.textContent !== text) element.textContent = text; };

// The twin of `signature` in controlplane/console/pages/queues/lanes.py.
function signature(state, region) {
  const groups = rows(state.tables[`groups:${region}`])
    .map(({ number, instance, risk, pinned, hold_s: holdS }) => `${number}:${instance}:${risk}:${Number(pinned)}:${Number(holdS > 0)}`);
  const lanes = rows(state.tables[`lanes:${region}`]).map(({ instance, order, state: its }) => `${instance}:${order}:${its}`);
  const newest = (state.tables.reorders?.at ?? []).slice(0, 1).map((at) => Math.round(at));
  return [...groups, ...lanes, ...newest].join(";");
}

function said({ risk, slack_s: slackS, hold_s: holdS, service_s: serviceS }) {
  if (risk === "late") return `late ${FORMATS.clock(-slackS)}`;
  if (risk === "risk") return `slack ${FORMATS.clock(slackS)}`;
  return holdS ? `held ${FORMATS.clock(holdS)}` : FORMATS.clock(serviceS);
}

function note(track, name, text) {
  let element = track.querySelector(`:scope > .${name}`);
  if (text === null) { element?.remove(); return null; }
  if (!element) {
    element = Object.assign(document.createElement("li"), { className: name, ariaHidden: "true" });
    track.append(element);
  }
  write(element, text);
  return element;
}

function lay(track, spanS) {
  const width = track.clientWidth;
  const blocks = [...track.querySelectorAll("[data-group]")];
  const pixels = (seconds) => (Number(seconds) / spanS) * width;
  let [free, beyond] = [0, 0];
  for (let at = 0; at < blocks.length; at += 1) {
    const block = blocks[at];
    const item = block.parentElement;
    let end = at + 1;
    if (pixels(block.dataset.service) < SMALL_PX) {
      while (end < blocks.length && pixels(blocks[end].dataset.service) < SMALL_PX && blocks[end].getAttribute("aria-pressed") !== "true") end += 1;
    }
    const left = Math.max(free, pixels(block.dataset.start));
    const joined = blocks.slice(at, end);
    const wide = Math.max(LEAST_PX, joined.reduce((sum, { dataset }) => sum + pixels(dataset.service), 0));
    if (left > width - LEAST_PX) { beyond += blocks.length - at; for (const gone of blocks.slice(at)) gone.parentElement.hidden = true; break; }
    item.hidden = false;
    item.style.left = `${left}px`;
    item.style.width = `${Math.min(wide, width - left)}px`;
    block.toggleAttribute("data-joined", joined.length > 1);
    if (joined.length > 1) write(block.querySelector("[data-said]"), `+${joined.length - 1} groups`);
    for (const other of joined.slice(1)) other.parentElement.hidden = true;
    free = left + Math.min(wide, width - left);
    at = end - 1;
  }
  note(track, "more", beyond ? `+${beyond} later` : null);
  const due = blocks.find((block) => block.getAttribute("aria-pressed") === "true" && block.dataset.due !== "")?.dataset.due;
  const flag = note(track, "due", due === undefined || Number(due) < 0 || Number(due) > spanS ? null : "");
  if (flag) flag.style.left = `${pixels(due)}px`;
}

function layAll() {
  const panel = document.getElementById("lanes");
  const spanS = Number(panel.dataset.minutes) * 60;
  for (const track of panel.querySelectorAll("[data-track]")) {
    track.classList.add("laid");
    lay(track, spanS);
  }
}

function follow(state, region) {
  const groups = new Map(rows(state.tables[`groups:${region}`]).map((row) => [String(row.number), row]));
  for (const block of document.querySelectorAll("#lanes [data-group]")) {
    const row = groups.get(block.dataset.group);
    if (!row) continue;
    block.dataset.start = row.start_s ?? 0;
    block.dataset.service = row.service_s ?? 0;
    block.dataset.due = row.due_s ?? "";
    write(block.querySelector("[data-count]"), FORMATS.count(row.count));
    write(block.querySelector("[data-said]"), said(row));
  }
  layAll();
}

const visible = (lane) => [...lane.querySelectorAll("[data-group]")].filter((block) => block.offsetParent);

// The keys of this page; the function says whether it did something.
function keys(event) {
  const current = document.activeElement?.closest?.("#lanes [data-group]");
  const lanes = [...document.querySelectorAll("#lanes .lane")].filter((lane) => visible(lane).length);
  const lane = current?.closest(".lane");
  const inLane = (step) => { const all = lane ? visible(lane) : []; return all[all.indexOf(current) + step]; };
  const toLane = (step) => visible(lanes[current ? lanes.indexOf(lane) + step : 0] ?? document.createElement("i"))[0];
  const to = {
    j: () => toLane(1), k: () => toLane(-1), h: () => inLane(-1), l: () => inLane(1),
    ArrowDown: () => current && toLane(1), ArrowUp: () => current && toLane(-1),
    ArrowLeft: () => inLane(-1), ArrowRight: () => inLane(1),
  }[event.key]?.();
  if (to) { to.focus(); return true; }
  const press = event.key === "v" ? "#lanes [data-other-colour]" : event.key === "Escape" ? "#group [data-close]" : `#group [data-key="${CSS.escape(event.key)}"]`;
  const button = document.querySelector(press);
  button?.click();
  return Boolean(button);
}

// Gives the keys of the page, or none on other pages.
export function startQueues(live) {
  const region = document.querySelector("[data-queues]")?.dataset.queues;
  if (region === undefined) return () => false;
  layAll();
  live?.addEventListener("state", ({ detail: { state } }) => {
    const panel = document.getElementById("lanes");
    write(panel.querySelector("[data-now]"), new Date(state.ts * 1000).toLocaleTimeString("en-GB", { timeZone: document.querySelector("[data-live]").dataset.zone }));
    if (!state.tables.queues) return;
    follow(state, region);
    if (panel.dataset.signature !== signature(state, region)) refreshRegions(250);
  });
  document.addEventListener("click", (event) => {
    const block = event.target.closest?.("#lanes [data-group]");
    if (!block || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const url = new URL(location.href);
    url.searchParams.set("group", block.dataset.group);
    history.replaceState(null, "", url);
    for (const other of document.querySelectorAll("#lanes [data-group]")) other.setAttribute("aria-pressed", String(other === block));
    layAll();
    swap(["group"]);
  });
  document.addEventListener("swapped", ({ detail: { element } }) => {
    if (element.id === "group") {
      const chosen = new URL(location.href).searchParams.get("group");
      for (const block of document.querySelectorAll("#lanes [data-group]")) block.setAttribute("aria-pressed", String(block.dataset.group === chosen));
    }
    if (["group", "lanes"].includes(element.id)) layAll();
  });
  window.addEventListener("resize", layAll);
  document.addEventListener("toggle", (event) => { if (event.target.matches?.(".lane-model")) layAll(); }, true);
  return keys;
}
