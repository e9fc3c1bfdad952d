// Keys of the applications pages: arrows walk rows and calls of a run; a run's time axis is zoomed.
import { pressed } from "./whatif.js";

const AXIS = 1000;
let [from, width] = [0, AXIS];

// Moves the focus among *links* by *step*; from elsewhere to the first one.
function walk(links, step) {
  const at = links.indexOf(document.activeElement);
  if (at < 0 && document.activeElement !== document.body) return false;
  const next = links[at < 0 ? 0 : at + step];
  next?.focus();
  return Boolean(next);
}

// Draws all bars of the run, its rank and its deadline from *from* on, *width* wide.
function zoom(start, wide) {
  width = Math.min(AXIS, Math.max(AXIS / 64, wide));
  from = Math.min(AXIS - width, Math.max(0, start));
  for (const svg of document.querySelectorAll(".waterfall .bars svg, .rank-line")) {
    svg.setAttribute("viewBox", `${from} 0 ${width} ${svg.viewBox.baseVal.height}`);
  }
  for (const mark of document.querySelectorAll(".ticks [data-x]")) {
    mark.setAttribute("x", `${(mark.dataset.x * AXIS / 100 - from) / width * 100}%`);
  }
  return true;
}

function keysOfRun(event) {
  const moves = {
    "+": () => zoom(from, width / 2),
    "-": () => zoom(from, width * 2),
    0: () => zoom(0, AXIS),
    ArrowRight: () => width < AXIS && zoom(from + width / 4, width),
    ArrowLeft: () => width < AXIS && zoom(from - width / 4, width),
    ArrowDown: () => walk([...document.querySelectorAll(".waterfall tbody th a")], 1),
    ArrowUp: () => walk([...document.querySelectorAll(".waterfall tbody th a")], -1),
  };
  return moves[event.key]?.() || pressed(event);
}

function keysOfList(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) return walk([...document.querySelectorAll(".applications-table tbody a, .running-table tbody th a")], step);
  return false;
}

// Gives the keys of the page, or undefined on other pages.
export function startApplications() {
  if (document.querySelector("[data-run]")) {
    // A part that the server has redrawn is as long as the whole run.
    document.addEventListener("swapped", () => { if (width < AXIS) zoom(from, width); });
    return keysOfRun;
  }
  return document.getElementById("running-runs") ? keysOfList : undefined;
}
