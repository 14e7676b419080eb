// The work that every client gives the shipped model, as in tasks.py.

import { readFileSync } from "node:fs";

import { z } from "zod";

const content = JSON.parse(readFileSync(new URL("tasks.json", import.meta.url)));

export const tasks = content.tasks;
// A note and a request for its facts, which the model answers with one JSON object.
export const note = content.note;

// The gateway's address, an API key and the model, which are the arguments of every client.
export const [url, key, model] = process.argv.slice(2);

export function check(holds, what) {
  if (!holds) {
    throw new Error(`check failed: ${typeof what === "string" ? what : JSON.stringify(what)}`);
  }
}

// The schemas of the facts and of a call. A limit bounds every text, so that every answer ends.
const text = z.string().max(24);
export const facts = z.object({
  who: text,
  where: text,
  date: z.string().regex(/^[0-9]{4}-[0-9]{2}-[0-9]{2}$/),
  what: text,
  cost: z.int().min(0).max(9999),
});
export const forms = {
  get_weather: z.object({ city: text, days: z.int().min(1).max(9) }),
  get_stock: z.object({ item: text }),
  create_order: z.object({ item: text, count: z.int().min(1).max(99), customer: text }),
};

export function same(said, expected) {
  const [came, wanted] = [said, expected].map((value) => JSON.stringify(value));
  check(came === wanted, `${came} came, and not ${wanted}`);
}

// The calls that reached a tool since they were last taken.
const ran = [];

// The tools, each with its JSON schema and a function that notes the call and returns the result.
export const tools = Object.entries(content.tools).map(([name, fields]) => ({
  name,
  parameters: {
    type: "object",
    properties: Object.fromEntries(Object.entries(fields).map(([field, type]) => [field, { type }])),
    required: Object.keys(fields),
    additionalProperties: false,
  },
  run(given) {
    ran.push([name, given]);
    return tasks.find((task) => task.name === name).result;
  },
}));

// Checks a task's end: the tool ran once with the right arguments, and the answer tells its result.
export function checkEnd(task, answer) {
  const calls = JSON.stringify(ran.splice(0));
  check(calls === JSON.stringify([[task.name, task.arguments]]), `${task.ask} The tools ran as ${calls}`);
  check(answer === task.answer, `${task.ask} The answer is ${answer}`);
}
