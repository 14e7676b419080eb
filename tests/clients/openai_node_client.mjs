// The official Node client of OpenAI: its tool runner, a loop over `/v1/responses`, and parsed answers.
//
//     openai_node_client.mjs URL KEY MODEL

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";

import { check, checkEnd, facts, forms, key, model, note, same, tasks, tools, url } from "./tasks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const settings = { model, temperature: 0, max_tokens: 64 };
const runnable = tools.map(({ name, parameters, run }) => ({
  type: "function",
  function: { name, parameters, description: "A tool.", parse: JSON.parse, function: run },
}));

const messages = [{ role: "user", content: "Write a short note about a trip to Oslo." }];
const text = (await client.chat.completions.create({ messages, ...settings })).choices[0].message.content;
const pieces = client.chat.completions.stream({ messages, ...settings });
let streamed = "";
pieces.on("content", (delta) => (streamed += delta));
check((await pieces.finalContent()) === text && streamed === text, `whole: ${text}, streamed: ${streamed}`);

for (const stream of [false, true]) {
  let history = [];
  for (const task of tasks) {
    history.push({ role: "user", content: task.ask });
    const runner = client.chat.completions.runTools({ messages: history, tools: runnable, stream, ...settings });
    checkEnd(task, await runner.finalContent());
    history = runner.messages;
  }
  check(history.length === 4 * tasks.length, history);
}

async function whole(body) {
  return client.responses.create(body);
}

async function helped(body) {
  const stream = client.responses.stream(body);
  let written = "";
  stream.on("response.function_call_arguments.delta", (event) => (written += event.delta));
  const answer = await stream.finalResponse();
  const calls = answer.output.filter((item) => item.type === "function_call");
  check(written === calls.map((call) => call.arguments).join(""), `${written} differs from ${JSON.stringify(calls)}`);
  return answer;
}

const listed = tools.map(({ name, parameters }) => ({ type: "function", name, parameters, strict: false }));
for (const say of [whole, helped]) {
  let previous_response_id;
  for (const task of tasks) {
    let input = [{ role: "user", content: task.ask }];
    for (;;) {
      const answer = await say({
        model, input, previous_response_id, tools: listed, temperature: 0, max_output_tokens: 64,
      });
      previous_response_id = answer.id;
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (calls.length === 0) {
        checkEnd(task, answer.output_text);
        break;
      }
      input = calls.map((call) => ({
        type: "function_call_output",
        call_id: call.call_id,
        output: tools.find((tool) => tool.name === call.name).run(JSON.parse(call.arguments)),
      }));
    }
  }
}

// Answers that a schema binds, parsed by the client
const asked = {
  ...settings, messages: [{ role: "user", content: note }], response_format: zodResponseFormat(facts, "facts"),
};
const parsed = (await client.chat.completions.parse(asked)).choices[0].message.parsed;
same(facts.parse(parsed), parsed);
same((await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed, parsed);
const wanted = {
  model, input: note, temperature: 0, max_output_tokens: 64, text: { format: zodTextFormat(facts, "facts") },
};
const answered = (await client.responses.parse(wanted)).output_parsed;
same(facts.parse(answered), answered);
same((await client.responses.stream(wanted).finalResponse()).output_parsed, answered);

// Strict tools, and calls that are forced by name
for (const task of tasks) {
  for (const choice of ["auto", "required", { type: "function", function: { name: task.name } }]) {
    const answer = await client.chat.completions.parse({
      ...settings, tool_choice: choice, parallel_tool_calls: false,
      messages: [{ role: "user", content: task.ask }],
      tools: Object.entries(forms).map(([name, parameters]) => zodFunction({ name, parameters })),
    });
    const calls = answer.choices[0].message.tool_calls;
    same(calls.map((call) => [call.function.name, call.function.parsed_arguments]), [[task.name, task.arguments]]);
  }
  for (const choice of ["auto", "required", { type: "function", name: task.name }]) {
    const answer = await client.responses.parse({
      model, input: task.ask, temperature: 0, max_output_tokens: 64, tool_choice: choice, parallel_tool_calls: false,
      tools: Object.entries(forms).map(([name, parameters]) => zodResponsesFunction({ name, parameters })),
    });
    same(answer.output.map((item) => [item.name, item.parsed_arguments]), [[task.name, task.arguments]]);
  }
}
