// Vercel's AI SDK with its provider for servers that speak OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import { Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { DESCRIPTION, QUESTION, STATUS, check, run } from "./steps.mjs";

const Ready = z.object({ is_ready: z.boolean() });
const tools = {
  get_system_health: tool({
    description: DESCRIPTION,
    inputSchema: z.object({}),
    execute: async () => STATUS,
  }),
};

async function plain(baseURL, model) {
  // docs: ai-sdk
  const options = { supportsStructuredOutputs: true };
  const provider = createOpenAICompatible({ name: "local", baseURL, ...options });
  const { text } = await generateText({ model: provider(model), prompt: "Hello" });
  // docs: end
  check(text);
  return text;
}

function connect(baseURL, model) {
  const options = { name: "local", baseURL, supportsStructuredOutputs: true };
  return { model: createOpenAICompatible(options)(model), maxRetries: 0 };
}

async function stream(baseURL, model) {
  const result = streamText({ ...connect(baseURL, model), prompt: "Hello" });
  const parts = [];
  for await (const part of result.textStream) parts.push(part);
  check(parts.length > 3, parts);
  return parts.join("");
}

async function tool_loop(baseURL, model) {
  const asked = { ...connect(baseURL, model), tools, stopWhen: stepCountIs(3) };
  const first = await generateText({ ...asked, prompt: QUESTION });
  check(first.steps.length === 2, first.steps);
  // The second question has the messages that the SDK keeps of the first one.
  const messages = [{ role: "user", content: QUESTION }, ...first.response.messages];
  messages.push({ role: "user", content: "Thanks" });
  const second = await generateText({ ...asked, messages });
  check(second.text, second);
  return second.text;
}

async function structured(baseURL, model) {
  const output = Output.object({ schema: Ready });
  const result = await generateText({ ...connect(baseURL, model), prompt: "Hello", output });
  check(typeof result.output.is_ready === "boolean", result.output);
  return result.text;
}

async function tools_structured(baseURL, model) {
  const asked = { ...connect(baseURL, model), tools, stopWhen: stepCountIs(3), prompt: QUESTION };
  const result = await generateText({ ...asked, output: Output.object({ schema: Ready }) });
  check(typeof result.output.is_ready === "boolean", result);
  return result.text;
}

await run({ plain, stream, tool_loop, structured, tools_structured });
