// The workers: a drawing with their pairs, and tables.

import { byId, make, makeSvg, makeTable } from "./dom.js";
import { NONE, ago, byteRate, number, percent, seconds } from "./format.js";

const MAX_CARDS = 12; // of a role; the table has the others
const MAX_LABELS = 9; // rates in the drawing
const GONE_S = 600;
const PAIR_STATES = { working: "working", untried: "not tried yet", failing: "failing", quarantined: "quarantined" };
const ROLE_NAMES = { prefill: "Prefill", decode: "Decode", prefill_and_decode: "Aggregated", elastic: "Elastic" };
const SILENT_S = 5;

export const kvShare = worker => (worker.kv_blocks_total ? worker.kv_blocks_used / worker.kv_blocks_total : null);

/** Return what a worker needs: "bad", "warning" or "good", and a word. */
function stateOf(worker) {
  if (worker.streams && worker.silent_s >= SILENT_S) return ["bad", `silent for ${Math.round(worker.silent_s)} s`];
  if (worker.slow_ratio) return ["warning", `slow, ${worker.slow_ratio.toFixed(1)}×`];
  if ((kvShare(worker) || 0) >= 0.95) return ["warning", "KV cache full"];
  return ["good", "ready"];
}

/** Return the time of a step in words. */
function stepText(worker) {
  const texts = [];
  if (worker.token_ms !== null) texts.push(`${seconds(worker.token_ms / 1e3)}/token`);
  if (worker.prompt_token_ms !== null) texts.push(`${seconds(worker.prompt_token_ms)}/1k prompt`);
  return texts.join(", ") || NONE;
}

function kvBar(worker) {
  const share = kvShare(worker);
  if (share === null) return make("span", { class: "soft" }, "KV not reported");
  const full = make("span", { class: `full ${share >= 0.95 ? "bad" : share >= 0.8 ? "warning" : ""}` });
  full.style.width = percent(share);
  return make("span", { class: "kv", title: `${number(worker.kv_blocks_used)} of ${number(worker.kv_blocks_total)} KV blocks` },
    make("span", { class: "gauge" }, full), `KV ${percent(share)}`);
}

/** Return which work an elastic worker takes, and since when. */
function shareText(worker, now) {
  const text = `prefill ${worker.prefill_share} · decode ${worker.decode_share}`;
  return worker.shares_at === null ? text : `${text}, set ${ago(worker.shares_at, now)}`;
}

/** Return the workers that left and were not replaced. */
function goneWorkers(events, now) {
  const later = {};
  const gone = [];
  for (const event of events) { // the newest first
    const kind = `${event.model} ${event.role}`;
    if (event.event === "registered") later[kind] = (later[kind] || 0) + 1;
    else if (later[kind]) later[kind] -= 1;
    else if (now - event.at < GONE_S) gone.push(event);
  }
  return gone;
}

export class Workers {
  /** `onPick(id)` is called when the card of a worker is chosen. */
  constructor(onPick) {
    this.onPick = onPick;
    this.lines = makeSvg("svg", { class: "lines", "aria-hidden": "true" });
    this.columns = make("div", { class: "columns" });
    byId("topology").append(this.lines, this.columns);
    this.cards = new Map(); // by id
    byId("pair-legend").append(...Object.entries(PAIR_STATES).map(([state, name]) =>
      make("li", {}, make("span", { class: `pair-swatch ${state}` }), name)));
    new ResizeObserver(() => this.drawLines()).observe(byId("topology"));
    byId("worker-details").open = innerWidth > 640; // the cards have the same numbers
  }

  show(snapshot) {
    this.snapshot = snapshot;
    if (document.hidden) return; // the next snapshot comes in a second
    this.showCards(snapshot);
    this.drawLines();
    this.showEvents(snapshot);
    this.showTables(snapshot);
  }

  showCards({ workers, events, at }) {
    const gone = goneWorkers(events, at);
    const columns = [];
    this.cards.clear();
    for (const role of Object.keys(ROLE_NAMES)) {
      const own = workers.filter(worker => worker.role === role);
      const missing = gone.filter(event => event.role === role);
      if (!own.length && !missing.length) continue;
      // Workers that need something come first.
      const ranked = [...own].sort((one, other) => (stateOf(one)[0] === "good") - (stateOf(other)[0] === "good"));
      const shown = ranked.slice(0, MAX_CARDS);
      const cards = shown.map(worker => this.card(worker));
      const ghosts = missing.slice(0, 4).map(event => make("li", { class: "worker-card gone", "data-worker": event.id },
        make("p", { class: "name" }, make("span", { class: "dot bad" }), make("code", {}, event.id)),
        make("p", {}, `Left ${ago(event.at, at)}.`)));
      columns.push(make("div", { class: `column ${role}` },
        make("h3", {}, `${ROLE_NAMES[role]} `, make("span", { class: "soft" }, String(own.length))),
        make("ul", {}, ghosts, cards),
        own.length > shown.length ? make("p", { class: "soft" }, `${own.length - shown.length} more in the table.`) : null));
    }
    if (!columns.length) columns.push(make("p", { class: "soft" }, "No worker has registered yet."));
    const focused = document.activeElement && document.activeElement.closest(".worker-card");
    this.columns.replaceChildren(...columns);
    // The new card of the same worker gets the focus of the keyboard.
    const again = focused && this.cards.get(focused.dataset.worker);
    if (again) again.querySelector("button").focus({ preventScroll: true });
  }

