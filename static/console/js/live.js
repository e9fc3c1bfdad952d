// The live connection of a page: one websocket (controlplane/console/live/consumers.py). Dispatches `state` {ts} after it has
// exchanged the fragments that changed. While paused nothing is exchanged; what changed meanwhile is shown on resuming.
import { labelCells } from "./cards.js";
import { focusedIn, refreshRegions } from "./swap.js";

const DELAYED_S = 3;
const LOST_S = 15; // the server sends something every five seconds
const HIDDEN_MS = 60_000;
const BACKOFF_MS = [500, 15_000];
const ENDED = [4001, 4003]; // signed out, not allowed
const SOURCES = { starting: "starting", silent: "the gateway is silent", unreachable: "Redis does not answer" };
const SPOKEN = { live: "Live numbers are up to date.", delayed: "Live numbers are delayed.", disconnected: "Disconnected." };

export class Live extends EventTarget {
  #badge;
  #button;
  #socket = null;
  #failures = 0;
  #heardMs = 0;
  #hiddenMs = 0;
  #offsetS = 0; // the server's clock less ours
  #html = {}; // fragments that are not shown yet
  #marks = {}; // of the topics, as last received

  constructor(badge, button) {
    super();
    [this.#badge, this.#button] = [badge, button];
    const { ts, source } = badge.dataset;
    Object.assign(this, { ts: ts === "" ? null : Number(ts), source, shownTs: ts === "" ? null : Number(ts), paused: false });
    button.hidden = false;
    button.addEventListener("click", () => this.togglePause());
    document.addEventListener("visibilitychange", () => this.#visibility());
    setInterval(() => this.#tick(), 1000);
    this.#connect();
    this.#draw();
  }

  nowS() { return Date.now() / 1000 + this.#offsetS; }

  togglePause() {
    this.paused = !this.paused;
    if (!this.paused) this.#show();
    this.#draw();
  }

  #connect() {
    if (this.#socket || document.hidden) return;
    const url = new URL(this.#badge.dataset.socket, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.searchParams.set("topics", this.#badge.dataset.topics);
    const socket = new WebSocket(url);
    [this.#socket, this.#heardMs] = [socket, Date.now()];
    socket.addEventListener("message", ({ data }) => { if (socket === this.#socket) this.#receive(JSON.parse(data)); });
    socket.addEventListener("close", ({ code }) => { if (socket === this.#socket) this.#lost(code); });
  }

  #receive({ ts, source, now, html }) {
    const changed = source !== this.source;
    Object.assign(this, { ts, source });
    [this.#heardMs, this.#failures, this.#offsetS] = [Date.now(), 0, now - Date.now() / 1000];
    Object.assign(this.#html, html);
    if (!this.paused) this.#show();
    if (changed) refreshRegions();
    this.#draw();
  }

  #lost(code) {
    this.#socket = null;
    if (ENDED.includes(code)) { location.reload(); return; } // the server shows the sign-in page, or what is not allowed
    this.#failures += 1;
    const delayMs = Math.min(BACKOFF_MS[1], BACKOFF_MS[0] * 2 ** (this.#failures - 1)) * (0.75 + Math.random() / 2);
    setTimeout(() => this.#connect(), delayMs);
    this.#draw();
  }

  #visibility() {
    this.#hiddenMs = document.hidden ? Date.now() : 0;
    if (!document.hidden) this.#connect();
  }

  #tick() {
    const hidden = this.#hiddenMs && Date.now() - this.#hiddenMs > HIDDEN_MS;
    // A network that changed, a laptop that slept or a balancer that forgot leaves a socket that never closes.
    if (this.#socket && (hidden || Date.now() - this.#heardMs > LOST_S * 1000)) {
      this.#socket.close();
      this.#lost(0);
    }
    if (!this.paused && !document.hidden) age(this.nowS());
    this.#draw();
  }

  #show() {
    const html = this.#html;
    [this.#html, this.shownTs] = [{}, this.ts];
    exchange(html);
    for (const [name, text] of Object.entries(html)) if (name.startsWith("drawn/")) this.#marks[name] = text;
    const marked = [...this.#badge.querySelectorAll("[data-mark]")];
    const differs = marked.filter(({ dataset }) => (this.#marks[dataset.mark] ?? dataset.drawn) !== dataset.drawn);
    const events = document.querySelector("[data-refresh-on-events]") ? null : differs.find(({ dataset }) => dataset.mark === "drawn/events");
    if (events) {
      document.querySelector("[data-new-events]")?.removeAttribute("hidden");
      events.dataset.drawn = this.#marks["drawn/events"];
    }
    if (differs.some((mark) => mark !== events)) refreshRegions(differs[0].dataset.mark.startsWith("drawn/capacity") ? 0 : undefined);
    age(this.nowS());
    this.dispatchEvent(new CustomEvent("state", { detail: { ts: this.ts } }));
  }

  #freshness() {
    const clock = (epochS) => new Date(epochS * 1000).toLocaleTimeString("en-GB", { timeZone: this.#badge.dataset.zone });
    const [shown, why] = [this.shownTs ?? this.ts, SOURCES[this.source] ?? "retrying"];
    if (this.ts === null) return ["disconnected", `No live numbers, ${why}`];
    if (this.paused) return ["paused", `Paused, showing ${clock(shown)}`];
    const ageS = Math.max(0, this.nowS() - this.ts);
    const open = this.#socket?.readyState === WebSocket.OPEN;
    if (SOURCES[this.source] || ageS > LOST_S || ageS > DELAYED_S && !open) return ["disconnected", `Disconnected, showing ${clock(shown)}, ${why}`];
    return ageS > DELAYED_S ? ["delayed", `Delayed, ${Math.floor(ageS)} s`] : ["live", `Live, updated ${Math.floor(ageS)} s ago`];
  }

  #draw() {
    const [word, text] = this.#freshness();
    const place = this.#badge.querySelector("[data-freshness]");
    if (place.textContent !== text) place.textContent = text;
    // Only the change is announced, never the seconds.
    if (word !== this.#badge.dataset.word && SPOKEN[word]) document.querySelector("[data-announce]").textContent = SPOKEN[word];
    this.#badge.dataset.word = word;
    this.#badge.dataset.connection = this.#socket?.readyState === WebSocket.OPEN ? "open" : "closed";
    const behindS = Math.floor(Math.max(0, this.nowS() - (this.shownTs ?? this.nowS())));
    this.#button.textContent = this.paused ? `Resume, ${behindS} s behind` : "Pause";
    this.#button.setAttribute("aria-pressed", String(this.paused));
  }
}

// Puts each fragment into the elements that name it. What is new in a list of warnings is announced, the critical at once.
function exchange(html) {
  for (const element of document.querySelectorAll("[data-fragment]")) {
    const text = html[element.dataset.fragment];
    if (text === undefined) continue;
    const lines = () => [...element.querySelectorAll("[data-announce-as]")];
    const [focused, before] = [focusedIn(element), new Set(lines().map(({ textContent }) => textContent))];
    element.innerHTML = text;
    labelCells(element);
    if (focused) element.querySelector(focused)?.focus({ preventScroll: true });
    if (!element.matches("[data-announces]")) continue;
    const fresh = lines().filter(({ textContent }) => !before.has(textContent));
    const critical = fresh.filter(({ dataset }) => dataset.announceAs === "critical");
    if (fresh.length) document.querySelector(critical.length ? "[data-alert]" : "[data-announce]").textContent = (critical.length ? critical : fresh).map(({ textContent }) => textContent).join(". ");
  }
}

// Counts ages and durations on between two states.
function age(nowS) {
  for (const time of document.querySelectorAll("time[data-age], time[data-since]")) {
    const seconds = Math.max(0, Math.floor(nowS - Number(time.dataset.age ?? time.dataset.since)));
    const [minutes, hours, days] = [60, 3600, 86_400].map((unit) => Math.floor(seconds / unit));
    const passed = !minutes ? `${seconds} s` : !hours ? `${minutes} min` : !days ? `${hours} h${minutes % 60 ? ` ${minutes % 60} min` : ""}` : `${days} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
    const text = time.dataset.age ? `${passed} ago` : passed;
    if (time.textContent !== text) time.textContent = text;
  }
}
