// The lanes of the queues page: blocks are laid along the time axis, follow the live state, and are walked by keys.
import { swap } from "./swap.js";

const SMALL_PX = 14; // narrower blocks that follow each other are one
const LEAST_PX = 24; // the least target
const write = (element, text) => { if (element && element.textContent !== text) element.textContent = text; };
const times = (block) => block.querySelector("[data-service]").dataset; // which the server keeps fresh

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
    if (pixels(times(block).service) < SMALL_PX) {
      while (end < blocks.length && pixels(times(blocks[end]).service) < SMALL_PX && blocks[end].getAttribute("aria-pressed") !== "true") end += 1;
    }
    const left = Math.max(free, pixels(times(block).start));
    const joined = blocks.slice(at, end);
    const wide = Math.max(LEAST_PX, joined.reduce((sum, other) => sum + pixels(times(other).service), 0));
    if (left > width - LEAST_PX) { beyond += blocks.length - at; for (const gone of blocks.slice(at)) gone.parentElement.hidden = true; break; }
    item.hidden = false;
    item.style.left = `${left}px`;
    item.style.width = `${Math.min(wide, width - left)}px`;
    const { dataset } = block.querySelector(".said");
    if (joined.length > 1) dataset.joined = `+${joined.length - 1} groups`;
    else delete dataset.joined;
    for (const other of joined.slice(1)) other.parentElement.hidden = true;
    free = left + Math.min(wide, width - left);
    at = end - 1;
  }
  note(track, "more", beyond ? `+${beyond} later` : null);
  const chosen = blocks.find((block) => block.getAttribute("aria-pressed") === "true" && times(block).due !== "");
  const due = chosen && times(chosen).due;
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
  to?.focus();
  return Boolean(to);
}

// Gives the keys of the page, or undefined on other pages.
export function startQueues(live) {
  const region = document.querySelector("[data-queues]")?.dataset.queues;
  if (region === undefined) return undefined;
  layAll();
  live?.addEventListener("state", ({ detail: { ts } }) => {
    const now = new Date(ts * 1000).toLocaleTimeString("en-GB", { timeZone: document.querySelector("[data-live]").dataset.zone });
    write(document.querySelector("#lanes [data-now]"), now);
    layAll();
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
