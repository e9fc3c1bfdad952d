// The API's docs: a search over operations, and the one that an address names is opened.

function openNamed(field) {
  const named = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(named instanceof HTMLDetailsElement)) return;
  if (named.hidden) {
    field.value = "";
    field.dispatchEvent(new Event("input"));
  }
  named.open = true;
  named.scrollIntoView();
}

export function startDocs() {
  const about = document.querySelector("[data-docs]");
  if (!about) return;
  const field = about.querySelector("[data-search]");
  about.querySelector("[data-docs-search]").hidden = false;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const section of document.querySelectorAll(".docs")) {
      let here = 0;
      for (const operation of section.querySelectorAll(".operation")) {
        const text = `${operation.id} ${operation.querySelector("summary").textContent}`.toLowerCase();
        operation.hidden = !words.every((word) => text.includes(word));
        here += !operation.hidden;
      }
      section.hidden = here === 0;
      shown += here;
    }
    document.querySelector("[data-docs-none]").hidden = shown > 0;
    about.querySelector("[data-docs-count]").textContent = words.length ? `${shown} shown` : "";
  });
  addEventListener("hashchange", () => openNamed(field));
  openNamed(field);
}
