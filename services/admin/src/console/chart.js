// Draws values over time, by hand, as SVG. Each chart can be read as a table and by keyboard as well.

import { h, s, say } from "./elements.js";
import { NONE, clock } from "./format.js";

const HEIGHT = 150;
const EDGE = { top: 8, right: 8, bottom: 20, left: 44 };
// The longest time that a chart spans, in minutes, and the steps of its table.
const SPAN_MAX = 10;
const ROW_MS = 30_000;

// The least round number that is not below a value, and whose half is round as well.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((candidate) => candidate >= value * 0.999);
}

// The same for bytes, of which a thousand and twenty-four are the next unit.
function roundUpBytes(value) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(value) / 10));
  return unit * roundUp(value / unit);
}

// The least span that holds all values, in whole minutes.
const spanOf = (at) => Math.min(SPAN_MAX, Math.max(1, Math.ceil((at.at(-1) - at[0]) / 60_000)));

// A figure at the side of a chart, without needless zeros.
const brief = (text) => text.replace(/\.0+(?!\d)/, "");

// A path through points, broken where a value is missing.
function path(points) {
  let isOpen = false;
  return points.map(([x, y]) => {
    if (y === null) {
      isOpen = false;
      return "";
    }
    const step = `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isOpen = true;
    return step;
  }).join("");
}

// A chart of several series. Each has a name, a class that gives its colour, and `values(series)`. With `stacks` they
// are areas above each other, and with `binary` they are bytes. `format` writes a value.
export function chart({ title, note, lines, format, stacks = false, wide = false, binary = false }) {
  const legend = h("ul", { class: "legend" });
  const items = lines.map((line) => {
    const value = h("b");
    const item = h("li", { class: line.class }, h("span", { class: "swatch" }), line.name, value);
    legend.append(item);
    return { item, value };
  });
  const drawing = s("svg", { class: "chart", height: HEIGHT, role: "img", tabindex: "0" });
  const when = h("output", { class: "when muted" });
  const rows = h("tbody");
  const details = h("details", {},
    h("summary", {}, "Table"),
    h("div", { class: "table" }, h("table", {},
      h("caption", { class: "unseen" }, title),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"),
        lines.map((line) => h("th", { scope: "col", class: "number" }, line.name)))),
      rows)));
  const element = h("section", { class: `panel figure ${wide ? "wide" : ""}` },
    h("header", {}, h("h2", {}, title), note ? h("p", { class: "muted" }, note) : null),
    legend, drawing, h("div", { class: "below" }, details, when));

  let data = { at: [], values: [] };
  // The place that is looked at; null for the newest one.
  let place = null;

  function shownAt(index) {
    items.forEach(({ item, value }, number) => {
      const figure = data.values[number]?.[index] ?? null;
      say(value, figure === null ? NONE : format(figure));
      // Sources that never brought anything would only take room.
      item.hidden = Boolean(lines[number].hides) && !data.values[number]?.some((one) => one > 0);
    });
    say(when, place === null ? "" : `at ${clock(data.at[place])}`);
  }

  function draw() {
    const width = drawing.clientWidth;
    const { at, values } = data;
    if (width === 0 || at.length === 0) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const now = at.at(-1);
    const span = spanOf(at);
    const x = (time) => width - EDGE.right - ((now - time) / (60_000 * span)) * (width - EDGE.left - EDGE.right);
    const stacked = [];
    values.forEach((series, number) => {
      stacked.push(series.map((value, index) =>
        stacks ? (value ?? 0) + (number > 0 ? stacked[number - 1][index] : 0) : value));
    });
    const most = Math.max(0, ...stacked.flat().filter((value) => value !== null));
    const top = most > 0 ? (binary ? roundUpBytes : roundUp)(most) : 1;
    const y = (value) => (value === null ? null : HEIGHT - EDGE.bottom
      - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom));
    const parts = [];
    for (const tick of [0, top / 2, top]) {
      parts.push(s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }));
      parts.push(s("text", { class: "tick", x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" }, brief(format(tick))));
    }
    for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
      const text = share === 0 ? "now" : share * span < 1 ? `${60 * share * span} s ago` : `${share * span} min ago`;
      const tick = { class: "tick", x: x(now - 60_000 * share * span), y: HEIGHT - 4, "text-anchor": anchor };
      parts.push(s("text", tick, text));
    }
    stacked.forEach((series, number) => {
      const points = series.map((value, index) => [x(at[index]), y(value)]).filter(([px]) => px >= EDGE.left);
      if (stacks) {
        const under = number > 0 ? stacked[number - 1] : series.map(() => 0);
        const back = under.map((value, index) => [x(at[index]), y(value)]).filter(([px]) => px >= EDGE.left).reverse();
        const outline = path([...points, ...back]);
        if (outline) parts.push(s("path", { class: `area ${lines[number].class}`, d: `${outline}Z` }));
      } else {
        parts.push(s("path", { class: `line ${lines[number].class}`, d: path(points) }));
        const last = points.at(-1);
        if (last?.[1] != null) parts.push(s("circle", { class: `end ${lines[number].class}`, cx: last[0], cy: last[1], r: 2.5 }));
      }
    });
    if (place !== null) {
      parts.push(s("line", { class: "cursor", x1: x(at[place]), x2: x(at[place]), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    }
    drawing.replaceChildren(...parts);
    drawing.setAttribute("aria-label", `${title}. ${lines.map((line, number) => {
      const value = values[number].at(-1);
      return `${line.name}: ${value === null ? "no figure" : format(value)}`;
    }).join(". ")}. Arrow keys show earlier values.`);
  }

  function look(index) {
    place = index === null ? null : Math.max(0, Math.min(data.at.length - 1, index));
    if (place === data.at.length - 1) place = null;
    shownAt(place ?? data.at.length - 1);
    draw();
  }

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    const time = data.at.at(-1) - (1 - share) * 60_000 * spanOf(data.at);
    const index = data.at.findIndex((one) => one >= time);
    if (index >= 0) look(index);
  });
  drawing.addEventListener("pointerleave", () => look(null));
  drawing.addEventListener("blur", () => look(null));
  drawing.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const from = place ?? data.at.length - 1;
    look(step === Infinity ? null : step === -Infinity ? 0 : from + step);
  });

  function list() {
    if (!details.open) return;
    const shown = [];
    let last = Infinity;
    for (let index = data.at.length - 1; index >= 0; index -= 1) {
      if (last - data.at[index] < ROW_MS) continue;
      last = data.at[index];
      shown.push(h("tr", {}, h("th", { scope: "row" }, clock(last)), data.values.map((series) =>
        h("td", { class: "number" }, series[index] === null ? NONE : format(series[index])))));
    }
    rows.replaceChildren(...shown);
  }
  details.addEventListener("toggle", list);
  new ResizeObserver(draw).observe(drawing);

  return {
    element,
    update(series) {
      // A place counts from the oldest value, which is dropped now and then.
      const lookedAt = place === null ? null : data.at[place];
      data = { at: [...(series.at ?? [])], values: lines.map((line) => [...(series[line.id] ?? [])]) };
      place = lookedAt === null ? null : data.at.indexOf(lookedAt);
      if (place === -1) place = null;
      shownAt(place ?? data.at.length - 1);
      draw();
      list();
    },
  };
}

// The last minutes of one series, without axes.
export function sparkline() {
  const line = s("path", { class: "line", d: "" });
  const drawing = s("svg", { class: "spark", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  return {
    element: drawing,
    update(values) {
      const shown = values.slice(-150);
      const most = Math.max(0, ...shown.filter((value) => value !== null)) || 1;
      const step = 120 / Math.max(29, shown.length - 1);
      line.setAttribute("d", path(shown.map((value, index) => [
        120 - (shown.length - 1 - index) * step,
        value === null ? null : 22 - (value / most) * 20,
      ])));
    },
  };
}
