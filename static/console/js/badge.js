// The badge next to the title, the Pause button, and what is announced to screen readers.

const WORDS = { live: "Live numbers are up to date.", delayed: "Live numbers are delayed.", disconnected: "Disconnected." };

export function startBadge(live, badge, button) {
  const text = badge.querySelector("[data-freshness]");
  const announce = document.querySelector("[data-announce]");
  let word = badge.dataset.word;

  function draw() {
    const now = live.freshness();
    if (text.textContent !== now.text) text.textContent = now.text;
    if (now.word !== word) {
      word = now.word;
      badge.dataset.word = word;
      // Only the change is announced, never the seconds.
      if (WORDS[word]) announce.textContent = WORDS[word];
    }
    button.textContent = live.paused ? `Resume, ${Math.floor(live.behindS)} s behind` : "Pause";
    button.setAttribute("aria-pressed", String(live.paused));
    badge.dataset.connection = live.open ? "open" : "closed";
  }

  button.hidden = false;
  button.addEventListener("click", () => live.togglePause());
  live.addEventListener("change", draw);
  live.addEventListener("state", draw);
  setInterval(draw, 1000);
  draw();
}
