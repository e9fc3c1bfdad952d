// How a page's state follows the messages of the live connection, which controlplane/console/live/deltas.py makes.

function patch(table, change) {
  if (change.all) return change.all;
  const patched = { ...table };
  for (const [column, [rows, values]] of Object.entries(change.set ?? {})) {
    const cells = patched[column].slice();
    rows.forEach((row, at) => { cells[row] = values[at]; });
    patched[column] = cells;
  }
  return patched;
}

export function apply(state, message) {
  switch (message.t) {
    case "snapshot": {
      const { ts, source, tables, attention } = message;
      return { ts, source, tables, attention };
    }
    case "tick": {
      const { ts, source, attention } = message;
      return { ...state, ts, source, attention, tables: { ...state.tables, ...message.tables } };
    }
    case "delta": {
      const tables = { ...state.tables };
      for (const [name, change] of Object.entries(message.changes)) tables[name] = patch(tables[name] ?? {}, change);
      return { ...state, ts: message.ts, source: message.source, tables };
    }
    default:
      return state;
  }
}

// The row of a columnar table that has *key* in its first column; undefined if there is none.
export function rowOf(table, key) {
  const [column] = Object.keys(table ?? {});
  const at = column === undefined ? -1 : table[column].findIndex((value) => String(value) === String(key));
  if (at < 0) return undefined;
  return Object.fromEntries(Object.entries(table).map(([name, values]) => [name, values[at]]));
}
