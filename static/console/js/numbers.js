// Tiles and table cells that follow the live state. Elements say by data attributes what they show.
import { rowOf } from "./apply.js";
import { FORMATS, age, duration } from "./format.js";

function write(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

function drawTiles(list, state, table) {
  const row = rowOf(table, list.dataset.scope);
  list.querySelectorAll("[data-tile]").forEach((tile, at) => {
    const value = row?.[tile.dataset.tile];
    const text = FORMATS[tile.dataset.format](value, row ?? {});
    const [number, unit] = text.split(/ (.*)/s);
    const level = row?.levels[at] ?? "";
    write(tile.querySelector("[data-number]"), number);
    const empty = row && state.ts !== null ? tile.dataset.empty : "not connected";
    write(tile.querySelector("[data-unit]"), text === "–" ? empty : unit ?? "");
    if (tile.dataset.level !== level) {
      tile.dataset.level = level;
      write(tile.querySelector("[data-level-word]"), level && `, ${level}`);
      tile.querySelector(".label use").setAttribute("href", level === "critical" ? "#mark-critical" : "#mark-warning");
    }
  });
}

function drawStatus(element, status) {
  if (element.dataset.status === status) return;
  element.dataset.status = status;
  element.querySelector("use").setAttribute("href", `#mark-${status}`);
  write(element.lastElementChild, FORMATS.status(status));
}

function drawBar(bar, ratio) {
  const value = Math.max(0, Math.min(1, ratio ?? 0));
  bar.dataset.level = value > 0.98 ? "critical" : value > 0.9 ? "warning" : "";
  bar.querySelector(".fill").setAttribute("width", (value * 100).toFixed(1));
}

// An element that stands for one instance: a table row, or the head of its page.
function drawInstance(element, row, nowS) {
  for (const status of element.querySelectorAll("[data-live-status]")) drawStatus(status, row.status);
  for (const bar of element.querySelectorAll("[data-bar]")) drawBar(bar, row.use_ratio);
  for (const cell of element.querySelectorAll("[data-field]")) {
    const { field, format } = cell.dataset;
    if (format === "age") {
      const time = cell.querySelector("[data-age]");
      if (time && row[field]) time.dataset.age = row[field];
      else write(cell, age(row[field] ? nowS - row[field] : null));
    } else {
      write(cell, FORMATS[format](row[field], row));
    }
  }
}

// An element that stands for a row of *table*: a model among the tiles, or an endpoint.
function drawRow(element, table, key) {
  const row = rowOf(table, key);
  if (!row) return;
  for (const cell of element.querySelectorAll("[data-field]")) write(cell, FORMATS[cell.dataset.format](row[cell.dataset.field], row));
}

// Draws *state* into the page. Returns whether the page shows other rows than the state has, or in another status.
export function drawNumbers(state, nowS) {
  for (const list of document.querySelectorAll("[data-scope]")) {
    const table = state.tables[list.dataset.table ?? "tiles"];
    if (table) drawTiles(list, state, table);
  }
  if (state.tables.tiles) {
    for (const element of document.querySelectorAll("[data-model]")) drawRow(element, state.tables.tiles, element.dataset.model);
  }
  if (state.tables.endpoints) {
    for (const element of document.querySelectorAll("[data-endpoint]")) drawRow(element, state.tables.endpoints, element.dataset.endpoint);
  }
  const table = state.tables.instances;
  if (!table) return false;
  const at = new Map(table.id.map((id, index) => [String(id), index]));
  let other = false;
  for (const element of document.querySelectorAll("[data-instance]")) {
    const index = at.get(element.dataset.instance);
    if (index === undefined) continue;
    const row = Object.fromEntries(Object.entries(table).map(([name, values]) => [name, values[index]]));
    const shown = element.querySelector("[data-live-status]")?.dataset.status;
    other ||= shown !== undefined && shown !== row.status;
    drawInstance(element, row, nowS);
  }
  return other;
}

export function drawAges(nowS) {
  for (const time of document.querySelectorAll("[data-age]")) write(time, age(nowS - Number(time.dataset.age)));
  for (const time of document.querySelectorAll("[data-since]")) write(time, duration(nowS - Number(time.dataset.since)));
}
