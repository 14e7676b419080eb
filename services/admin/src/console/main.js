// The page: signs the operator in, asks for figures every two seconds, and shows one view at a time.

import { call, token } from "./api.js";
import { h, say } from "./elements.js";
import { Mesh, POLL_MS } from "./figures.js";
import { clock, many } from "./format.js";
import { overview } from "./overview.js";
import { store } from "./store.js";
import { tenants } from "./tenants.js";
import { trial } from "./trial.js";
import { workers } from "./workers.js";

const VIEWS = { overview, workers, tenants, store, try: trial };

const place = (id) => document.getElementById(id);
const [view, tabs, standing, state, notice] = ["view", "tabs", "standing", "state", "notice"].map(place);

// Everything that ends when the operator signs out.
let session = null;

const nameOfView = () => location.hash.match(/^#\/(\w+)$/)?.[1];

function show(session) {
  const name = Object.hasOwn(VIEWS, nameOfView() ?? "") ? nameOfView() : "overview";
  for (const link of tabs.querySelectorAll("a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${tabs.querySelector("[aria-current]").textContent} – Refrain console`;
  const shown = (session.views[name] ??= VIEWS[name](session.context));
  view.replaceChildren(shown.element);
  session.shown = shown;
  shown.update(session.context);
}

function tell(text) {
  notice.hidden = text === "";
  say(notice, text);
}

function tellState(answer) {
  const kind = answer.trouble ? "silent" : "works";
  state.className = `state dot ${kind}`;
  say(state, answer.trouble ? `Not ready: ${answer.trouble}` : `Ready, ${many(answer.workers.length, "worker")}`);
  say(place("operator"), answer.is_read_only ? `${answer.operator} (may look only)` : answer.operator);
  const silent = answer.parts.filter((part) => part.trouble);
  const left = answer.parts_left_out > 0 ? ` ${many(answer.parts_left_out, "service")} are not asked.` : "";
  tell(silent.length > 0 || left
    ? `${silent.map((part) => `${part.role} ${part.url}: ${part.trouble}`).join(" ")}${left} Sums lack their news.`
    : "");
}

async function poll(current) {
  clearTimeout(current.timer);
  current.timer = null;
  // Calls that come late would only bring old figures, so there is one at a time.
  if (current.isAsking) return;
  current.isAsking = true;
  const wait = await ask(current);
  current.isAsking = false;
  if (session === current && !document.hidden) current.timer = setTimeout(poll, wait, current);
}

// Asks for figures and shows them. Returns the time until the next call, milliseconds.
async function ask(current) {
  let wait = POLL_MS;
  try {
    const answer = await call("GET", "figures");
    if (session !== current) return wait;
    current.mesh.take(answer);
    current.last = Date.now();
    document.body.classList.remove("stale");
    tellState(answer);
    if (current.shown) current.shown.update(current.context);
    else show(current);
  } catch (error) {
    if (session !== current) return wait;
    if (error.status === 401 || error.status === 404) {
      signOut(error.message);
      return wait;
    }
    wait = 2 * POLL_MS;
    document.body.classList.add("stale");
    state.className = "state dot silent";
    say(state, "No connection");
    const since = current.last ? `The figures are those of ${clock(current.last)}.` : "There are no figures yet.";
    tell(`${error.message} ${since} The page tries again.`);
  }
  return wait;
}

function pollNow() {
  if (session) poll(session);
}

function signIn() {
  const mesh = new Mesh();
  session = {
    mesh,
    views: {},
    shown: null,
    last: null,
    timer: null,
    context: { mesh, refresh: pollNow, mayChange: () => mesh.answer !== null && !mesh.answer.is_read_only },
  };
  tabs.hidden = false;
  standing.hidden = false;
  view.replaceChildren(h("p", { class: "empty" }, "The first figures are being read."));
  poll(session);
}

function signOut(why = "") {
  token.forget();
  session = null;
  tabs.hidden = true;
  standing.hidden = true;
  document.body.classList.remove("stale");
  tell("");
  askForToken(why);
}

function askForToken(why) {
  const input = h("input", {
    type: "password", name: "token", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "where",
  });
  const submit = (event) => {
    event.preventDefault();
    token.set(input.value);
    signIn();
    // The field that had the focus is gone.
    view.focus();
  };
  view.replaceChildren(h("section", { class: "panel sign-in" },
    h("h2", {}, "Sign in"),
    why ? h("p", { class: "error", role: "alert" }, why) : null,
    h("form", { onsubmit: submit },
      h("label", {}, "Token of an operator", input),
      h("p", { id: "where", class: "muted" },
        "With ", h("code", {}, "refrain up"), " it is in the file ", h("code", {}, "operator-token"),
        " of the data directory. Elsewhere ", h("code", {}, "refrain keys operator NAME"), " makes one."),
      h("p", { class: "muted" }, "It is kept in this tab only, and forgotten when the tab is closed."),
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Sign in")))));
  input.focus();
}

place("leave").addEventListener("click", () => signOut());
addEventListener("hashchange", () => {
  if (!session?.mesh.answer) return;
  show(session);
  view.focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && session && session.timer === null) pollNow();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  view.focus();
});

if (token.get()) signIn();
else askForToken("");
