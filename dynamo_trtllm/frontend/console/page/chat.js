// The chat: sends requests like any client, and shows reasoning, tool calls and its own timeline.

import { byId, make } from "./dom.js";
import { errorText, readEvents } from "./event_feed.js";
import { number, seconds } from "./format.js";
import { phaseBar } from "./phases.js";
import { fetchTimeline } from "./requests.js";

const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_system_health",
    description: "Returns the current health status of the LLM runtime\u2014use before critical operations to verify the service is live.",
    parameters: { type: "object", properties: {} },
  },
}];

/** One answer of the model, as it grows. */
class AnswerView {
  constructor(apiKey, onResult) {
    this.apiKey = apiKey;
    this.onResult = onResult;
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.reasoning = make("p", { class: "text" });
    this.reasoningBox = make("details", { class: "reasoning", hidden: true, open: true },
      make("summary", {}, "Reasoning"), this.reasoning);
    this.content = make("p", { class: "text" });
    this.callList = make("div");
    this.footer = make("div", { class: "soft" });
    this.element = make("div", { class: "message assistant" }, this.reasoningBox, this.content, this.callList, this.footer);
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id;
    if (chunk.dynamo_trtllm) this.stats = chunk.dynamo_trtllm;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices && chunk.choices[0];
    if (!choice) return;
    const { delta } = choice;
    const reasoning = delta.reasoning_content || delta.reasoning;
    if (reasoning) {
      this.reasoningBox.hidden = false;
      this.reasoning.append(reasoning);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.content.append(delta.content);
    }
    for (const call of delta.tool_calls || []) this.addCall(call);
  }

  addCall(part) {
    let call = this.calls[part.index];
    if (!call) {
      call = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
      this.calls[part.index] = call;
      call.shown = make("code", { class: "text" });
      call.box = make("div", { class: "tool-call" }, make("p", {}, "Tool call ", make("b", {}, call.function.name)), call.shown);
      this.callList.append(call.box);
    }
    if (part.function && part.function.arguments) {
      call.function.arguments += part.function.arguments;
      call.shown.append(part.function.arguments);
    }
  }

  /** Show what came last: the phases, and a field for the result of each tool call. */
  end() {
    this.reasoningBox.open = !this.message.content && !this.calls.length;
    if (this.calls.length) {
      this.message.tool_calls = this.calls.map(({ id, type, function: called }) => ({ id, type, function: called }));
      for (const call of this.calls) call.box.append(this.resultForm(call));
    }
    if (!this.stats) return;
    const phases = Object.entries(this.stats.phase_s).filter(([, s]) => s > 0).map(([phase, s]) => ["", phase, s]);
    const tokens = this.usage ? `${number(this.usage.prompt_tokens)} → ${number(this.usage.completion_tokens)} tokens` : "";
    const timeline = make("div");
    this.footer.append(
      make("p", {}, [tokens, `first token ${seconds(this.stats.ttft_s)}`, `total ${seconds(this.stats.total_s)}`].filter(Boolean).join(" · "), " ",
        make("button", {
          type: "button", class: "plain",
          onclick: async () => timeline.replaceChildren(...await fetchTimeline(this.id, this.apiKey())),
        }, "Timeline")),
      phaseBar(phases, this.stats.total_s, this.stats.total_s), timeline);
  }

  resultForm(call) {
    const input = make("input", { type: "text", "aria-label": `Result of ${call.function.name}`, placeholder: "Result of the tool" });
    return make("form", {
      class: "line",
      onsubmit: event => {
        event.preventDefault();
        if (!input.value) return;
        input.disabled = true;
        event.target.querySelector("button").disabled = true;
        this.onResult({ role: "tool", tool_call_id: call.id, content: input.value }, this.calls.length);
      },
    }, input, make("button", { type: "submit" }, "Send result"));
  }
}

export class Chat {
  constructor(apiKey, askForKey) {
    this.apiKey = apiKey;
    this.askForKey = askForKey;
    this.messages = [];
    this.results = [];
    this.abort = null;
    byId("chat-tools-json").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
    byId("chat-form").addEventListener("submit", event => {
      event.preventDefault();
      this.send();
    });
    byId("chat-text").addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.abort && this.abort.abort());
    byId("chat-clear").addEventListener("click", () => {
      if (this.abort) this.abort.abort();
      this.messages = [];
      this.results = [];
      byId("conversation").replaceChildren();
    });
  }

  setModels(models) {
    const select = byId("chat-model");
    if (models.join("\n") === [...select.options].map(option => option.value).join("\n")) return;
    const before = select.value;
    select.replaceChildren(...models.map(model => make("option", { value: model }, model)));
    if (models.includes(before)) select.value = before;
  }

  send() {
    const text = byId("chat-text").value.trim();
    if (!text || this.abort) return;
    byId("chat-text").value = "";
    this.messages.push({ role: "user", content: text });
    this.show(make("div", { class: "message user" }, make("p", { class: "text" }, text)));
    this.answer();
  }

  /** Take the result of a tool call. Once the answer has `wanted` results, the model goes on. */
  takeResult(result, wanted) {
    this.results.push(result);
    if (this.results.length < wanted) return;
    this.messages.push(...this.results);
    this.results = [];
    this.answer();
  }

  /** Return the body of the next request. Throw an Error if the tools are no JSON. */
  body() {
    const body = {
      model: byId("chat-model").value, messages: this.messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number(byId("chat-tokens").value) || 512,
    };
    if (byId("chat-tools").checked) {
      try {
        body.tools = JSON.parse(byId("chat-tools-json").value);
      } catch (error) {
        throw new Error(`The tools are no JSON: ${error.message}`);
      }
    }
    return body;
  }

  async answer() {
    const view = new AnswerView(this.apiKey, (result, wanted) => this.takeResult(result, wanted));
    this.show(view.element);
    const conversation = this.messages;
    this.abort = new AbortController();
    byId("chat-stop").hidden = false;
    byId("chat-send").disabled = true;
    try {
      const headers = { "Content-Type": "application/json", "X-Dynamo-Stats": "1" };
      if (this.apiKey()) headers.Authorization = `Bearer ${this.apiKey()}`;
      const response = await fetch("v1/chat/completions", {
        method: "POST", headers, body: JSON.stringify(this.body()), signal: this.abort.signal,
      });
      if (!response.ok) {
        const sentence = await errorText(response);
        if (response.status === 401) this.askForKey(sentence);
        throw new Error(sentence);
      }
      for await (const [, chunk] of readEvents(response.body)) view.add(chunk);
      this.messages.push(view.message);
      view.end();
    } catch (error) {
      const text = this.abort.signal.aborted ? "Stopped." : error.message;
      view.element.append(make("p", { class: "bad-text" }, text === "Failed to fetch" ? "The frontend does not answer. Send the message again." : text));
      // "Clear" may have begun another conversation, of which this answer is no part.
      if (conversation === this.messages) this.keepOrUndo(view.message);
    } finally {
      this.abort = null;
      byId("chat-stop").hidden = true;
      byId("chat-send").disabled = false;
      this.scroll();
    }
  }

  /** Keep the text of an answer that was cut off. Without text, put the question back, so that it can be sent again. */
  keepOrUndo(message) {
    if (message.content) {
      this.messages.push(message);
    } else if (this.messages.length && this.messages[this.messages.length - 1].role === "user") {
      byId("chat-text").value = this.messages.pop().content;
    }
  }

  show(element) {
    byId("conversation").append(element);
    this.scroll();
  }

  scroll() {
    const list = byId("conversation");
    list.scrollTop = list.scrollHeight;
  }
}