  card(worker) {
    const [state, word] = stateOf(worker);
    const busy = worker.running === null ? "load not reported yet"
      : `${number(worker.running)} running · ${number(worker.waiting)} waiting`;
    const pick = make("button", { type: "button", class: "plain", title: "Show the latest requests of this worker", onclick: () => this.onPick(worker.id) },
      make("code", {}, worker.id));
    const card = make("li", { class: `worker-card ${state}`, "data-worker": worker.id, title: `${worker.engine} · ${worker.model}` },
      make("p", { class: "name" }, make("span", { class: `dot ${state}` }), pick,
        make("b", { class: "word" }, state === "good" ? "" : word)),
      make("p", { class: state }, stepText(worker)),
      make("p", {}, busy),
      worker.prefill_share === null ? null : make("p", { title: "shares of the work of each kind" }, shareText(worker, this.snapshot.at)),
      make("p", {}, kvBar(worker)),
      worker.role === "prefill" ? null : make("p", { class: "soft" }, `${number(worker.tokens_per_s)} tokens/s of all its streams`));
    this.cards.set(worker.id, card);
    return card;
  }

  /** Draw a line for each pair between the cards of its workers. */
  drawLines() {
    if (!this.snapshot) return;
    const frame = this.columns.getBoundingClientRect();
    this.lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    this.lines.setAttribute("width", frame.width);
    this.lines.setAttribute("height", frame.height);
    const drawn = [];
    const labels = [];
    const pairs = this.snapshot.pairs.filter(pair => this.cards.has(pair.prefill) && this.cards.has(pair.decode));
    // Broken pairs lie above the others.
    pairs.sort((one, other) => (one.state !== "working") - (other.state !== "working"));
    pairs.forEach((pair, index) => {
      const from = this.cards.get(pair.prefill).getBoundingClientRect();
      const to = this.cards.get(pair.decode).getBoundingClientRect();
      const x1 = from.right - frame.left;
      const y1 = from.top + from.height / 2 - frame.top;
      const x2 = to.left - frame.left;
      const y2 = to.top + to.height / 2 - frame.top;
      const bend = (x2 - x1) / 2;
      const moves = pair.bytes_per_s !== null;
      drawn.push(makeSvg("path", {
        class: `pair ${pair.state}${moves ? " moves" : ""}`,
        d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`,
      }));
      if (moves && pairs.length <= MAX_LABELS && x2 - x1 > 90) {
        // Spread over the width, so that labels of crossing lines do not lie on each other.
        const t = pairs.length === 1 ? 0.5 : 0.3 + (0.4 * (index % 2));
        // The height of the curve where its parameter is `t`.
        const y = y1 + (y2 - y1) * (3 * t * t - 2 * t * t * t);
        labels.push(makeSvg("text", { class: "rate", x: x1 + (x2 - x1) * t, y: y - 4, "text-anchor": "middle" }, byteRate(pair.bytes_per_s)));
      }
    });
    this.lines.replaceChildren(...drawn, ...labels);
  }

  showEvents({ events, at }) {
    const rows = events.slice(0, 8).map(event => make("li", {},
      make("span", { class: `dot ${event.event === "left" ? "bad" : "good"}` }),
      `${ROLE_NAMES[event.role] || event.role} worker `, make("code", {}, event.id), ` ${event.event} `,
      make("span", { class: "soft" }, ago(event.at, at))));
    byId("events").replaceChildren(...(rows.length ? rows : [make("li", { class: "soft" }, "None since this frontend started.")]));
  }

  showTables({ workers, num_workers: total, pairs, num_pairs: allPairs, frontends }) {
    const rows = workers.map(worker => {
      const [state, word] = stateOf(worker);
      return {
        kind: state,
        cells: [make("code", {}, worker.id), ROLE_NAMES[worker.role] || worker.role, worker.model,
          make("span", {}, make("span", { class: `dot ${state}` }), word), number(worker.running), number(worker.waiting),
          kvBar(worker), stepText(worker), number(worker.streams), number(worker.tokens_per_s)],
      };
    });
    const heads = ["Worker", "Role", "Model", "State", "Running", "Waiting", "KV cache", "Time per step", "Streams", "Tokens/s"];
    byId("worker-table").replaceChildren(makeTable(heads, rows, "Workers"), more(workers.length, total));
    const pairRows = pairs.map(pair => ({
      kind: pair.state,
      cells: [pair.prefill ? make("code", {}, pair.prefill) : "aggregated", make("code", {}, pair.decode),
        PAIR_STATES[pair.state] || pair.state, pair.age_s === null ? NONE : `${Math.round(pair.age_s)} s ago`,
        byteRate(pair.bytes_per_s), pair.reason],
    }));
    const pairHeads = ["Prefill", "Decode", "State", "Last used or probed", "KV transfer", "Reason"];
    byId("pair-table").replaceChildren(makeTable(pairHeads, pairRows, "Pairs"), more(pairs.length, allPairs));
    const frontendRows = frontends.map(one => ({
      kind: one.silent_s >= SILENT_S ? "bad" : "good",
      cells: [one.name, number(one.requests_per_s), number(one.inflight), number(one.queued), `${Math.round(one.silent_s)} s ago`],
    }));
    byId("frontend-table").replaceChildren(
      makeTable(["Process", "Requests/s", "In progress", "Queued", "Last report"], frontendRows, "Frontend processes"));
  }
}

const more = (shown, total) => make("p", { class: "soft" }, shown < total ? `${shown} of ${total} are listed.` : "");
