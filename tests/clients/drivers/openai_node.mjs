// The openai package for Node: chat completions and responses.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { DESCRIPTION, QUESTION, STATUS, check, run } from "./steps.mjs";

const name = "get_system_health";
const parameters = { type: "object", properties: {} };
const tool = { type: "function", function: { name, description: DESCRIPTION, parameters } };
const Ready = z.object({ is_ready: z.boolean() });
const HELLO = [{ role: "user", content: "Hello" }];

async function plain(baseURL, model) {
  // docs: openai-node
  const client = new OpenAI({ baseURL, apiKey: "none" });
  const messages = [{ role: "user", content: "Hello" }];
  const answer = await client.chat.completions.create({ model, messages });
  const text = answer.choices[0].message.content;
  // docs: end
  check(text, answer);
  return text;
}

const connect = (baseURL) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

async function stream(baseURL, model) {
  const events = connect(baseURL).chat.completions.stream({ model, messages: HELLO });
  let text = "";
  for await (const chunk of events) text += chunk.choices[0]?.delta.content ?? "";
  const final = await events.finalContent();
  check(text && final === text, text, final);
  return text;
}

async function tools(baseURL, model) {
  // The second turn sends back the message object itself.
  const client = connect(baseURL);
  const messages = [{ role: "user", content: QUESTION }];
  const asked = { model, messages, tools: [tool] };
  const { message } = (await client.chat.completions.create(asked)).choices[0];
  check(message.tool_calls, message);
  messages.push(message);
  messages.push({ role: "tool", tool_call_id: message.tool_calls[0].id, content: STATUS });
  const second = await client.chat.completions.create(asked);
  check(second.choices[0].message.content, second);
  return second.choices[0].message.content;
}

async function run_tools(baseURL, model) {
  // The helper calls the function and sends back what it keeps.
  const callable = { ...tool.function, function: async () => STATUS, parse: JSON.parse };
  const runner = connect(baseURL).chat.completions.runTools({
    model,
    messages: [{ role: "user", content: QUESTION }],
    tools: [{ type: "function", function: callable }],
  });
  const text = await runner.finalContent();
  check(runner.messages.some((message) => message.role === "tool"), runner.messages);
  return text;
}

async function structured(baseURL, model) {
  const response_format = zodResponseFormat(Ready, "ready");
  const asked = { model, messages: HELLO, response_format };
  const answer = await connect(baseURL).chat.completions.parse(asked);
  check(typeof answer.choices[0].message.parsed.is_ready === "boolean", answer);
  return answer.choices[0].message.content;
}

async function zod_tool_and_format(baseURL, model) {
  // zodFunction makes a strict tool, here beside an answer format (R3).
  const response_format = zodResponseFormat(Ready, "ready");
  const tools = [zodFunction({ name: "report", parameters: Ready })];
  const asked = { model, messages: HELLO, tools, response_format };
  const { message } = (await connect(baseURL).chat.completions.parse(asked)).choices[0];
  check(message.parsed || message.tool_calls, message);
  return message.content || message.tool_calls[0].function.arguments;
}

async function responses(baseURL, model) {
  const client = connect(baseURL);
  const input = [{ role: "user", content: QUESTION }];
  const tools = [{ type: "function", name, description: DESCRIPTION, parameters, strict: false }];
  const first = await client.responses.create({ model, input, tools, store: false });
  const call = first.output.find((item) => item.type === "function_call");
  check(call, first);
  input.push(...first.output);
  input.push({ type: "function_call_output", call_id: call.call_id, output: STATUS });
  const second = await client.responses.create({ model, input, tools, store: false });
  check(second.output_text, second);
  return second.output_text;
}

await run({ plain, stream, tools, run_tools, structured, zod_tool_and_format, responses });
