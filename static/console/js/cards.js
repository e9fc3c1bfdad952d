// Cells know their column's header, which narrow windows show in its place; columns that leave take their cells along.

const columns = (row) => [...row.cells].flatMap((cell) => Array(cell.colSpan).fill(cell));

function words(cell) {
  const copy = cell.cloneNode(true);
  copy.querySelectorAll("[aria-hidden], .unseen").forEach((each) => each.remove());
  return copy.textContent.trim();
}

export function labelCells(root) {
  for (const table of root.querySelectorAll("table.rows")) {
    const heads = [...(table.tHead?.rows ?? [])].map(columns);
    const headers = heads.at(-1) ?? [];
    const labels = headers.map((_, at) => heads.map((row) => row[at] ? words(row[at]) : "").filter(Boolean).join(": "));
    for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
      columns(row).forEach((cell, at) => {
        if (cell.localName !== "td" || cell.colSpan > 1 || !labels[at]) return;
        cell.dataset.label = labels[at];
        for (const name of ["leaves", "leaves-first"]) cell.classList.toggle(name, headers[at].classList.contains(name));
      });
    }
  }
}
