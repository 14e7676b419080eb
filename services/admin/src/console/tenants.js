// Tenants: what they use of their limits, their keys, and the erasure of their documents.

import { call } from "./api.js";
import { act, copyable, facts } from "./dialogs.js";
import { h, meter, panel, table } from "./elements.js";
import { count, dateAndTime, many, short } from "./format.js";

// Tenants and their usage change slowly.
const READ_EVERY_MS = 10_000;
const MINUTE_MS = 60_000;
// Names under which metrics count what is of no certain tenant.
const SHARED = ["none", "hidden", "other"];

// The line of a limit: what is used of it, or only what is used.
const against = (used, limit) => meter(used ?? 0, limit, limit ? `${count(used ?? 0)} of ${limit < 10_000 ? count(limit) : short(limit)}` : count(used ?? 0));

function rotation(key, refresh) {
  return act({
    title: `Rotate the key ${key.id}`,
    text: [
      `A new key takes the place of ${key.name ? `“${key.name}”` : "this one"}, with the same scopes and limits.`,
      "It is shown once, in the next step.",
    ],
    fields: [{ name: "hours", label: "Hours for which the old key goes on", type: "number", min: "0", max: "8760", value: "24", required: true }],
    button: "Rotate",
    run: async ({ hours }) => {
      const made = await call("POST", `keys/${encodeURIComponent(key.id)}/rotate`, { body: { grace_hours: Number(hours) } });
      refresh();
      return [
        h("p", {}, "The new key. Nobody can show it again:"),
        copyable(made.key, "The new key"),
        facts([["Id", made.id], ["The old key ends", Number(hours) === 0 ? "now" : `in ${many(Number(hours), "hour")}`]]),
      ];
    },
  });
}

function erasure(tenant, operator, refresh) {
  return act({
    title: `Erase the data of ${tenant}`,
    text: [
      "All outputs that the draft store keeps of this tenant are erased from every file, those of all its parts included.",
      "Its drafts begin anew. Its keys and limits stay. This cannot be taken back.",
    ],
    fields: [{ name: "everything", label: "Also erase its usage, the responses that gateways stored, and what engines computed", type: "checkbox" }],
    word: tenant,
    button: "Erase",
    danger: true,
    run: async ({ everything }) => {
      const reply = await call("POST", "erasures", { body: { tenant, everything } });
      refresh();
      const open = reply.replicas.filter((replica) => !replica.is_done);
      const usage = reply.usage ?? [];
      const engines = reply.engines?.workers ?? [];
      const away = engines.filter((one) => one.trouble);
      const forgot = (name) => engines.reduce((all, one) => all + one[name], 0);
      const sum = (name) => usage.reduce((all, one) => all + one[name], 0);
      const isDone = open.length === 0 && reply.quarantines_kept === 0 && reply.documents_left === 0
        && sum("gateways_pending") === 0 && usage.every((one) => !one.trouble)
        && !reply.engines?.trouble && away.every((one) => one.is_unable);
      return [
        h("p", {}, isDone
          ? "Erased: no file of the draft store holds these tokens any more."
          : "Not all is erased yet: see below, and erase again later."),
        facts([
          ["Documents", count(reply.documents)],
          ["Files rewritten or deleted", count(reply.files.length)],
          ["Read again, still there", many(reply.documents_left, "document")],
          ["Time of the erasure", dateAndTime(reply.erased_at_ms)],
          ...(everything ? [["Rows of usage", count(sum("rows"))], ["Gateways that forgot it", count(sum("gateways"))]] : []),
          ...(everything ? [
            ["Engines that forgot it", `${count(engines.length - away.length)} of ${count(engines.length)}`],
            ["KV blocks in memory, in files", `${count(forgot("memory_blocks"))}, ${count(forgot("file_blocks"))}`],
          ] : []),
          ...(sum("gateways_pending") > 0 ? [["Gateways still to answer", count(sum("gateways_pending"))]] : []),
          ...(reply.quarantines_kept > 0 ? [["Unreadable, still there", many(reply.quarantines_kept, "folder")]] : []),
          ...usage.filter((one) => one.trouble).map((one) => [one.store, one.trouble]),
          ...away.map((one) => [one.worker, one.trouble]),
          ...(reply.engines?.trouble ? [["Engines", reply.engines.trouble]] : []),
          ...open.map((replica) => [replica.url, replica.trouble ?? "erases when the order reaches it"]),
        ]),
        copyable(JSON.stringify({ operator, ...reply }, null, 2), "The proof of the erasure"),
      ];
    },
  });
}

function scopes(key) {
  const words = [...(key.endpoints ?? []), ...(key.models ?? [])];
  return words.length > 0 ? words.join(", ") : "everything";
}

