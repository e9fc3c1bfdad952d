// Numbers as people read them: the twin of controlplane/console/formats.py.

const NONE = "–";
const missing = (value) => value === null || value === undefined;
const WORDS = {
  provisioning: "Provisioning", loading: "Loading", ready: "Ready", saturated: "Saturated", resting: "Resting", held: "Held", unreachable: "Unreachable",
  draining: "Draining", sleeping: "Sleeping", stopped: "Stopped", failed: "Failed",
};

function fixed(value, digits) {
  const scale = 10 ** digits;
  const [whole, rest] = (Math.floor(value * scale + 0.5) / scale).toFixed(digits).split(".");
  const parted = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return rest === undefined ? parted : `${parted}.${rest}`;
}

export const count = (value) => (missing(value) ? NONE : fixed(value, 0));

export function quantity(value) {
  if (missing(value)) return NONE;
  if (value < 99.95) return fixed(value, 1);
  if (value < 9999.5) return fixed(value, 0);
  if (value < 999950) return `${fixed(value / 1000, 1)}k`;
  return `${fixed(value / 1000000, 2)}M`;
}

export function milliseconds(value) {
  if (missing(value)) return NONE;
  if (value < 9.95) return `${fixed(value, 1)} ms`;
  if (value < 999.5) return `${fixed(value, 0)} ms`;
  return `${fixed(value / 1000, value < 9995 ? 2 : 1)} s`;
}

export const percent = (ratio) => (missing(ratio) ? NONE : `${fixed(ratio * 100, 0)}%`);

export const percentFine = (ratio) =>
  missing(ratio) ? NONE : `${(Math.floor(ratio * 1000 + 1e-9) / 10).toFixed(1)}%`;

export const times = (value) => (missing(value) ? NONE : `${fixed(value, 1)}×`);

export function duration(seconds) {
  if (missing(seconds)) return NONE;
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function clock(seconds) {
  if (missing(seconds)) return NONE;
  const whole = Math.max(0, Math.floor(seconds + 0.5));
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
}

export const age = (seconds) => (missing(seconds) ? NONE : `${duration(seconds)} ago`);

const unit = (text, word) => (text === NONE ? text : `${text} ${word}`);

const ofClass = (text, { slo_class: name, slo_burn: burn }) => (name ? unit(text, `${name}, burn ${times(burn)}`) : text);

// Keyed by the names that templates write into data-format.
export const FORMATS = {
  count: (value) => count(value),
  quantity: (value) => quantity(value),
  milliseconds: (value) => milliseconds(value),
  percent: (value) => percent(value),
  percent_fine: (value) => percentFine(value),
  requests: (value) => unit(count(value), "req"),
  duration: (value) => duration(value),
  clock: (value) => clock(value),
  per_second: (value) => unit(quantity(value), "/s"),
  tokens_per_second: (value) => unit(quantity(value), "tok/s"),
  running_of: (value, row) => (missing(value) ? NONE : `${count(value)} / ${count(row.max_num_seqs)}`),
  slo_met: (value, row) => ofClass(percentFine(value), row),
  ready_of: (value, row) => unit(count(value), `of ${count(row.instances)}`),
  status: (value) => WORDS[value] ?? (value || NONE),
};
