// The Vercel AI SDK with three models: OpenAI-compatible, OpenAI's chat completions, and its default, responses.
//
//     ai_sdk_client.mjs URL KEY MODEL

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { dynamicTool, generateText, jsonSchema, stepCountIs, streamText } from "ai";

import { check, checkEnd, key, model, tasks, tools, url } from "./tasks.mjs";

const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: key });
const compatible = createOpenAICompatible({ name: "refrain", baseURL, apiKey: key, includeUsage: true });
const models = [compatible(model), openai.chat(model), openai(model)];
const toolSet = Object.fromEntries(
  tools.map(({ name, parameters, run }) => [
    name,
    dynamicTool({ description: "A tool.", inputSchema: jsonSchema(parameters), execute: run }),
  ]),
);

async function whole(settings) {
  const result = await generateText(settings);
  return [result.text, result.steps, result.response.messages, result.totalUsage];
}

async function streamed(settings) {
  const result = streamText({ ...settings, onError: ({ error }) => { throw error; } });
  const kinds = new Set();
  let last = "";
  for await (const part of result.fullStream) {
    kinds.add(part.type);
    if (part.type === "start-step") last = "";
    if (part.type === "text-delta") last += part.text;
  }
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "text-delta", "finish"]) {
    check(kinds.has(kind), `no ${kind} among ${[...kinds]}`);
  }
  return [last, await result.steps, (await result.response).messages, await result.totalUsage];
}

for (const spoken of models) {
  for (const say of [whole, streamed]) {
    let messages = [];
    for (const task of tasks) {
      messages.push({ role: "user", content: task.ask });
      const [text, steps, more, usage] = await say({
        model: spoken, messages, tools: toolSet, stopWhen: stepCountIs(4), temperature: 0, maxOutputTokens: 64,
        maxRetries: 0,
      });
      checkEnd(task, text);
      const reasons = steps.map((step) => step.finishReason);
      check(reasons.join() === "tool-calls,stop", reasons.join());
      check(usage.inputTokens > 0 && usage.outputTokens > 0, usage);
      messages = [...messages, ...more];
    }
  }
}
