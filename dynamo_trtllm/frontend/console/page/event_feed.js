// Reads the stream of server-sent events. It connects again by itself.
//
// EventSource can't send an API key in a header, so this reads the body of a response.

const SILENT_MS = 8000; // without an event, the connection counts as lost
const CONNECT_MS = 20_000; // until the first event
const MAX_WAIT_S = 10;

/** Yield [name, data] for each event of a body. An event without a name is a "message". */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const name = lines.find(line => line.startsWith("event: "));
      const data = lines.find(line => line.startsWith("data: "));
      if (!data || data === "data: [DONE]") continue;
      yield [name ? name.slice(7) : "message", JSON.parse(data.slice(6))];
    }
  }
}

/** Return the sentence of an error response. */
export async function errorText(response) {
  try {
    const body = await response.json();
    return body.error.message || `Status ${response.status}.`;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export class EventFeed {
  /** `handlers`: onEvent(name, data), onLive(), onLost(sentence, seconds), onKeyNeeded(sentence). */
  constructor(handlers) {
    this.handlers = handlers;
    this.key = "";
    this.failures = 0;
    this.run = 0; // number of the newest loop of `start`: a new one ends the one before
  }

  /** Connect, and connect again whenever the stream ends. `key`: API key, or "". */
  async start(key) {
    this.key = key;
    this.run += 1;
    this.failures = 0;
    const run = this.run;
    if (this.abort) this.abort.abort();
    while (run === this.run) {
      const wait = await this.connect(run);
      if (wait === null || run !== this.run) return;
      await new Promise(resolve => setTimeout(resolve, wait * 1000));
    }
  }

  /** Read one stream. Return the seconds until the next attempt; null: a key is needed first. */
  async connect(run) {
    const abort = new AbortController();
    this.abort = abort;
    let timer = setTimeout(() => abort.abort(), CONNECT_MS);
    try {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      const response = await fetch("console/events", { headers, cache: "no-store", signal: abort.signal });
      if (response.status === 401 || response.status === 403) {
        this.handlers.onKeyNeeded(await errorText(response));
        return null;
      }
      if (!response.ok) return this.lost(await errorText(response));
      for await (const [name, data] of readEvents(response.body)) {
        if (run !== this.run) return null;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENT_MS);
        this.failures = 0;
        if (name === "error") {
          this.handlers.onKeyNeeded(data.message);
          return null;
        }
        if (name === "shutdown") return this.lost("This frontend shuts down.");
        this.handlers.onEvent(name, data);
        this.handlers.onLive();
      }
      return this.lost("The frontend has ended the stream of data.");
    } catch (error) {
      if (run !== this.run) return null;
      const isSilent = abort.signal.aborted;
      return this.lost(isSilent ? "No data came for a while." : "The frontend does not answer.");
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }

  lost(sentence) {
    const wait = Math.min(MAX_WAIT_S, 2 ** this.failures);
    this.failures += 1;
    this.handlers.onLost(sentence, wait);
    return wait;
  }
}
