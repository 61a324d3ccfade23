// The charts of the last five minutes.

import { make, makeSvg } from "./dom.js";
import { NONE, number, roundUp, seconds } from "./format.js";

const SPAN_S = 300;
const SMOOTH_S = 5; // each point shows the mean of this time, because some things happen less than once a second
const JOINED_S = 15; // lines have gaps where nothing was measured for longer
const HEIGHT = 96;
const LEFT = 46;
const BOTTOM = 14;
// The parts of the time to first token, as the server sends them.
const PARTS = {
  frontend: "Frontend", retry: "Retry", network: "Network", queue: "Queue", prefill: "Prefill", kv_transfer: "KV transfer",
};

/** Return a value of an axis, without zeros at its end. */
const tick = (value, format) => (value ? format(value).replace(/\.0+(?=\s|$)|(\.\d*[1-9])0+(?=\s|$)/, "$1") : "0");

const mean = values => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Return [time, mean of the last seconds] of each point; null where nothing was measured. */
function smooth(points, read) {
  let begin = 0;
  return points.map((point, at) => {
    while (points[begin].at < point.at - SMOOTH_S) begin += 1;
    const known = points.slice(begin, at + 1).map(read).filter(value => value !== null && value !== undefined);
    return [point.at, mean(known)];
  });
}

// `series`: lines, each with its name, its class (`kind`) and how to read a point. `stacked`: the parts whose areas lie
// on each other.
const CHARTS = [
  {
    title: "Output tokens/s", format: number, series: [{ name: "tokens/s", kind: "decode", read: p => p.tokens_per_s, area: true }],
    current: last => number(last[0]),
  },
  {
    title: "Requests/s", format: number,
    series: [
      { name: "ended", kind: "prefill", read: p => p.requests_per_s, area: true },
      { name: "failed", kind: "bad", read: p => p.failures_per_s },
    ],
    current: last => number(last[0]), note: last => (last[1] ? `${number(last[1])} failed` : "none failed"),
  },
  {
    title: "Time to first token", format: seconds, stacked: Object.keys(PARTS),
    series: [
      { name: "p50", kind: "ink", read: p => p.ttft_p50_s },
      { name: "p99", kind: "ink dashed", read: p => p.ttft_p99_s },
    ],
    current: last => seconds(last[0]), note: last => `p50 · p99 ${seconds(last[1])}`,
  },
  {
    title: "Time between tokens", format: seconds,
    series: [
      { name: "p50", kind: "decode", read: p => p.gap_p50_s },
      { name: "p99", kind: "ink dashed", read: p => p.gap_p99_s },
    ],
    current: last => seconds(last[0]), note: last => `p50 · p99 ${seconds(last[1])}`,
  },
];

class Chart {
  constructor(about) {
    this.about = about;
    this.points = [];
    this.value = make("span", { class: "value" }, NONE);
    this.note = make("span", { class: "soft" });
    this.plot = makeSvg("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": about.title });
    this.readout = make("p", { class: "readout soft", "aria-live": "off" });
    const swatches = about.stacked
      ? about.stacked.map(part => [part, PARTS[part]])
      : about.series.map(({ kind, name }) => [kind, name]);
    this.element = make("figure", { class: "chart panel" },
      make("figcaption", {}, about.title), make("div", { class: "line" }, this.value, this.note), this.plot,
      this.readout,
      make("ul", { class: "legend" }, swatches.map(([kind, name]) => make("li", {}, make("span", { class: `swatch ${kind}` }), name))));
    this.plot.addEventListener("pointermove", event => this.pointAt(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.select(null));
    this.plot.addEventListener("blur", () => this.select(null));
    this.plot.addEventListener("keydown", event => this.move(event));
    this.selected = null; // seconds before now
  }

