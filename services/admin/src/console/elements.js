// Builds and updates the elements of the page.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// An element of HTML, such as h("p", {class: "muted"}, "text"). Text is never read as HTML.
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

// An element of SVG.
export function s(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity));
  return element;
}

// Sets a text if it differs, so that screen readers and selections are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A part of a whole as a bar, with its words beside it. Without a whole there is no bar.
export function meter(value, most, words) {
  if (!most) return h("span", {}, words);
  const share = Math.max(0, Math.min(1, value / most));
  const level = share >= 0.95 ? "full" : share >= 0.8 ? "high" : "fine";
  const bar = h("span", { class: `bar ${level}`, "aria-hidden": "true" }, h("span"));
  bar.firstChild.style.width = `${(100 * share).toFixed(1)}%`;
  return h("span", { class: "meter" }, bar, h("span", { class: "words" }, words));
}

// A table whose rows keep their elements while their figures change, so that a focused button stays focused.
//
// A column has a head and `cell(row)`, which returns a text or an element. A cell that is `fixed` is made once.
export function table({ caption, columns, empty, key = (row) => row.id }) {
  const head = columns.map((column) =>
    h("th", { scope: "col", class: column.number ? "number" : null }, column.head));
  const body = h("tbody");
  const nothing = h("p", { class: "empty", hidden: true }, empty);
  // In a narrow window a row is a card, or one line if it has two cells.
  const element = h("div", { class: columns.length === 2 ? "table pairs" : "table cards" },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), body), nothing);
  const known = new Map();

  function make(row) {
    const cells = columns.map((column, place) => {
      const tag = place === 0 ? "th" : "td";
      return h(tag, {
        class: column.number ? "number" : column.class,
        "data-label": column.head,
        scope: place === 0 ? "row" : null,
      });
    });
    return { cells, shown: [], element: h("tr", { "data-key": key(row) }, cells) };
  }

  function update(rows) {
    const kept = new Set();
    rows.forEach((row, place) => {
      const id = key(row);
      kept.add(id);
      let line = known.get(id);
      const isNew = !line;
      if (isNew) known.set(id, (line = make(row)));
      columns.forEach((column, index) => {
        if (column.fixed && !isNew) return;
        const content = column.cell(row);
        const text = typeof content === "string" ? content : content?.outerHTML ?? "";
        if (line.shown[index] === text) return;
        line.shown[index] = text;
        line.cells[index].replaceChildren(content ?? "");
      });
      if (body.children[place] !== line.element) body.insertBefore(line.element, body.children[place] ?? null);
    });
    for (const [id, line] of known) {
      if (kept.has(id)) continue;
      line.element.remove();
      known.delete(id);
    }
    nothing.hidden = rows.length > 0;
    element.firstChild.hidden = rows.length === 0;
  }
  update([]);
  return { element, update };
}

// A section with a heading.
export function panel(title, properties, ...children) {
  const { note, action, ...others } = properties;
  return h("section", { ...others, class: `panel ${others.class ?? ""}` },
    h("header", {}, h("h2", {}, title), note ? h("p", { class: "muted" }, note) : null, action ?? null), ...children);
}
