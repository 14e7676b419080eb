// Reads the metrics of the mesh's services, and keeps how they grew.

// How long figures are kept for the charts, and how many steps of two seconds that are.
export const POLL_MS = 2_000;
const KEPT = 300;
// Rates are means over about this time.
const RATE_OVER_MS = 10_000;

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// The samples of a page in the text format of Prometheus, by their names and labels.
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const [, name, list = "", value] = found;
    const labels = {};
    for (const [, label, raw] of list.matchAll(LABEL)) {
      labels[label] = raw.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    samples.set(`${name}{${list}}`, { name, labels, value: Number(value) });
  }
  return samples;
}

const isCounter = (name) => /_(total|sum|count)$/.test(name);

function matches(labels, wanted) {
  return Object.entries(wanted).every(([name, value]) => labels[name] === value);
}

// The figures of the mesh now and lately.
export class Mesh {
  constructor() {
    this.answer = null;
    this.parts = [];
    // The growth of all counters since the page was opened, at each time.
    this.past = [];
    // The values of the charts.
    this.series = {};
  }

  // Takes an answer of the gateway.
  take(answer) {
    const before = new Map(this.parts.map((part) => [part.id, part.samples]));
    this.answer = answer;
    this.parts = answer.parts.map((part) => {
      const id = `${part.role} ${part.url ?? ""}`;
      // A service that does not answer keeps its last figures.
      const samples = part.trouble ? before.get(id) ?? new Map() : parse(part.metrics);
      return { ...part, id, samples };
    });
    const grown = new Map(this.past.at(-1)?.grown ?? []);
    for (const part of this.parts) {
      const earlier = before.get(part.id);
      for (const [key, sample] of part.samples) {
        if (!isCounter(sample.name)) continue;
        const last = earlier?.get(key)?.value;
        const isNew = last === undefined;
        // A counter that falls was set back by a restart. One that appears in a known service began at 0.
        const from = isNew ? (earlier ? 0 : sample.value) : last;
        const growth = sample.value >= from ? sample.value - from : sample.value;
        const sum = grown.get(key) ?? { name: sample.name, labels: sample.labels, value: 0 };
        grown.set(key, { ...sum, value: sum.value + growth });
      }
    }
    this.past.push({ at: answer.at_ms, grown });
    if (this.past.length > KEPT) this.past.shift();
    this.#draw(answer.at_ms);
  }

  // The sum of a metric over all services. With `part`, of one service.
  total(name, wanted = {}, part = null) {
    let sum = null;
    for (const { samples } of part ? [part] : this.parts) {
      for (const sample of samples.values()) {
        if (sample.name === name && matches(sample.labels, wanted)) sum = (sum ?? 0) + sample.value;
      }
    }
    return sum;
  }

  // All samples of a metric, with the sums of those that have the same labels in several services.
  samples(name) {
    const all = new Map();
    for (const { samples } of this.parts) {
      for (const [key, sample] of samples) {
        if (sample.name !== name) continue;
        const known = all.get(key);
        all.set(key, known ? { ...known, value: known.value + sample.value } : sample);
      }
    }
    return [...all.values()];
  }

  // The growth of a counter in the last `over` milliseconds, and the seconds in which it grew. A metric that was never
  // seen grew by 0. `null` if the page was opened just now.
  growth(name, wanted = {}, over = RATE_OVER_MS) {
    const now = this.past.at(-1);
    const then = this.past.findLast((one) => now.at - one.at >= over) ?? this.past[0];
    if (!now || then === now) return null;
    const sum = (grown) => {
      let value = 0;
      for (const sample of grown.values()) {
        if (sample.name === name && matches(sample.labels, wanted)) value += sample.value;
      }
      return value;
    };
    return { value: sum(now.grown) - sum(then.grown), seconds: (now.at - then.at) / 1000 };
  }

  rate(name, wanted = {}, over = RATE_OVER_MS) {
    const grown = this.growth(name, wanted, over);
    return grown && grown.value / grown.seconds;
  }

  // The quotient of what two counters grew by. `null` while the second one stands still.
  ratio(above, below, wanted = {}) {
    const [top, bottom] = [this.growth(above, wanted), this.growth(below, wanted)];
    return top && bottom?.value > 0 ? top.value / bottom.value : null;
  }

