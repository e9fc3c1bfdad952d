// What ticks: ages and durations, counted on between two states of the fleet.

function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

export function tick(nowS) {
  for (const time of document.querySelectorAll("time[data-age], time[data-since]")) {
    const passed = duration(nowS - Number(time.dataset.age ?? time.dataset.since));
    const text = time.dataset.age ? `${passed} ago` : passed;
    if (time.textContent !== text) time.textContent = text;
  }
}
