// Workers and their load, and the services whose figures the page has.

import { call } from "./api.js";
import { act, facts } from "./dialogs.js";
import { h, meter, panel, table } from "./elements.js";
import { count, seconds, short } from "./format.js";

function stateOf(worker) {
  if (worker.silent_ms > 3_000) return ["silent", `Silent for ${seconds(worker.silent_ms / 1000)}`];
  if (worker.state?.pause) return ["drains", `Paused, ${count(worker.state.held)} held`];
  // A worker that takes nothing says why, and a drain is the usual reason.
  if (worker.draining && worker.trouble && !worker.trouble.startsWith("drain")) return ["silent", worker.trouble];
  if (worker.draining) return ["drains", worker.running > 0 ? "Drains" : "Drained"];
  if (worker.suspect) return ["silent", "A chunk failed"];
  return ["works", "Works"];
}

// The version of the weights, as trainers name it.
function weightsOf(state) {
  if (!state) return "not reported";
  return state.weight_version === 0 ? "as started" : `version ${state.weight_version}`;
}

function order(worker, isLast, refresh) {
  const path = `workers/${encodeURIComponent(worker.worker)}/drain`;
  if (worker.draining) {
    return act({
      title: `Put ${worker.worker} back to work`,
      text: ["The worker takes new requests again. A worker that drains because its process stops stays as it is."],
      button: "Put back to work",
      run: async () => {
        await call("DELETE", path);
        refresh();
        return facts([["Worker", worker.worker], ["Order", "takes requests again"]]);
      },
    });
  }
  return act({
    title: `Drain ${worker.worker}`,
    text: [
      `The worker takes nothing new. Its running requests have a grace period, and then go on at other workers.`,
      isLast
        ? `No other worker serves ${worker.model}: its requests wait until one does, and are refused after a while.`
        : "The order holds until it is taken back, or until the worker's process ends.",
    ],
    button: "Drain",
    danger: true,
    run: async () => {
      await call("POST", path);
      refresh();
      return facts([["Worker", worker.worker], ["Order", "drains"], ["Running now", count(worker.running)]]);
    },
  });
}

const NAMES = { gateway: "Gateway", scheduler: "Scheduler", "draft-store": "Draft store", worker: "Worker" };

export function workers(context) {
  const list = table({
    caption: "Workers",
    empty: "No worker reports to the scheduler.",
    key: (row) => row.worker.worker,
    columns: [
      { head: "Worker", cell: ({ worker }) => h("span", {}, h("b", {}, worker.worker), h("br"), h("span", { class: "muted" }, worker.url === "local:" ? "in this process" : worker.url)) },
      { head: "Model", cell: ({ worker }) => worker.model },
      {
        head: "State",
        cell: ({ worker }) => {
          const [kind, words] = stateOf(worker);
          return h("span", { class: `dot ${kind}` }, words);
        },
      },
      {
        head: "Running",
        cell: ({ worker }) => meter(worker.running, worker.max_running, `${count(worker.running)} of ${count(worker.max_running)}`),
      },
      {
        head: "KV cache",
        cell: ({ worker }) => worker.kv && worker.kv.capacity_tokens > 0
          ? meter(worker.kv.running_tokens + worker.kv.kept_tokens, worker.kv.capacity_tokens,
            `${short(worker.kv.running_tokens)} in use, ${short(worker.kv.kept_tokens)} kept, of ${short(worker.kv.capacity_tokens)}`)
          : "not reported",
      },
      { head: "Weights", cell: ({ worker }) => weightsOf(worker.state) },
      { head: "Last report", number: true, cell: ({ worker }) => `${seconds(Math.round(worker.silent_ms / 100) / 10)} ago` },
      {
        head: "",
        class: "act",
        cell: ({ worker }) => context.mayChange()
          ? h("button", { type: "button", "data-act": "drain" }, worker.draining ? "Put back to work" : "Drain …")
          : "",
      },
    ],
  });
  // One listener for all rows: a row's button may be made anew.
  list.element.addEventListener("click", (event) => {
    const name = event.target.closest("button")?.closest("tr")?.dataset.key;
    const { workers: all } = context.mesh.answer;
    const worker = all.find((one) => one.worker === name);
    if (!worker) return;
    const others = all.filter((one) => one.model === worker.model && !one.draining && one.worker !== name);
    order(worker, others.length === 0, context.refresh);
  });
  const queue = table({
    caption: "Requests at the scheduler",
    empty: "",
    columns: [
      { head: "Requests", cell: (row) => row.id },
      { head: "Now", number: true, cell: (row) => count(row.value) },
    ],
  });
  const parts = table({
    caption: "Services whose figures this page has",
    empty: "",
    columns: [
      { head: "Service", cell: (row) => NAMES[row.role] ?? row.role },
      { head: "Address", cell: (row) => row.url ?? "this process" },
      {
        head: "State",
        cell: (row) => h("span", { class: `dot ${row.trouble ? "silent" : "works"}` }, row.trouble ?? "Answers"),
      },
      { head: "Drafts in memory", number: true, cell: (row) => (row.tokens === null ? "" : `${short(row.tokens)} tokens`) },
    ],
  });
  const trouble = h("p", { class: "error", hidden: true });
  return {
    element: h("div", { class: "view" },
      panel("Workers", { class: "wide" }, trouble, list.element),
      h("div", { class: "grid" },
        panel("Scheduler", {}, queue.element),
        panel("Services", { note: "Other gateways have consoles of their own" }, parts.element))),
    update({ mesh }) {
      const { workers: all, workers_trouble: why } = mesh.answer;
      trouble.hidden = !why;
      trouble.textContent = why ? `The workers are not known: ${why}` : "";
      list.update(all.map((worker) => ({ worker })));
      const waiting = (name) => mesh.total("refrain_scheduler_waiting", { class: name });
      queue.update([
        { id: "Running", value: mesh.total("refrain_scheduler_leases_running") },
        { id: "Interactive, waiting", value: waiting("interactive") },
        { id: "Rollouts, waiting", value: waiting("rollout") },
        { id: "Parked between two chunks", value: mesh.total("refrain_worker_parked_requests") },
      ]);
      parts.update(mesh.parts.map((part) => ({ ...part, tokens: mesh.total("refrain_replica_tokens", {}, part) })));
    },
  };
}
