// Parts of a page redrawn by the server: the page is fetched again and the named elements are exchanged.

const busy = new Set();

// Whether exchanging *element* would take something from under the user's hands.
function inUse(element) {
  return element.querySelector("dialog[open], [popover]:popover-open") !== null || element.contains(document.activeElement) &&
    document.activeElement.matches('input:not([type="radio"]), select, textarea');
}

// A selector, for the successor of *element*, of what has the focus within it; null if nothing there has it.
export function focusedIn(element) {
  const active = document.activeElement;
  if (!element.contains(active) || active === element) return null;
  if (active.id) return `#${CSS.escape(active.id)}`;
  for (const name of ["href", "commandfor", "aria-label"]) {
    if (active.hasAttribute(name)) return `[${name}="${CSS.escape(active.getAttribute(name))}"]`;
  }
  if (active.localName === "summary") return `#${CSS.escape(active.parentElement.id)} > summary`;
  return null;
}

// What the user has opened and scrolled stays so.
function keepView(before, after) {
  for (const details of before.querySelectorAll("details[id][open]")) {
    after.querySelector(`#${CSS.escape(details.id)}`)?.setAttribute("open", "");
  }
  for (const box of before.querySelectorAll("[data-select]:checked")) {
    const same = after.querySelector(`[data-select][value="${CSS.escape(box.value)}"]`);
    if (same) same.checked = true;
  }
  const places = after.querySelectorAll(".scroll");
  before.querySelectorAll(".scroll").forEach((scroll, at) => {
    if (scroll.scrollLeft || scroll.scrollTop) places[at]?.scrollTo({ left: scroll.scrollLeft, top: scroll.scrollTop });
  });
}

// Exchanges the elements *ids*. *whole* says that they are all of the page's regions: if none was in use, the page shows what
// the server has drawn now.
export async function swap(ids, url = location.href, whole = false) {
  const wanted = ids.filter((id) => !busy.has(id));
  if (!wanted.length) return;
  let current = whole && wanted.length === ids.length;
  wanted.forEach((id) => busy.add(id));
  try {
    const answer = await fetch(url, { cache: "no-store" });
    if (answer.redirected) return;
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of wanted) {
      const [before, after] = [document.getElementById(id), page.getElementById(id)];
      const kept = before && (inUse(before) || whole && underPointer(before));
      if (kept) current = false;
      if (!before || !after || kept) continue;
      const focused = focusedIn(before);
      before.replaceWith(document.adoptNode(after));
      keepView(before, after);
      if (focused) after.querySelector(focused)?.focus({ preventScroll: true });
      document.dispatchEvent(new CustomEvent("swapped", { detail: { element: after } }));
    }
    for (const mark of current ? page.querySelectorAll("[data-mark]") : []) {
      const own = document.querySelector(`[data-mark="${CSS.escape(mark.dataset.mark)}"]`);
      if (own) own.dataset.drawn = mark.dataset.drawn;
    }
  } catch { // the server is away: the badge says so
    if (whole) refreshRegions(5000);
  } finally {
    wanted.forEach((id) => busy.delete(id));
  }
}

let timer = 0;

// Rows that the pointer is on, which may come in another order, wait until it has gone, so that no click hits another row.
function underPointer(element) {
  if (!element.matches("[data-calm]:hover") || !matchMedia("(hover: hover)").matches) return false;
  element.addEventListener("pointerleave", () => refreshRegions(0), { once: true });
  return true;
}

// All regions of the page that the server draws, soon and once, however often this is asked.
export function refreshRegions(delayMs = 1000) {
  if (timer) return;
  timer = setTimeout(() => {
    timer = 0;
    swap([...document.querySelectorAll("[data-region][id]")].filter((element) => !underPointer(element)).map(({ id }) => id), location.href, true);
  }, delayMs);
}

// Links that exchange one element and keep the address: a chart as table, another kind of demand.
export function startSwapLinks() {
  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.("a[data-swap]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    const id = link.dataset.swap;
    const place = [...document.getElementById(id).querySelectorAll("a")].indexOf(link);
    history.replaceState(null, "", link.href);
    await swap([id], link.href);
    const links = [...document.getElementById(id).querySelectorAll("a")];
    const same = link.className && links.find((other) => other.className === link.className && other.textContent === link.textContent);
    (same || links[place])?.focus({ preventScroll: true });
  });
}