  draw(points, now) {
    this.points = points;
    this.now = now;
    const width = this.plot.clientWidth || 300;
    this.width = width;
    const lines = this.about.series.map(one => ({ ...one, values: smooth(points, one.read) }));
    const stack = this.stackedAreas(points);
    const top = roundUp(Math.max(...lines.flatMap(({ values }) => values.map(([, value]) => value || 0)),
      ...stack.flatMap(({ upper }) => upper.map(([, value]) => value || 0)), 0));
    const x = at => LEFT + ((at - (now - SPAN_S)) / SPAN_S) * (width - LEFT - 2);
    const y = value => 4 + (1 - value / top) * (HEIGHT - BOTTOM - 4);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const drawn = [this.axis(top, x, y, now)];
    for (const { part, upper, lower } of stack) {
      drawn.push(makeSvg("path", { class: `area ${part}`, d: areaPath(upper, lower, x, y) }));
    }
    for (const { values, kind, area } of lines) {
      if (area) drawn.push(makeSvg("path", { class: `area soft-area ${kind}`, d: areaPath(values, values.map(([at]) => [at, 0]), x, y) }));
      drawn.push(makeSvg("path", { class: `curve ${kind}`, d: linePath(values, x, y) }));
    }
    this.cursor = makeSvg("line", { class: "cursor", y1: 2, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    drawn.push(this.cursor);
    this.plot.replaceChildren(...drawn);
    const last = lines.map(({ values }) => (values.length ? latest(values, now) : null));
    this.value.textContent = this.about.current(last);
    this.note.textContent = this.about.note ? this.about.note(last) : "";
    this.lines = lines;
    this.stack = stack;
    this.x = x;
    this.showSelected();
  }

  axis(top, x, y, now) {
    const parts = [0, top / 2, top].map(value => makeSvg("g", {},
      makeSvg("line", { class: "grid", x1: LEFT, x2: this.width, y1: y(value), y2: y(value) }),
      makeSvg("text", { class: "tick", x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, tick(value, this.about.format))));
    for (const minutes of [4, 3, 2, 1]) {
      parts.push(makeSvg("text", { class: "tick", x: x(now - 60 * minutes), y: HEIGHT - 2, "text-anchor": "middle" }, `-${minutes} min`));
    }
    return makeSvg("g", {}, parts);
  }

  /** Return the lower and upper edge of each part, without parts that are 0 everywhere. */
  stackedAreas(points) {
    const measured = points.filter(point => Object.keys(point.ttft_split).length);
    let below = measured.map(point => [point.at, 0]);
    const areas = [];
    for (const part of this.about.stacked || []) {
      const values = smooth(measured, point => point.ttft_split[part] || 0);
      const upper = values.map(([at, value], index) => [at, below[index][1] + value]);
      areas.push({ part, lower: below, upper });
      below = upper;
    }
    return areas;
  }

  pointAt(offset) {
    const share = (offset - LEFT) / (this.width - LEFT - 2);
    this.select(Math.max(0, Math.round((1 - share) * SPAN_S)));
  }

  move(event) {
    const step = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.select(Math.min(SPAN_S, Math.max(0, (this.selected === null ? 0 : this.selected) + step)));
  }

  select(secondsBefore) {
    this.selected = secondsBefore;
    this.showSelected();
  }

  showSelected() {
    this.element.classList.toggle("reading", this.selected !== null);
    if (this.selected === null || !this.lines) {
      this.readout.textContent = "";
      if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
      return;
    }
    const at = this.now - this.selected;
    // The point that is nearest in time.
    const near = values => values.reduce((best, one) => (best === null || Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best), null);
    const texts = this.lines.map(({ name, values }) => [name, near(values)])
      .concat(this.stack.map(({ part, upper, lower }) => {
        const high = near(upper);
        const low = near(lower);
        return [PARTS[part], high && [high[0], high[1] - low[1]]];
      }))
      .filter(([, point]) => point && point[1] !== null && Math.abs(point[0] - at) < JOINED_S)
      .map(([name, point]) => `${name} ${this.about.format(point[1])}`);
    this.readout.textContent = `${this.selected} s ago: ${texts.join(", ") || "nothing"}`;
    this.cursor.setAttribute("x1", this.x(at));
    this.cursor.setAttribute("x2", this.x(at));
    this.cursor.setAttribute("visibility", "visible");
  }
}

/** Return the newest value that is not older than JOINED_S. */
function latest(values, now) {
  for (let index = values.length - 1; index >= 0 && values[index][0] > now - JOINED_S; index -= 1) {
    if (values[index][1] !== null) return values[index][1];
  }
  return null;
}

/** Return the runs of values without a long gap. */
function runs(values) {
  const found = [];
  let last = null;
  for (const point of values) {
    if (point[1] === null) continue;
    if (last === null || point[0] - last > JOINED_S) found.push([]);
    found[found.length - 1].push(point);
    last = point[0];
  }
  return found;
}

const pathOf = (points, x, y) => points.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
const linePath = (values, x, y) => runs(values).map(run => pathOf(run, x, y)).join("");

function areaPath(upper, lower, x, y) {
  const below = new Map(lower);
  return runs(upper).map(run => {
    const back = [...run].reverse().map(([at]) => `L${x(at).toFixed(1)} ${y(below.get(at) || 0).toFixed(1)}`).join("");
    return `${pathOf(run, x, y)}${back}Z`;
  }).join("");
}

export class Charts {
  constructor(parent) {
    this.points = [];
    this.charts = CHARTS.map(about => new Chart(about));
    parent.append(...this.charts.map(({ element }) => element));
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  /** Take the points of the server, and keep older ones of this page. */
  begin(points) {
    const first = points.length ? points[0].at : Infinity;
    this.points = [...this.points.filter(point => point.at < first), ...points];
    this.draw();
  }

  add(point) {
    this.points.push(point);
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    const now = this.points[this.points.length - 1].at;
    this.points = this.points.filter(point => point.at > now - SPAN_S - SMOOTH_S);
    if (document.hidden) return; // the next point comes in a second
    for (const chart of this.charts) chart.draw(this.points, now);
  }
}
