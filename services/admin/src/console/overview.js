// The overview: how much the mesh does, and what drafts bring.

import { chart, sparkline } from "./chart.js";
import { h, panel, say, table } from "./elements.js";
import { SOURCES } from "./figures.js";
import { count, many, NONE, percent, seconds, short, times } from "./format.js";

const TILES = [
  { id: "requests", name: "Requests per second", format: short },
  { id: "tokens", name: "Output tokens per second", format: short },
  { id: "length", name: "Accepted length", unit: "tokens per step", format: short },
  { id: "gain", name: "Goodput by drafts" },
  { id: "firstToken", name: "Time to first token", unit: "mean", format: seconds },
  { id: "running", name: "Running", format: count },
];

function tile({ name, unit }) {
  const value = h("strong");
  const detail = h("span", { class: "muted" }, unit ?? "");
  const spark = sparkline();
  const element = h("li", {}, h("span", { class: "name" }, name), h("span", { class: "figure" }, value, detail), spark.element);
  return { element, value, detail, spark };
}

// The gain from drafts as a figure and its detail. A gain of few steps is none.
function gainOf({ ratio, error, steps }) {
  const sure = error === null ? "" : `± ${percent(error)}, `;
  if (ratio !== null) return [times(ratio), `of plain decoding, ${sure}${many(steps, "step")}`];
  return steps > 0 ? ["few data", `${sure}${many(steps, "step")}`] : [NONE, "no steps of late to compare"];
}

// The contribution of each source since the services started.
function contributions(mesh) {
  const emitted = mesh.total("refrain_spec_emitted_tokens_total");
  return SOURCES.map(({ id, name, labels }) => {
    return {
      id,
      name,
      steps: mesh.total("refrain_spec_steps_total", labels),
      drafted: mesh.total("refrain_spec_drafted_tokens_total", labels),
      accepted: mesh.total("refrain_spec_accepted_tokens_total", labels),
      emitted: mesh.total("refrain_spec_emitted_tokens_total", labels),
      all: emitted,
    };
  }).filter((row) => row.steps !== null || row.drafted !== null);
}

function refusals(mesh) {
  const families = [
    ["Gateway", "refrain_gateway_rejections_total"],
    ["Draft store", "refrain_draft_store_rejections_total"],
  ];
  return families.flatMap(([service, name]) => mesh.samples(name)
    .filter(({ value }) => value > 0)
    .map(({ labels, value }) => {
      const tenant = labels.tenant === "none" ? "" : labels.tenant ?? "";
      return { id: `${name} ${labels.limit} ${tenant}`, service, limit: labels.limit, tenant, value };
    }));
}

export function overview() {
  const tiles = TILES.map(tile);
  const charts = [
    chart({
      title: "Throughput",
      note: "Output tokens per second, by the draft that brought them",
      lines: SOURCES.map(({ id, name }) => ({ id, name, class: `of-${id}`, hides: id !== "none" })),
      format: short,
      stacks: true,
      wide: true,
    }),
    chart({
      title: "Accepted length",
      note: "Tokens kept per engine step, the engine's own token included",
      lines: [{ id: "length", name: "Tokens per step", class: "of-first" }],
      format: short,
    }),
    chart({
      title: "Goodput",
      note: "Tokens per second of engine time",
      lines: [
        { id: "goodput", name: "With drafts", class: "of-first" },
        { id: "plain", name: "Without drafts", class: "of-second" },
      ],
      format: short,
    }),
    chart({
      title: "Requests",
      note: "Answered per second, by this gateway",
      lines: [{ id: "requests", name: "Requests per second", class: "of-first" }],
      format: short,
    }),
    chart({
      title: "Queue",
      note: "Requests at the scheduler",
      lines: [
        { id: "running", name: "Running", class: "of-first" },
        { id: "waiting", name: "Waiting", class: "of-second" },
      ],
      format: short,
    }),
  ];
  const sources = table({
    caption: "What each source of drafts brought since the services started",
    empty: "No step was decoded yet.",
    columns: [
      { head: "Source", cell: (row) => h("span", { class: `key of-${row.id}` }, h("span", { class: "swatch" }), row.name) },
      { head: "Steps", number: true, cell: (row) => count(row.steps) },
      { head: "Drafted", number: true, cell: (row) => count(row.drafted) },
      { head: "Accepted", number: true, cell: (row) => count(row.accepted) },
      { head: "Accepted share", number: true, cell: (row) => percent(row.drafted > 0 ? row.accepted / row.drafted : null) },
      { head: "Accepted per step", number: true, cell: (row) => short(row.steps > 0 ? row.accepted / row.steps : null) },
      { head: "Of all output", number: true, cell: (row) => percent(row.all > 0 ? row.emitted / row.all : null) },
    ],
  });
  const limits = table({
    caption: "Refusals by the limit that was reached, since the services started",
    empty: "Nothing was refused.",
    columns: [
      { head: "Limit", cell: (row) => h("code", {}, row.limit) },
      { head: "Service", cell: (row) => row.service },
      { head: "Tenant", cell: (row) => row.tenant },
      { head: "Refused", number: true, cell: (row) => count(row.value) },
    ],
  });
  return {
    element: h("div", { class: "view overview" },
      h("h2", { class: "unseen" }, "Overview"),
      h("ul", { class: "tiles" }, tiles.map(({ element }) => element)),
      h("div", { class: "grid" },
        charts.map(({ element }) => element),
        panel("What drafts brought", { class: "wide", note: "Since the services started" }, sources.element),
        panel("Refusals", { class: "wide", note: "Since the services started" }, limits.element))),
    update({ mesh }) {
      const last = (id) => mesh.series[id]?.at(-1) ?? null;
      TILES.forEach(({ id, format }, number) => {
        const { value, detail, spark } = tiles[number];
        if (format) say(value, format(last(id)));
        if (id === "running") say(detail, `${count(last("waiting"))} waiting`);
        if (id === "gain") gainOf(mesh.gain()).forEach((text, at) => say([value, detail][at], text));
        if (id === "requests") say(detail, many(mesh.total("refrain_gateway_requests_in_flight") ?? 0, "request") + " in flight");
        spark.update(mesh.series[id === "gain" ? "goodput" : id] ?? []);
      });
      for (const each of charts) each.update(mesh.series);
      sources.update(contributions(mesh));
      limits.update(refusals(mesh));
    },
  };
}
