// Entry of every page: starts what the page has.
import { startRun } from "./applications.js";
import { labelCells } from "./cards.js";
import { Charts } from "./charts.js";
import { startSelection } from "./fleet.js";
import { startChanges, startCopying, startDialogs, startEstimates, startFilters, startSending } from "./forms.js";
import { startKeys } from "./keys.js";
import { Live } from "./live.js";
import { startPlayground } from "./playground.js";
import { startQueues } from "./queues.js";
import { startSearch } from "./search.js";
import { refreshRegions, startSwapLinks, swap } from "./swap.js";
import { startWhatIfs } from "./whatif.js";

// Charts and parts that the server redraws from time to time. Pages of a tenant have them without a live connection.
function startRegions(live) {
  const charts = document.querySelector("[data-charts]");
  if (charts) new Charts(charts, live);
  document.addEventListener("chartfilled", ({ detail }) => swap([detail.id]));
  const everyS = Number(document.querySelector("[data-refresh-s]")?.dataset.refreshS ?? 0);
  if (everyS) setInterval(() => { if (!live.paused && !document.hidden) refreshRegions(0); }, everyS * 1000);
}

labelCells(document);
document.addEventListener("swapped", ({ detail }) => labelCells(detail.element.parentElement));
const badge = document.querySelector("[data-live]");
const live = badge ? new Live(badge, document.querySelector("[data-pause]")) : null;
startRegions(live ?? { paused: false });
startKeys(live, startSearch(), startRun() ?? startQueues(live));
startWhatIfs();
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
startPlayground();
startSwapLinks();
startSelection();
