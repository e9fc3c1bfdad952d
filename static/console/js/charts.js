// Draws the figures that Python built. plotly.js is fetched when the first chart comes into view; each chart has a table for
// browsers without it. Colours named var(--…) are resolved here, so that figures follow the theme.

import { openForTime } from "./forms.js";
import { swap } from "./swap.js";

const EVERY_S = 5;
const CONFIG = { displayModeBar: false, responsive: true, showTips: false };
let plotly = null;
let probe = null;

function loadPlotly(url) {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = url;
    script.async = true;
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => { plotly = null; reject(new Error("plotly.js could not be loaded")); });
    document.head.append(script);
  });
  return plotly;
}

function resolved(value) {
  if (value === "var(--font)") return getComputedStyle(document.body).fontFamily;
  probe.style.color = value;
  return getComputedStyle(probe).color;
}

// A copy of *figure* in the colours of the present theme.
export function themed(figure) {
  probe ??= document.body.appendChild(Object.assign(document.createElement("span"), { hidden: true }));
  const known = new Map();
  return JSON.parse(JSON.stringify(figure), (key, value) => {
    if (typeof value !== "string" || !value.startsWith("var(--")) return value;
    if (!known.has(value)) known.set(value, resolved(value));
    return known.get(value);
  });
}

export class Charts {
  #container;
  #live;
  #visible = new Set();
  #figures = new Map(); // key of the chart: its newest figure
  #observer;
  #linked = new Set();
  #zooming = false;

  constructor(container, live) {
    this.#container = container;
    this.#live = live;
    this.#observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.#visible.add(target);
        else this.#visible.delete(target);
      }
      this.#drawAll();
    });
    for (const panel of container.querySelectorAll("[data-chart]")) this.#adopt(panel);
    document.addEventListener("swapped", (event) => {
      const { element } = event.detail;
      if (!container.contains(element)) return;
      const panels = element.matches("[data-chart]") ? [element] : element.querySelectorAll("[data-chart]");
      for (const panel of panels) this.#adopt(panel);
    });
    document.addEventListener("themechange", () => this.#drawAll());
    setInterval(() => this.#refresh(), Number(container.dataset.chartsEveryS ?? EVERY_S) * 1000);
  }

  #adopt(panel) {
    for (const gone of this.#visible) if (!gone.isConnected) this.#visible.delete(gone);
    const data = panel.querySelector('script[type="application/json"]');
    if (data) this.#figures.set(panel.dataset.chart, JSON.parse(data.textContent).figure);
    else this.#figures.delete(panel.dataset.chart);
    this.#observer.observe(panel);
  }

  async #drawAll() {
    if (!this.#visible.size) return;
    let library;
    try {
      library = await loadPlotly(this.#container.dataset.plotly);
    } catch (error) {
      console.warn(error.message);
      return;
    }
    for (const panel of [...this.#visible]) {
      await new Promise(requestAnimationFrame); // one chart a frame
      const place = panel.querySelector("[data-plot]");
      const figure = this.#figures.get(panel.dataset.chart);
      if (!place || !figure || !panel.isConnected) continue;
      const { data, layout } = themed(figure);
      if (panel.dataset.opens) Object.assign(layout, { dragmode: "select", selectdirection: "h" });
      await library.react(place, data, layout, CONFIG);
      if (panel.dataset.opens && !place.dataset.listens) listen(place, panel.dataset.opens, library);
      if (this.#container.hasAttribute("data-linked") && !this.#linked.has(place)) this.#link(library, place);
      panel.dataset.drawn = figure.data[0]?.x?.at(-1) ?? "";
    }
  }

  // Zooming one chart zooms the others, the link leads to that time, and what changed is of it.
  #link(library, place) {
    this.#linked.add(place);
    place.on("plotly_relayout", (change) => {
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (this.#zooming || !(range[0] || change["xaxis.autorange"])) return;
      this.#zooming = true;
      const others = [...this.#linked].filter((other) => other !== place && other.isConnected);
      const to = range[0] ? { "xaxis.range": range } : { "xaxis.autorange": true };
      Promise.all(others.map((other) => library.relayout(other, to))).finally(() => { this.#zooming = false; });
      const link = document.querySelector("[data-zoomed]");
      if (!link || !range[0]) return;
      const [from, until] = range.map((time) => time.slice(0, 16).replace(" ", "T"));
      const query = new URLSearchParams(location.search);
      for (const [name, value] of Object.entries({ range: "times", from, until })) query.set(name, value);
      link.href = `?${query}`;
      link.textContent = `Look at ${from.slice(11)} to ${until.slice(11)}`;
      swap(["changes", "happened"], link.href);
    });
  }

  async #refresh() {
    if (document.hidden || this.#live.paused || !this.#visible.size) return;
    const query = new URLSearchParams(location.search);
    query.set("charts", [...this.#visible].map((panel) => panel.dataset.chart).join(","));
    try {
      const answer = await fetch(`${this.#container.dataset.chartsUrl ?? location.pathname}?${query}`);
      if (!answer.ok || this.#live.paused) return;
      this.#take(await answer.json());
    } catch { /* the server is away: the badge says so */ }
  }

  #take({ charts, sparks }) {
    for (const [key, { figure, sentence }] of Object.entries(charts)) {
      const panel = this.#container.querySelector(`[data-chart="${key}"]`);
      const place = panel?.querySelector("[data-plot]");
      if (figure && !place && !panel.querySelector("table")) {
        document.dispatchEvent(new CustomEvent("chartfilled", { detail: { id: panel.id } }));
        continue;
      }
      if (!place || !figure) continue;
      this.#figures.set(key, figure);
      place.setAttribute("aria-label", sentence);
    }
    sparks?.forEach((points, at) => {
      document.querySelectorAll(".tile .spark polyline")[at]?.setAttribute("points", points);
    });
    this.#drawAll();
  }
}

// Dragging over the time axis opens a dialog for that time.
function listen(place, id, library) {
  place.dataset.listens = "yes";
  place.on("plotly_selected", (event) => {
    if (event?.range) openForTime(document.getElementById(id), Object.values(event.range)[0]);
    if (event) library.relayout(place, { selections: [] });
  });
}
