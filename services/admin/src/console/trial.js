// A request that is sent from this page with a tenant's key, and its story: which step brought which tokens, and
// where their drafts came from.

import { events } from "./api.js";
import { facts } from "./dialogs.js";
import { h, panel, s, say, table } from "./elements.js";
import { SOURCES, sourceOf } from "./figures.js";
import { count, many, percent, seconds, short } from "./format.js";

// A question of the kind that the shipped model was trained on.
const SYSTEM = "You write SQL. Answer with one statement.";
const QUESTION = `CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  city TEXT,
  amount INTEGER
);

What is the average amount of the orders per city?`;

const DRAFTS = [
  ["auto", "by the router"],
  ["suffix", "earlier outputs only"],
  ["eagle3", "EAGLE-3 head only"],
  ["draft_model", "draft model only"],
  ["off", "none"],
];

// Most stories that are kept on the page.
const STORIES_MAX = 5;

// The tokens of a step with the source of each. Those that drafts brought come first, in the order of the drafts.
function attributed(step) {
  const sources = step.drafts.flatMap((draft) =>
    Array(draft.accepted).fill(sourceOf(draft.source, step.scope)));
  return step.tokens.map((text, place) => ({ text, source: sources[place] ?? null }));
}

function describe(step, number) {
  const drafts = step.drafts.filter((draft) => draft.drafted > 0).map((draft) =>
    `${sourceOf(draft.source, step.scope).name}: ${draft.accepted} of ${draft.drafted} accepted`);
  return `Step ${number}, after ${seconds(step.at_s)}: ${drafts.join("; ") || "no draft"}`;
}

// One column per step: the tokens that it brought by their source, and above them the rejected ones.
function strip(steps) {
  // The number of tokens stands above each column.
  const head = 14;
  const height = head + 96;
  const most = Math.max(...steps.map((step) =>
    step.tokens.length + step.drafts.reduce((sum, draft) => sum + draft.drafted - draft.accepted, 0)));
  const unit = Math.min(12, (height - head) / most);
  const width = Math.max(3, Math.min(24, 720 / steps.length));
  const columns = steps.map((step, index) => {
    const boxes = [];
    let y = height;
    const add = (tokens, style) => {
      if (tokens === 0) return;
      y -= tokens * unit;
      boxes.push(s("rect", { class: style, x: index * width, y, width: width - 1.5, height: tokens * unit - 0.5 }));
    };
    const brought = step.drafts.reduce((sum, draft) => sum + draft.accepted, 0);
    add(step.tokens.length - brought, "area of-none");
    for (const draft of step.drafts) add(draft.accepted, `area of-${sourceOf(draft.source, step.scope).id}`);
    add(step.drafts.reduce((sum, draft) => sum + draft.drafted - draft.accepted, 0), "rejected");
    const label = s("text", { class: "tick", x: (index + 0.5) * width - 0.75, y: y - 4, "text-anchor": "middle" });
    if (width >= 16) label.textContent = step.tokens.length;
    return s("g", { "data-step": index, class: "column" }, s("title", {}, describe(step, index + 1)), boxes, label);
  });
  return s("svg", {
    class: "strip",
    viewBox: `0 0 ${steps.length * width} ${height}`,
    width: steps.length * width,
    height,
    role: "img",
    "aria-label": "Tokens of each step by the source of their drafts. The table of steps has the same figures.",
  }, columns);
}

function legendOf(steps) {
  const met = new Set(steps.flatMap((step) => attributed(step).map(({ source }) => source?.id ?? "none")));
  return h("ul", { class: "legend" }, SOURCES.filter(({ id }) => met.has(id)).map(({ id, name }) =>
    h("li", { class: `of-${id}` }, h("span", { class: "swatch" }), id === "none" ? "Chosen by the engine itself" : name)),
  steps.some((step) => step.drafts.some((draft) => draft.drafted > draft.accepted))
    ? h("li", {}, h("span", { class: "swatch rejected" }), "Rejected") : null);
}

function stepTable(steps) {
  const list = table({
    caption: "The steps of the request",
    empty: "",
    columns: [
      { head: "Step", cell: (row) => String(row.id) },
      { head: "After", number: true, cell: (row) => seconds(row.step.at_s) },
      { head: "Drafts", cell: (row) => row.step.drafts.map((draft) => sourceOf(draft.source, row.step.scope).name).join(", ") || "none" },
      { head: "Drafted", number: true, cell: (row) => count(row.step.drafts.reduce((sum, draft) => sum + draft.drafted, 0)) },
      { head: "Accepted", number: true, cell: (row) => count(row.step.drafts.reduce((sum, draft) => sum + draft.accepted, 0)) },
      { head: "Text", cell: (row) => h("code", { class: "text" }, row.step.tokens.join("")) },
    ],
  });
  list.update(steps.map((step, index) => ({ id: index + 1, step })));
  return list.element;
}

// An answer that is still decoded, which grows by its steps.
function live() {
  const text = h("pre", { class: "tokens" });
  const head = h("h2", {}, "Decoding …");
  let tokens = 0;
  let count = 0;
  return {
    element: h("section", { class: "panel story live" }, h("header", {}, head), text),
    add(steps) {
      for (const step of steps) {
        text.append(...attributed(step).map(({ text: part, source }) =>
          h("span", { class: source ? `token of-${source.id}` : "token own" }, part)));
        tokens += step.tokens.length;
        count += 1;
        say(head, `${many(tokens, "token")} in ${many(count, "step")} …`);
      }
    },
  };
}

