// Keys of the applications pages: arrows walk rows, units of a graph and calls of a run; a run's time axis is zoomed.
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

// Moves to the nearest unit of the graph in the direction of an arrow, from the one in focus or chosen.
function toUnit(dx, dy) {
  const units = [...document.querySelectorAll("a[data-unit]")];
  const placed = units.map((unit) => [unit, ...unit.dataset.unit.split(",").map(Number)]);
  const here = placed.find(([unit]) => unit === document.activeElement) ?? placed.find(([unit]) => unit.hasAttribute("aria-current")) ?? placed[0];
  if (!here) return false;
  const ahead = placed.map(([unit, x, y]) => [unit, (x - here[1]) * dx + (y - here[2]) * dy, Math.abs((x - here[1]) * dy) + Math.abs((y - here[2]) * dx)]);
  const [next] = ahead.filter(([, along]) => along > 0).sort((one, other) => one[1] + 2 * one[2] - other[1] - 2 * other[2])[0] ?? [];
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

function keysOfGraph(event) {
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  return steps[event.key] ? toUnit(...steps[event.key]) : pressed(event);
}

function keysOfList(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) return walk([...document.querySelectorAll(".applications-table tbody a, .running-table tbody th a")], step);
  if (event.key !== "s") return false;
  const sorts = [...document.querySelectorAll("a[data-sort]")];
  sorts[(sorts.findIndex((link) => link.hasAttribute("aria-current")) + 1) % sorts.length]?.click();
  return Boolean(sorts.length);
}

// Gives the keys of the page, or undefined on other pages.
export function startApplications() {
  if (document.querySelector("[data-run]")) {
    // A part that the server has redrawn is as long as the whole run.
    document.addEventListener("swapped", () => { if (width < AXIS) zoom(from, width); });
    return keysOfRun;
  }
  if (document.querySelector(".graph-and-unit")) return keysOfGraph;
  return document.getElementById("running-runs") ? keysOfList : undefined;
}
