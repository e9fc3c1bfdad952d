// A run's time axis is zoomed by keys.

const AXIS = 1000;
let [from, width] = [0, AXIS];

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

// Gives the keys of a run's page, or undefined on other pages.
export function startRun() {
  if (!document.querySelector("[data-run-page]")) return undefined;
  // A part that the server has redrawn is as long as the whole run.
  document.addEventListener("swapped", () => { if (width < AXIS) zoom(from, width); });
  return ({ key }) => ({
    "+": () => zoom(from, width / 2),
    "-": () => zoom(from, width * 2),
    0: () => zoom(0, AXIS),
    ArrowRight: () => width < AXIS && zoom(from + width / 4, width),
    ArrowLeft: () => width < AXIS && zoom(from - width / 4, width),
  })[key]?.();
}
