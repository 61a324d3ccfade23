// Numbers for people.

export const NONE = "–";

/** Return a number with about three digits. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
  if (Math.abs(value) >= 10 || Number.isInteger(value)) return String(Math.round(value * 10) / 10);
  return String(Math.round(value * 100) / 100);
}

/** Return a time in the unit that suits it. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = value * 1e3;
  if (ms >= 100) return `${Math.round(ms)} ms`;
  return ms >= 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`;
}

/** Return a rate of bytes. */
export function byteRate(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let scaled = value;
  let at = 0;
  while (scaled >= 1000 && at < units.length - 1) {
    scaled /= 1000;
    at += 1;
  }
  return `${scaled >= 100 ? Math.round(scaled) : scaled.toPrecision(2)} ${units[at]}`;
}

export const percent = share => `${Math.round(share * 100)}%`;

/** Return how long ago a time was, in seconds since the epoch. */
export function ago(at, now) {
  const passed = Math.max(0, now - at);
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  return `${Math.round(passed / 3600)} h ago`;
}

/** Return the time of day. */
export const clock = at => new Date(at * 1000).toLocaleTimeString("en-US", { hour12: false });

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

/** Return a round number that is not lower. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map(step => step * unit).find(step => step >= value);
}
