// The Vercel AI SDK with three models: OpenAI-compatible, OpenAI's chat completions, and its default, responses.
//
//     ai_sdk_client.mjs URL KEY MODEL

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  dynamicTool, generateObject, generateText, jsonSchema, Output, stepCountIs, streamObject, streamText, tool,
} from "ai";

import { check, checkEnd, facts, forms, key, model, note, same, tasks, tools, url } from "./tasks.mjs";

const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: key });
const compatible = createOpenAICompatible({
  name: "refrain", baseURL, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
});
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

async function last(stream) {
  let end;
  for await (const part of stream) end = part;
  return end;
}

const settings = { temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const colors = ["red", "green", "blue"];
for (const spoken of models) {
  // Answers that a schema binds
  const asked = { ...settings, model: spoken, prompt: note };
  const { object } = await generateObject({ ...asked, schema: facts });
  same(facts.parse(object), object);
  same(await last(streamObject({ ...asked, schema: facts }).partialObjectStream), object);
  same((await generateText({ ...asked, output: Output.object({ schema: facts }) })).output, object);
  same(await last(streamText({ ...asked, output: Output.object({ schema: facts }) }).partialOutputStream), object);
  check(colors.includes((await generateObject({ ...asked, output: "enum", enum: colors })).object), "another colour");
  const untyped = (await generateObject({ ...asked, output: "no-schema" })).object;
  same(facts.parse(untyped), untyped);

  // Calls that are forced, of any tool and by name, with strict tools
  const strict = Object.fromEntries(
    Object.entries(forms).map(([name, inputSchema]) => [
      name,
      tool({ description: "A tool.", inputSchema, strict: true }),
    ]),
  );
  for (const task of tasks) {
    for (const toolChoice of ["auto", "required", { type: "tool", toolName: task.name }]) {
      const { toolCalls } = await generateText({
        ...settings, model: spoken, prompt: task.ask, tools: strict, toolChoice,
      });
      same(toolCalls.map((call) => [call.toolName, call.input]), [[task.name, task.arguments]]);
    }
  }
}
