// Entry of every page: starts what the page has.
import { startBadge } from "./badge.js";
import { Charts } from "./charts.js";
import { startChanges, startCopying, startDialogs, startEstimates, startFilters, startSending } from "./forms.js";
import { startKeys } from "./keys.js";
import { drawAttention, drawEvents } from "./lists.js";
import { Live } from "./live.js";
import { drawAges, drawNumbers } from "./numbers.js";
import { startQueues } from "./queues.js";
import { refreshRegions, startSwapLinks, swap } from "./swap.js";
import { startWhatIfs } from "./whatif.js";

function startLive(badge) {
  const { socket, snapshot, topics, after, ts, source, zone } = badge.dataset;
  const live = new Live({
    socketUrl: socket, snapshotUrl: snapshot, topics, after, source, zone, ts: ts === "" ? null : Number(ts),
  });
  let rows = null; // which instances, jobs and parts there were, and how they stood
  live.addEventListener("state", ({ detail: { state } }) => {
    const outdated = drawNumbers(state, live.nowS());
    if (state.attention) drawAttention(state.attention);
    const { id, status } = state.tables.instances ?? { id: [], status: [] };
    const { jobs, parts } = state.tables;
    const now = `${id} ${status} ${jobs?.state} ${parts?.state}`;
    if (outdated || (rows !== null && now !== rows)) refreshRegions();
    rows = now;
  });
  live.addEventListener("events", ({ detail: { events } }) => {
    drawEvents(events);
    drawAges(live.nowS());
    if (document.querySelector("[data-refresh-on-events]")) refreshRegions();
  });
  live.addEventListener("change", ({ detail }) => { if (detail.source) refreshRegions(); });
  live.addEventListener("reload", () => location.reload());
  startBadge(live, badge, document.querySelector("[data-pause]"));
  setInterval(() => { if (!live.paused && !document.hidden) drawAges(live.nowS()); }, 1000);
  startRegions(live);
  live.start();
  return live;
}

// Charts and parts that the server redraws from time to time. Pages of a tenant have them without a live connection.
function startRegions(live) {
  const charts = document.querySelector("[data-charts]");
  if (charts) new Charts(charts, live);
  document.addEventListener("chartfilled", ({ detail }) => swap([detail.id]));
  const everyS = Number(document.querySelector("[data-refresh-s]")?.dataset.refreshS ?? 0);
  if (everyS) setInterval(() => { if (!live.paused && !document.hidden) refreshRegions(0); }, everyS * 1000);
}

const badge = document.querySelector("[data-live]");
const live = badge ? startLive(badge) : null;
if (!live) startRegions({ paused: false });
startKeys(live, startWhatIfs(live, refreshRegions) ?? startQueues(live));
// In a narrow window the navigation opens below a button; without a script it is open.
const menu = document.querySelector("[data-menu]");
if (menu) {
  menu.hidden = false;
  menu.addEventListener("click", () => menu.setAttribute("aria-expanded", String(menu.getAttribute("aria-expanded") !== "true")));
}
startFilters();
startDialogs();
startChanges();
startEstimates();
startSending();
startCopying();
startSwapLinks();