  // Tokens per second with drafts divided by those of plain decoding: the mean of what the workers measured at each
  // batch size, weighed by the steps with drafts. `ratio` is `null` where no worker is sure enough. `error` is two
  // standard errors as a share of the ratio, or the least of those that are too large, or `null`. `steps` is the number
  // of steps that this rests on.
  gain() {
    const name = "refrain_spec_gain_steps";
    // The last figures of a worker that does not answer are not those of now.
    const figures = this.parts.filter(({ trouble }) => !trouble).flatMap((part) => [...part.samples.values()]
      .filter((sample) => sample.name === name && sample.labels.side === "drafted")
      .map(({ labels: { side, ...of }, value: drafted }) => ({
        drafted,
        steps: this.total(name, of, part),
        error: this.total("refrain_spec_gain_error_ratio", of, part),
        ratio: this.total("refrain_spec_gain_ratio", of, part),
      })));
    const sum = (list, value) => list.reduce((sum, one) => sum + value(one), 0);
    const sure = figures.filter(({ ratio }) => ratio !== null);
    if (sure.length === 0) {
      const errors = figures.map(({ error }) => error).filter((error) => error !== null);
      const error = errors.length > 0 ? Math.min(...errors) : null;
      return { ratio: null, error, steps: sum(figures, ({ steps }) => steps) };
    }
    const whole = sum(sure, ({ drafted, ratio }) => drafted * ratio);
    const squares = sum(sure, ({ drafted, ratio, error }) => (drafted * ratio * error) ** 2);
    return {
      ratio: whole / sum(sure, ({ drafted }) => drafted),
      error: Math.sqrt(squares) / whole,
      steps: sum(sure, ({ steps }) => steps),
    };
  }

  // Adds a point to the charts.
  #draw(at) {
    const goodput = this.ratio("refrain_goodput_tokens_total", "refrain_engine_step_seconds_total");
    const { ratio: gain } = this.gain();
    const emitted = (wanted) => this.rate("refrain_spec_emitted_tokens_total", wanted);
    const point = {
      at,
      requests: this.rate("refrain_gateway_requests_total"),
      tokens: this.rate("refrain_goodput_tokens_total"),
      length: this.ratio("refrain_spec_emitted_tokens_total", "refrain_spec_steps_total"),
      goodput,
      plain: goodput !== null && gain ? goodput / gain : null,
      firstToken: this.ratio(
        "gen_ai_server_time_to_first_token_seconds_sum", "gen_ai_server_time_to_first_token_seconds_count"),
      waiting: this.total("refrain_scheduler_queue_length"),
      running: this.total("refrain_scheduler_leases_running"),
      disk: this.total("refrain_draft_store_disk_bytes"),
      stored: this.total("refrain_draft_store_tokens"),
    };
    for (const source of SOURCES) point[source.id] = emitted(source.labels);
    for (const [name, value] of Object.entries(point)) {
      const values = (this.series[name] ??= []);
      values.push(value);
      if (values.length > KEPT) values.shift();
    }
  }
}

// The sources of output tokens, in the order in which they are stacked and listed.
export const SOURCES = [
  { id: "suffix-tenant", name: "Tenant's earlier outputs", labels: { source: "suffix", scope: "tenant" } },
  { id: "suffix-group", name: "Other samples of the group", labels: { source: "suffix", scope: "group" } },
  { id: "suffix-request", name: "The request's own text", labels: { source: "suffix", scope: "request" } },
  { id: "eagle3", name: "EAGLE-3 head", labels: { source: "eagle3" } },
  { id: "draft_model", name: "Draft model", labels: { source: "draft_model" } },
  { id: "prediction", name: "Client's prediction", labels: { source: "prediction" } },
  { id: "grammar", name: "Form of the output", labels: { source: "grammar" } },
  { id: "none", name: "No draft", labels: { source: "none" } },
];

// The source of a draft in a request's steps.
export function sourceOf(draft, scope) {
  const found = SOURCES.find(({ labels }) =>
    labels.source === draft && (labels.scope === undefined || labels.scope === scope));
  return found ?? SOURCES.at(-1);
}
