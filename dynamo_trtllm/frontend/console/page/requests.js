// The latest requests as waterfalls of their phases, each with its timeline.

import { byId, make, makeTable } from "./dom.js";
import { errorText } from "./event_feed.js";
import { NONE, ago, clock, number, roundUp, seconds } from "./format.js";
import { ALL_GROUPS, legend, phaseBar, phaseList } from "./phases.js";

const MAX_KEPT = 200;
const MAX_SHOWN = 30;
const isFailure = row => !["ok", "cancelled"].includes(row.code);

/** Return the timeline of `explain` for a request, as nodes. */
export async function fetchTimeline(id, key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  try {
    const response = await fetch(`console/requests/${encodeURIComponent(id)}`, { headers, cache: "no-store" });
    if (!response.ok) return [make("p", { class: "bad-text" }, await errorText(response))];
    const found = await response.json();
    const rows = found.rows.map(([ms, process, event]) => ({ cells: [ms.toFixed(3), process, event] }));
    return [
      make("p", {}, `Request ${found.id}: ${found.outcome}.`),
      rows.length ? make("div", { class: "scroll" }, makeTable(["ms", "Process", "Event"], rows, "Timeline")) : null,
      ...found.notes.map(note => make("p", { class: "soft" }, note)),
    ].filter(Boolean);
  } catch {
    return [make("p", { class: "bad-text" }, "The frontend does not answer. Try again.")];
  }
}

/** Return the heads of the columns. The bars reach from 0 to `scale` seconds. */
const heading = scale => make("div", { class: "request-heading soft" },
  make("span", { class: "when" }, "ended"), make("span", { class: "code" }, "outcome"),
  make("span", { class: "tokens" }, "prompt → output"), make("span", { class: "ttft" }, "first token"),
  make("span", { class: "total" }, "total"), make("span", { class: "worker" }, "decode worker"),
  make("span", { class: "axis" }, make("span", {}, "0"), make("span", {}, seconds(scale))));

export class Requests {
  constructor(apiKey) {
    this.apiKey = apiKey;
    this.rows = []; // newest first
    this.known = new Set();
    this.open = null; // id of the request whose timeline is shown
    this.details = null;
    this.isPaused = false;
    this.worker = ""; // id of the worker whose requests are shown; "": of all
    this.scale = 0; // seconds of a whole bar
    this.buttons = new Map(); // by id of the request, all in this scale
    byId("phase-legend").append(...legend(ALL_GROUPS));
    byId("request-filter").addEventListener("change", () => this.draw());
    byId("pause").addEventListener("click", () => this.pause(!this.isPaused));
    byId("all-workers").addEventListener("click", () => this.showWorker(""));
  }

  /** Show only the requests of a worker. "": show those of all workers. */
  showWorker(id) {
    this.worker = id;
    byId("of-worker").hidden = !id;
    byId("worker-shown").textContent = id;
    this.draw();
    byId("requests").scrollIntoView({ block: "nearest" });
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    byId("pause").textContent = isPaused ? "Resume" : "Pause";
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    if (!isPaused) this.draw();
  }

  add(rows, now) {
    this.now = now;
    const fresh = rows.filter(row => !this.known.has(row.id));
    for (const row of fresh) this.known.add(row.id);
    this.rows.unshift(...fresh.reverse());
    for (const row of this.rows.splice(MAX_KEPT)) {
      this.known.delete(row.id);
      this.buttons.delete(row.id);
    }
    // A row that is read, or has the focus of the keyboard, must not move away.
    const isUsed = this.open !== null || byId("request-list").contains(document.activeElement);
    if (!this.isPaused && !isUsed && !document.hidden) this.draw();
  }

  selected() {
    const filter = byId("request-filter").value;
    // A request with choices on several workers names all of them.
    const rows = this.rows.filter(row => !this.worker || `${row.prefill} ${row.decode}`.includes(this.worker));
    if (filter === "failed") return rows.filter(isFailure);
    if (filter === "ttft") return rows.sort((one, other) => (other.first_token_s || 0) - (one.first_token_s || 0));
    if (filter === "total") return rows.sort((one, other) => other.total_s - one.total_s);
    return rows;
  }

  draw() {
    const shown = this.selected().slice(0, MAX_SHOWN);
    const scale = roundUp(Math.max(...shown.map(row => row.total_s), 0.001));
    if (scale !== this.scale) this.buttons.clear();
    this.scale = scale;
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.request : null;
    const items = shown.map(row => this.item(row));
    const of = this.worker ? ` of ${this.worker}` : "";
    const none = byId("request-filter").value === "failed" ? `None of the latest requests${of} failed.` : `No request${of} has ended yet.`;
    byId("request-list").replaceChildren(...(items.length ? [heading(scale), ...items] : [make("p", { class: "soft" }, none)]));
    if (focused) {
      const again = byId("request-list").querySelector(`[data-request="${CSS.escape(focused)}"]`);
      if (again) again.focus({ preventScroll: true });
    }
  }

  item(row) {
    const isOpen = row.id === this.open;
    let button = this.buttons.get(row.id);
    if (!button) {
      button = this.button(row);
      this.buttons.set(row.id, button);
    }
    button.setAttribute("aria-expanded", String(isOpen));
    button.firstChild.textContent = ago(row.begun_at + row.total_s, this.now);
    return isOpen ? make("div", { class: "opened" }, button, this.details) : button;
  }

  button(row) {
    const failed = isFailure(row);
    return make("button", { type: "button", class: "request", "data-request": row.id, onclick: () => this.toggle(row) },
    make("span", { class: "when", title: clock(row.begun_at) }),
    make("span", { class: `code ${failed ? "bad-text" : "soft"}` }, row.code === "ok" ? row.finish || "ok" : row.code),
    make("span", { class: "tokens" }, `${number(row.prompt_tokens)} → ${number(row.output_tokens)}`),
    make("span", { class: "ttft" }, row.first_token_s === null ? NONE : seconds(row.first_token_s)),
    make("span", { class: "total" }, seconds(row.total_s)),
    make("span", { class: "worker", title: row.decode }, row.decode || NONE),
    phaseBar(row.phases, row.total_s, this.scale));
  }

  toggle(row) {
    if (this.open === row.id) {
      this.open = null;
      this.details = null;
      this.draw();
      return;
    }
    this.open = row.id;
    const timeline = make("div", { "aria-live": "polite" }, make("p", { class: "soft" }, "Asking all processes for this request …"));
    const workers = [row.prefill && `prefill ${row.prefill}`, row.decode && `decode ${row.decode}`].filter(Boolean).join(", ");
    const repeated = [row.retries && `${row.retries} retries`, row.migrations && `${row.migrations} migrations`].filter(Boolean).join(", ");
    this.details = make("div", { class: "details" },
      make("p", {}, [`HTTP ${row.status || "–"}`, row.endpoint, row.model, workers, repeated, `began ${clock(row.begun_at)}`].filter(Boolean).join(" · ")),
      phaseList(row.phases), timeline);
    fetchTimeline(row.id, this.apiKey()).then(nodes => timeline.replaceChildren(...nodes));
    this.draw();
  }
}
