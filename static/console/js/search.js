// The search over everything: the server draws the results while one types, arrows walk them, Enter opens the chosen one.

const WAIT_MS = 120;
const STEPS = { ArrowDown: 1, ArrowUp: -1 };

// Returns what opens the dialog.
export function startSearch() {
  const dialog = document.getElementById("search");
  if (!dialog) return () => {};
  const [field, list, said] = ["input", "[role=listbox]", "[role=status]"].map((what) => dialog.querySelector(what));
  const options = () => [...list.querySelectorAll("[role=option]")];
  let timer = 0;

  function choose(option) {
    for (const one of options()) one.ariaSelected = String(one === option);
    field.setAttribute("aria-activedescendant", option?.id ?? "");
    option?.scrollIntoView({ block: "nearest" });
  }

  async function ask() {
    const text = field.value;
    try {
      const answer = await fetch(`${field.dataset.address}?${new URLSearchParams({ q: text })}`);
      if (text !== field.value || !answer.ok || answer.redirected) return;
      list.innerHTML = await answer.text();
      const count = options().length;
      said.textContent = count ? `${count} ${count === 1 ? "result" : "results"}, at most six of a kind` : `Nothing that you may see has “${text}” in its name.`;
      choose(options()[0]);
    } catch { said.textContent = "The server does not answer."; }
  }

  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  });
  field.addEventListener("keydown", (event) => {
    const all = options();
    const at = all.findIndex((one) => one.ariaSelected === "true");
    if (STEPS[event.key] && all.length) choose(all[(at + STEPS[event.key] + all.length) % all.length]);
    else if (event.key === "Enter") all[at]?.click();
    else return;
    event.preventDefault();
  });
  const open = () => {
    if (document.querySelector("dialog[open]")) return;
    dialog.showModal();
    field.select();
    ask();
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey) return;
    event.preventDefault();
    open();
  });
  for (const button of document.querySelectorAll("[data-open-search]")) {
    button.hidden = false;
    button.addEventListener("click", open);
  }
  return open;
}