// The story of an answer.
function story(answer, asked, took) {
  const { speculative_decoding: drafts, step_trace: trace, timings } = answer.metrics;
  const { steps } = trace;
  const tokens = answer.usage.completion_tokens;
  const text = h("pre", { class: "tokens" }, steps.flatMap((step, index) => attributed(step).map(({ text: part, source }) =>
    h("span", { class: source ? `token of-${source.id}` : "token own", "data-step": index, title: describe(step, index + 1) }, part))));
  const drawing = strip(steps);
  const about = h("p", { class: "about muted" }, "Point at a token or a column to see its step.");
  const element = h("section", { class: "panel story", "data-steps": drafts.steps, "data-tokens": tokens },
    h("header", {},
      h("h2", {}, `${many(tokens, "token")} in ${many(drafts.steps, "step")}`),
      h("p", { class: "muted" }, `Drafts: ${DRAFTS.find(([value]) => value === asked.speculation)?.[1] ?? asked.speculation}`)),
    h("p", {}, drafts.drafted > 0
      ? `${short(tokens / Math.max(1, drafts.steps))} tokens per step. Plain decoding takes a step for each of the ${count(tokens)} tokens.`
      : "Every step brought one token, since nothing was drafted."),
    legendOf(steps), text, h("div", { class: "scroll" }, drawing), about,
    facts([
      ["Drafted", count(drafts.drafted)],
      ["Accepted", `${count(drafts.accepted)} (${percent(drafts.drafted > 0 ? drafts.accepted / drafts.drafted : null)})`],
      ["First token after", seconds(steps[0]?.at_s ?? null)],
      ["Decoding took", seconds(timings.decode_s)],
      ["Whole answer after", seconds(took)],
      ["Prompt in the KV cache", `${count(answer.usage.prompt_tokens_details.cached_tokens)} of ${many(answer.usage.prompt_tokens, "token")}`],
      ["Ended by", answer.choices[0].finish_reason],
    ], true),
    trace.is_cut ? h("p", { class: "muted" }, "Only the first steps are shown.") : null,
    h("details", {}, h("summary", {}, "Table of steps"), stepTable(steps)));
  // A step is marked in the text and in the columns at once.
  const mark = (index) => {
    for (const one of element.querySelectorAll("[data-step]")) one.classList.toggle("marked", one.dataset.step === index);
    say(about, index === undefined ? "Point at a token or a column to see its step." : describe(steps[Number(index)], Number(index) + 1));
  };
  element.addEventListener("pointerover", (event) => mark(event.target.closest("[data-step]")?.dataset.step));
  element.addEventListener("pointerleave", () => mark(undefined));
  return element;
}

export function trial(context) {
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const field = (label, input) => h("label", {}, label, input);
  // The key stays in this field, and is nowhere else on the page.
  const key = h("input", { name: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const model = h("select", { name: "model" });
  const system = h("textarea", { name: "system", rows: "2" }, SYSTEM);
  const question = h("textarea", { name: "question", rows: "7", required: true }, QUESTION);
  const most = h("input", { name: "tokens", type: "number", min: "1", max: "4096", value: "256" });
  const temperature = h("input", { name: "temperature", type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const drafts = h("select", { name: "drafts" }, DRAFTS.map(([value, name]) => h("option", { value }, name)));
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  // A screen reader tells that an answer has come, and does not read all of its story.
  const told = h("p", { class: "unseen", role: "status" });
  const stories = h("div", { class: "stories" },
    h("p", { class: "empty" }, "Nothing was sent yet. Send a question twice: the second answer is drafted from the first."));

  async function submit(event) {
    event.preventDefault();
    error.hidden = true;
    send.disabled = true;
    say(send, "Decoding …");
    const asked = {
      model: model.value,
      temperature: Number(temperature.value),
      max_tokens: Number(most.value),
      speculation: drafts.value,
      step_trace: true,
      stream: true,
      stream_options: { include_usage: true },
      messages: [
        ...(system.value.trim() ? [{ role: "system", content: system.value }] : []),
        { role: "user", content: question.value },
      ],
    };
    const began = performance.now();
    const growing = live();
    try {
      const answer = { choices: [{ finish_reason: null }] };
      for await (const event of events("POST", "try", { body: asked, headers: { "x-refrain-key": key.value } })) {
        if (!growing.element.isConnected) {
          stories.querySelector(".empty")?.remove();
          stories.prepend(growing.element);
        }
        for (const { steps, finish_reason } of event.choices) {
          growing.add(steps ?? []);
          answer.choices[0].finish_reason ??= finish_reason;
        }
        if (event.metrics) Object.assign(answer, { usage: event.usage, metrics: event.metrics });
      }
      const newest = story(answer, asked, (performance.now() - began) / 1000);
      growing.element.replaceWith(newest);
      say(told, `Answered: ${newest.querySelector("h2").textContent}`);
      while (stories.children.length > STORIES_MAX) stories.lastChild.remove();
    } catch (fault) {
      growing.element.remove();
      error.hidden = false;
      say(error, fault.message);
    }
    send.disabled = false;
    say(send, "Send");
  }

  return {
    element: h("div", { class: "view trial" },
      panel("A request and its story", { note: "Sent with a tenant's key, and counted and limited as any other" },
        h("form", { onsubmit: submit },
          field("Key of a tenant", key),
          h("div", { class: "row" }, field("Model", model), field("Drafts", drafts)),
          field("System", system), field("Question", question),
          h("div", { class: "row" }, field("Most tokens", most), field("Temperature", temperature)),
          error, h("div", { class: "actions" }, told, send))),
      stories),
    update({ mesh }) {
      const { models } = mesh.answer;
      if (models.join("\n") === [...model.options].map((option) => option.value).join("\n")) return;
      model.replaceChildren(...models.map((name) => h("option", { value: name }, name)));
    },
  };
}
