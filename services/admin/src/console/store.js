// The draft store: its size, what it evicts, and its compaction.

import { call } from "./api.js";
import { chart } from "./chart.js";
import { act, facts } from "./dialogs.js";
import { h, panel, say, table } from "./elements.js";
import { bytes, count, dateAndTime, percent, short } from "./format.js";

const REASONS = {
  age: "Older than the retention",
  bytes: "Byte budget of the store",
  tokens: "Token budget of the store",
  tenant_bytes: "Byte budget of a tenant",
  tenant_tokens: "Token budget of a tenant",
  erased: "Erased by an operator",
  damage: "Could not be read",
  other_replica: "Evicted by another replica",
};

function compaction(refresh) {
  return act({
    title: "Compact the draft store",
    text: [
      "Documents at rest are sealed, and unused disk space is given back. The store serves meanwhile.",
      "It reads and writes the whole log, so it takes a while on a large store.",
    ],
    button: "Compact",
    run: async () => {
      const reply = await call("POST", "compactions");
      refresh();
      return facts([
        ["Before", bytes(reply.before_bytes)],
        ["After", bytes(reply.after_bytes)],
        ["Given back", bytes(Math.max(0, reply.before_bytes - reply.after_bytes))],
        ["Finished", dateAndTime(Date.now())],
      ]);
    },
  });
}

const TILES = [
  ["documents", "Documents", (mesh) => count(mesh.total("refrain_draft_store_documents"))],
  ["tokens", "Tokens", (mesh) => short(mesh.total("refrain_draft_store_tokens"))],
  ["disk", "On disk", (mesh) => bytes(mesh.total("refrain_draft_store_disk_bytes"))],
  ["free", "Free on its disk", (mesh) => bytes(mesh.total("refrain_draft_store_disk_free_bytes"))],
  ["rate", "Stored per second", (mesh) => `${short(mesh.rate("refrain_draft_store_appended_tokens_total"))} tokens`],
  ["sealed", "In sealed segments", (mesh) => {
    const all = mesh.total("refrain_draft_store_tokens");
    const unsealed = mesh.total("refrain_draft_store_unsealed_tokens");
    return percent(all > 0 ? 1 - unsealed / all : null);
  }],
];

export function store(context) {
  const tiles = TILES.map(([id, name]) => {
    const value = h("strong", { "data-figure": id });
    return { value, element: h("li", {}, h("span", { class: "name" }, name), h("span", { class: "figure" }, value)) };
  });
  const charts = [
    chart({
      title: "Size on disk",
      lines: [{ id: "disk", name: "Bytes on disk", class: "of-first" }],
      format: bytes,
      binary: true,
    }),
    chart({
      title: "Stored tokens",
      lines: [{ id: "stored", name: "Tokens", class: "of-first" }],
      format: short,
    }),
  ];
  const evictions = table({
    caption: "Documents that left the store since it started, by the reason",
    empty: "The store does not say what it evicts.",
    columns: [
      { head: "Reason", cell: (row) => REASONS[row.id] ?? row.id },
      { head: "Documents", number: true, cell: (row) => count(row.value) },
    ],
  });
  const details = table({
    caption: "The store in numbers",
    empty: "",
    columns: [
      { head: "Figure", cell: (row) => row.id },
      { head: "Now", number: true, cell: (row) => row.value },
    ],
  });
  const compact = h("button", { type: "button", "data-act": "compact", onclick: () => compaction(context.refresh) }, "Compact …");
  return {
    element: h("div", { class: "view" },
      h("h2", { class: "unseen" }, "Draft store"),
      h("ul", { class: "tiles" }, tiles.map(({ element }) => element)),
      h("div", { class: "grid" },
        charts.map(({ element }) => element),
        panel("Evictions", { note: "Since the store started" }, evictions.element),
        panel("Details", { action: compact }, details.element))),
    update({ mesh }) {
      TILES.forEach(([, , figure], number) => say(tiles[number].value, figure(mesh)));
      for (const each of charts) each.update(mesh.series);
      const reasons = mesh.samples("refrain_draft_store_evictions_total");
      evictions.update(reasons.map(({ labels, value }) => ({ id: labels.reason, value })));
      const replicas = mesh.samples("refrain_draft_store_info").filter(({ labels }) => labels.feed !== "off");
      details.update([
        { id: "Text without overhead", value: bytes(mesh.total("refrain_draft_store_logical_bytes")) },
        { id: "Segments", value: count(mesh.total("refrain_draft_store_segments")) },
        { id: "Bytes in segments", value: bytes(mesh.total("refrain_draft_store_segment_bytes")) },
        { id: "Tokens that wait for the disk", value: count(mesh.total("refrain_draft_store_pending_tokens")) },
        { id: "Documents erased so far", value: count(mesh.total("refrain_draft_store_erased_documents")) },
        { id: "Given back by compactions", value: bytes(mesh.total("refrain_draft_store_reclaimed_bytes_total")) },
        { id: "Folders in quarantine", value: count(mesh.total("refrain_draft_store_quarantines_held")) },
        ...(replicas.length > 0 ? [{ id: "Messages that the feed is behind", value: count(mesh.total("refrain_draft_store_feed_lag_messages")) }] : []),
      ]);
      compact.hidden = !context.mayChange();
    },
  };
}
