// Dialogs for acts: they say what will happen, run the act once it is confirmed, and show what came of it.

import { h, say } from "./elements.js";

// Opens a dialog for an act. `run(values)` carries it out and returns the elements that show its result. With `word`,
// the operator has to type that word before. `fields` are further inputs. Returns once the dialog is closed.
export function act({ title, text, button, danger = false, word, fields = [], run }) {
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const inputs = fields.map(({ name, label, ...properties }) => {
    const input = h("input", { name, autocomplete: "off", ...properties });
    const isBox = properties.type === "checkbox";
    return { name, input, element: h("label", { class: isBox ? "box" : null }, isBox ? [input, label] : [label, input]) };
  });
  const typed = word ? h("input", { autocomplete: "off", spellcheck: "false", "aria-label": `Type ${word} to confirm` }) : null;
  const confirm = h("button", { type: "submit", class: danger ? "danger" : "primary" }, button);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", { onsubmit: submit },
    text.map((line) => h("p", {}, line)),
    inputs.map(({ element }) => element),
    word ? h("label", {}, h("span", {}, "Type ", h("code", {}, word), " to confirm"), typed) : null,
    error,
    h("div", { class: "actions" }, cancel, confirm));
  const dialog = h("dialog", { "aria-label": title }, h("h2", {}, title), form);
  if (typed) {
    confirm.disabled = true;
    typed.addEventListener("input", () => { confirm.disabled = typed.value !== word; });
  }

  async function submit(event) {
    event.preventDefault();
    confirm.disabled = true;
    error.hidden = true;
    say(confirm, "Working …");
    try {
      const result = await run(Object.fromEntries(inputs.map(({ name, input }) =>
        [name, input.type === "checkbox" ? input.checked : input.value])));
      const close = h("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Close");
      dialog.replaceChildren(h("h2", {}, title), h("div", { class: "result", role: "status" }, result),
        h("div", { class: "actions" }, close));
      close.focus();
    } catch (fault) {
      error.hidden = false;
      say(error, fault.message);
      say(confirm, button);
      confirm.disabled = false;
    }
  }

  document.getElementById("dialogs").append(dialog);
  dialog.showModal();
  (typed ?? inputs[0]?.input ?? cancel).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
  });
}

// A list of names and values, in two columns where there is room for `wide` ones.
export function facts(pairs, wide = false) {
  return h("dl", { class: wide ? "facts two" : "facts" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// A text that can be copied, such as a new key or a proof.
export function copyable(text, label) {
  const button = h("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "Copied");
    } catch {
      // Without a secure address a browser gives no clipboard.
      getSelection().selectAllChildren(shown);
      say(button, "Selected: copy it by keyboard");
    }
  });
  const shown = h("pre", { class: "copyable", tabindex: "0", "aria-label": label }, text);
  return h("div", { class: "copy" }, shown, button);
}
