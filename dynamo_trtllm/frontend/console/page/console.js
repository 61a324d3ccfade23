// The console: connects, and passes what comes to the parts of the page.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, make } from "./dom.js";
import { EventFeed } from "./event_feed.js";
import { clock, number, plural } from "./format.js";
import { Requests } from "./requests.js";
import { Workers } from "./workers.js";

const KEY = "dynamo_trtllm.api_key";
const STATUS = { healthy: "Healthy", degraded: "Needs attention", not_ready: "Not ready" };

let apiKey = sessionStorage.getItem(KEY) || "";
const charts = new Charts(byId("charts"));
const requests = new Requests(() => apiKey);
const workers = new Workers(id => requests.showWorker(id));
const chat = new Chat(() => apiKey, askForKey);

function askForKey(sentence) {
  byId("key-form").hidden = false;
  byId("key-reason").textContent = sentence;
  byId("notice").hidden = true;
  byId("main").classList.add("stale");
  connection("lost", "Key needed");
  byId("key").focus();
}

function connection(state, text) {
  const shown = byId("connection");
  shown.className = `connection ${state}`;
  shown.textContent = text;
}

function showHealth(snapshot) {
  const { status, reasons, point } = snapshot;
  byId("health").className = `health panel ${status}`;
  const heading = byId("status");
  if (heading.textContent !== STATUS[status]) heading.textContent = STATUS[status];
  document.title = status === "healthy" ? "Console" : `(!) ${STATUS[status]} · Console`;
  byId("summary").textContent = [
    `${number(snapshot.frontends.length)} frontend process${snapshot.frontends.length === 1 ? "" : "es"}`,
    plural(snapshot.num_workers, "worker"),
    plural(snapshot.num_pairs, "pair"),
    `${number(point.inflight)} ${point.inflight === 1 ? "request" : "requests"} in progress`,
    snapshot.models.length ? `model ${snapshot.models.join(", ")}` : "no model",
  ].join(" · ");
  byId("reasons").replaceChildren(...reasons.map(reason =>
    make("li", { class: reason.severity }, make("span", { class: "dot", "aria-hidden": "true" }), reason.text)));
}

function show(snapshot) {
  byId("main").hidden = false;
  showHealth(snapshot);
  workers.show(snapshot);
  requests.add(snapshot.requests, snapshot.at);
  chat.setModels(snapshot.models);
  connection("live", `Live ${clock(snapshot.at)}`);
}

const feed = new EventFeed({
  onEvent(name, data) {
    if (name === "hello") {
      byId("namespace").textContent = `${data.namespace} · ${data.version}`;
      byId("main").hidden = false;
      charts.begin(data.points);
      show(data.snapshot);
    } else if (name === "snapshot") {
      charts.add(data.point);
      show(data);
    }
  },
  onLive() {
    byId("notice").hidden = true;
    byId("key-form").hidden = true;
    byId("forget-key").hidden = !apiKey;
    byId("main").classList.remove("stale");
  },
  onLost(sentence, wait) {
    const notice = byId("notice");
    notice.textContent = `${sentence} Connecting again in ${wait} s. What is shown may be out of date.`;
    notice.hidden = false;
    byId("main").classList.add("stale");
    connection("lost", "Connection lost");
  },
  onKeyNeeded: askForKey,
});

byId("key-form").addEventListener("submit", event => {
  event.preventDefault();
  apiKey = byId("key").value.trim();
  byId("key").value = "";
  sessionStorage.setItem(KEY, apiKey);
  connection("", "Connecting");
  feed.start(apiKey);
});
byId("forget-key").addEventListener("click", () => {
  apiKey = "";
  sessionStorage.removeItem(KEY);
  byId("forget-key").hidden = true;
  feed.start(apiKey);
});
feed.start(apiKey);
