// Entry of every page: starts what the page has.
import { startApplications } from "./applications.js";
import { startBadge } from "./badge.js";
import { startBatches } from "./batches.js";
import { Charts } from "./charts.js";
import { tick } from "./clock.js";
import { startChanges, startCopying, startDialogs, startEstimates, startFilters, startSending } from "./forms.js";
import { show } from "./fragments.js";
import { startKeys } from "./keys.js";
import { Live } from "./live.js";
import { startMenus } from "./menus.js";
import { startQueues } from "./queues.js";
import { refreshRegions, startSwapLinks, swap } from "./swap.js";
import { startWhatIfs } from "./whatif.js";

function startLive(badge) {
  const { socket, snapshot, topics, ts, source, zone } = badge.dataset;
  const live = new Live({ socketUrl: socket, snapshotUrl: snapshot, topics, source, zone, ts: ts === "" ? null : Number(ts) });
  live.addEventListener("state", ({ detail: { html, drawn } }) => {
    show(html);
    tick(live.nowS());
    const shown = JSON.parse(badge.dataset.drawn);
    const differs = Object.keys(drawn).filter((topic) => drawn[topic] !== shown[topic]);
    if (!differs.length) return;
    if (differs.includes("events")) {
      document.querySelector("[data-new-events]")?.removeAttribute("hidden");
      badge.dataset.drawn = JSON.stringify({ ...shown, events: drawn.events });
    }
    if (differs.some((topic) => topic !== "events") || document.querySelector("[data-refresh-on-events]")) refreshRegions();
  });
  live.addEventListener("change", ({ detail }) => { if (detail.source) refreshRegions(); });
  startBadge(live, badge, document.querySelector("[data-pause]"));
  setInterval(() => { if (!live.paused && !document.hidden) tick(live.nowS()); }, 1000);
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
startKeys(live, startBatches() ?? startWhatIfs() ?? startApplications() ?? startQueues(live));
// In a narrow window the navigation opens below a button; without a script it is open.
const menu = document.querySelector("[data-menu]");
if (menu) {
  menu.hidden = false;
  menu.addEventListener("click", () => menu.setAttribute("aria-expanded", String(menu.getAttribute("aria-expanded") !== "true")));
}
startFilters();
startDialogs();
startMenus();
startChanges();
startEstimates();
startSending();
startCopying();
startSwapLinks();
