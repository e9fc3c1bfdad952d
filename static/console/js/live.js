// The live connection of a page: one websocket, with polling behind it. Dispatches
//   state   {html, drawn, ts}  fragments that changed and marks of what pages draw, at most once a second; not while paused
//   change  {source}           connection, pause or source changed
// Protocol: controlplane/console/live/consumers.py.

const DELAYED_S = 3;
const LOST_S = 15; // the server says something every five seconds
const HIDDEN_MS = 60_000;
const BACKOFF_MS = [500, 15_000];
const FAILURES_BEFORE_POLLING = 3;
const POLL_MS = 5_000;
const SIGNED_OUT = 4001;
const NOT_ALLOWED = 4003;
const SOURCE_TEXT = { starting: "starting", silent: "the gateway is silent", unreachable: "Redis does not answer" };

export class Live extends EventTarget {
  #options;
  #socket = null;
  #failures = 0;
  #retryTimer = 0;
  #pollTimer = 0;
  #hiddenTimer = 0;
  #etag = null;
  #html = {}; // fragments that are not shown yet
  #offsetS = 0; // the server's clock less ours
  #pausedAt = null;
  #shownTs;
  #ended = false;
  #heardMs = 0; // when the socket was opened, or last said something

  constructor(options) {
    super();
    this.#options = options; // {socketUrl, snapshotUrl, topics, ts, source, zone}
    this.state = { ts: options.ts, source: options.source, drawn: {} };
    this.#shownTs = options.ts;
    document.addEventListener("visibilitychange", () => this.#visibility());
    window.addEventListener("online", () => (this.#socket ? this.#abandon() : this.#retry(0)));
    setInterval(() => { if (this.#socket && Date.now() - this.#heardMs > LOST_S * 1000) this.#abandon(); }, 1000);
  }

  start() { this.#connect(); }

  get open() { return this.#socket?.readyState === WebSocket.OPEN; }
  get paused() { return this.#pausedAt !== null; }
  get behindS() { return this.paused ? Math.max(0, this.nowS() - (this.#shownTs ?? this.#pausedAt)) : 0; }

  nowS() { return Date.now() / 1000 + this.#offsetS; }

  // Pausing stops what is shown; the newest state is kept and shown on resuming.
  togglePause() {
    this.#pausedAt = this.paused ? null : this.nowS();
    if (!this.paused) this.#show();
    this.#dispatch("change", {});
  }

  // What the badge says now.
  freshness() {
    const { ts, source } = this.state;
    const shown = this.#shownTs ?? ts;
    const why = SOURCE_TEXT[source] ?? "retrying";
    if (ts === null) return { word: "disconnected", text: `No live numbers, ${why}` };
    if (this.paused) return { word: "paused", text: `Paused, showing ${this.#clock(shown)}` };
    const ageS = Math.max(0, this.nowS() - ts);
    if (SOURCE_TEXT[source] || ageS > LOST_S || (ageS > DELAYED_S && !this.open && !this.#pollTimer)) {
      return { word: "disconnected", text: `Disconnected, showing ${this.#clock(shown)}, ${why}` };
    }
    if (ageS > DELAYED_S) return { word: "delayed", text: `Delayed, ${Math.floor(ageS)} s` };
    return { word: "live", text: `Live, updated ${Math.floor(ageS)} s ago` };
  }

  #clock(epochS) {
    return new Date(epochS * 1000).toLocaleTimeString("en-GB", { timeZone: this.#options.zone });
  }

  #dispatch(kind, detail) { this.dispatchEvent(new CustomEvent(kind, { detail })); }

  #show() {
    this.#shownTs = this.state.ts;
    const html = this.#html;
    this.#html = {};
    this.#dispatch("state", { html, drawn: this.state.drawn, ts: this.state.ts });
  }

  #connect() {
    if (this.#ended || this.#socket || document.hidden) return;
    const url = new URL(this.#options.socketUrl, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.searchParams.set("topics", this.#options.topics);
    const socket = new WebSocket(url);
    this.#socket = socket;
    this.#heardMs = Date.now();
    socket.addEventListener("message", (event) => { if (socket === this.#socket) this.#message(JSON.parse(event.data)); });
    socket.addEventListener("close", (event) => { if (socket === this.#socket) this.#closed(event.code); });
  }

  // A network that changed, a laptop that slept or a balancer that forgot leaves a socket that never closes.
  #abandon() {
    this.#socket.close();
    this.#gone(FAILURES_BEFORE_POLLING);
  }

  #message(message) {
    this.#heardMs = Date.now();
    if (message.t === "hello") {
      this.#offsetS = message.now - Date.now() / 1000;
      this.#failures = 0;
      this.#stopPolling();
      this.#dispatch("change", {});
    } else if (message.t === "state") {
      this.#take(message);
    }
  }

  #take({ ts, source, html, drawn }) {
    const before = this.state.source;
    this.state = { ts, source, drawn };
    Object.assign(this.#html, html);
    if (!this.paused) this.#show();
    if (before !== source) this.#dispatch("change", { source });
  }

  #closed(code) {
    if (code === SIGNED_OUT || code === NOT_ALLOWED) {
      this.#ended = true;
      location.reload(); // the server shows the sign-in page, or says what is not allowed
    }
    this.#gone(this.#failures + 1);
  }

  #gone(failures) {
    this.#socket = null;
    this.#dispatch("change", {});
    if (document.hidden) return;
    this.#failures = failures;
    if (this.#failures >= FAILURES_BEFORE_POLLING) this.#poll();
    this.#retry(Math.min(BACKOFF_MS[1], BACKOFF_MS[0] * 2 ** (this.#failures - 1)) * (0.75 + Math.random() / 2));
  }

  #retry(delayMs) {
    clearTimeout(this.#retryTimer);
    this.#retryTimer = setTimeout(() => this.#connect(), delayMs);
  }

  async #poll() {
    if (this.#pollTimer) return;
    const once = async () => {
      try {
        const url = `${this.#options.snapshotUrl}?topics=${this.#options.topics}`;
        const headers = this.#etag ? { "If-None-Match": this.#etag } : {};
        const answer = await fetch(url, { headers, cache: "no-store" });
        if (answer.status === 200 && this.#pollTimer) {
          this.#etag = answer.headers.get("ETag");
          this.#take(await answer.json());
        }
      } catch { /* the server is away: the badge says so by the age of the numbers */ }
    };
    this.#pollTimer = setInterval(once, POLL_MS);
    await once();
  }

  #stopPolling() {
    clearInterval(this.#pollTimer);
    this.#pollTimer = 0;
  }

  #visibility() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => {
        this.#stopPolling();
        clearTimeout(this.#retryTimer);
        this.#socket?.close(1000);
      }, HIDDEN_MS);
    } else if (!this.#socket) {
      this.#failures = 0;
      this.#retry(0);
    }
  }
}