export function tenants(context) {
  // The last answers of the admin API, and when it was asked.
  let known = [];
  let used = { day: new Map(), month: new Map() };
  let trouble = "";
  let asked = -Infinity;

  const list = table({
    caption: "Tenants and what they use",
    empty: "No tenant is known, and none has asked for anything.",
    columns: [
      { head: "Tenant", cell: (row) => h("span", {}, h("b", {}, row.id), h("br"), h("span", { class: "muted" }, row.origin)) },
      { head: "Requests per minute", number: true, cell: (row) => against(row.requests, row.limits.requests_per_minute) },
      { head: "Tokens per minute", number: true, cell: (row) => against(row.tokens, row.limits.tokens_per_minute) },
      { head: "Tokens today", number: true, cell: (row) => against(row.day, row.limits.tokens_per_day) },
      { head: "Tokens this month", number: true, cell: (row) => against(row.month, row.limits.tokens_per_month) },
      { head: "Weight", number: true, cell: (row) => String(row.weight) },
      {
        head: "",
        class: "act",
        cell: () => context.mayChange() ? h("button", { type: "button", "data-act": "erase" }, "Erase …") : "",
      },
    ],
  });
  list.element.addEventListener("click", (event) => {
    const name = event.target.closest("button")?.closest("tr")?.dataset.key;
    if (name) erasure(name, context.mesh.answer.operator, context.refresh);
  });
  const keys = table({
    caption: "Keys",
    empty: "The store of tenants has no keys. Keys of the configuration are not shown.",
    columns: [
      { head: "Key", cell: (row) => h("span", {}, h("code", {}, row.id), row.name ? ` ${row.name}` : "") },
      { head: "Tenant", cell: (row) => row.tenant },
      { head: "May use", cell: scopes },
      { head: "Ends", cell: (row) => row.expires_at ?? "never" },
      {
        head: "",
        class: "act",
        cell: () => context.mayChange() ? h("button", { type: "button", "data-act": "rotate" }, "Rotate …") : "",
      },
    ],
  });
  keys.element.addEventListener("click", (event) => {
    const id = event.target.closest("button")?.closest("tr")?.dataset.key;
    const key = known.flatMap((tenant) => tenant.keys ?? []).find((one) => one.id === id);
    if (key) rotation(key, read);
  });
  const fault = h("p", { class: "error", role: "alert", hidden: true });

  // Tokens of each tenant in a period, of all gateways. A day and a month begin in UTC.
  async function usage(from) {
    const report = await call("GET", `usage?from=${from}&group_by=tenant&limit=10000`);
    return new Map(report.data.map((line) => [line.tenant, line.input_tokens + line.output_tokens]));
  }

  async function read() {
    asked = Date.now();
    const today = new Date().toISOString().slice(0, 10);
    const failed = [];
    const attempt = async (what, ask, otherwise) => {
      try {
        return await ask();
      } catch (error) {
        // Tenants may be in the configuration alone, which is no fault.
        if (error.status !== 409) failed.push(`${what}: ${error.message}`);
        return otherwise;
      }
    };
    const [all, day, month] = await Promise.all([
      attempt("Tenants", async () => (await call("GET", "tenants")).data, []),
      attempt("Usage", () => usage(today), new Map()),
      attempt("Usage", () => usage(`${today.slice(0, 7)}-01`), new Map()),
    ]);
    known = all;
    used = { day, month };
    trouble = [...new Set(failed)].join(" ");
    draw();
  }

  function draw() {
    const { mesh } = context;
    const asking = mesh.samples("refrain_gateway_tokens_total").map(({ labels }) => labels.tenant);
    const names = [...new Set([...known.map(({ name }) => name), ...asking, ...used.month.keys()])].sort()
      .filter((name) => !SHARED.includes(name));
    const kept = new Map(known.map((tenant) => [tenant.name, tenant]));
    list.update(names.map((name) => {
      const tenant = kept.get(name);
      const requests = mesh.growth("refrain_gateway_requests_total", { tenant: name }, MINUTE_MS)?.value;
      const tokens = (kind) => mesh.growth("refrain_gateway_tokens_total", { tenant: name, kind }, MINUTE_MS)?.value ?? 0;
      return {
        id: name,
        origin: tenant ? many(tenant.keys?.length ?? 0, "key") : "from the configuration",
        requests,
        tokens: tokens("input") + tokens("output"),
        day: used.day.get(name),
        month: used.month.get(name),
        limits: tenant?.limits ?? {},
        weight: tenant?.weight ?? 1,
      };
    }));
    keys.update(known.flatMap((tenant) => (tenant.keys ?? []).map((key) => ({ ...key, tenant: tenant.name }))));
    fault.hidden = trouble === "";
    fault.textContent = trouble;
  }

  return {
    element: h("div", { class: "view" },
      panel("Tenants", { class: "wide", note: "Minutes as this gateway counted the last one; days and months of all gateways, in UTC" },
        fault, list.element),
      panel("Keys", { class: "wide" }, keys.element)),
    update() {
      if (Date.now() - asked > READ_EVERY_MS) read();
      draw();
    },
  };
}
