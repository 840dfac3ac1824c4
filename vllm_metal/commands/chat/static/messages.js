// SPDX-License-Identifier: Apache-2.0
// Messages as elements: a question with its editor, an answer that grows, its figures.

import { button, element } from "./dom.js";
import * as words from "./words.js";

/** A question; `change` gets another text, to be asked in its place. */
export function question(message, change) {
  const text = element("div", { className: "text", textContent: message.text });
  const actions = element("div", { className: "actions" });
  const shown = element("article", { className: "question" }, name("You"), text, actions);
  const edit = button("Edit", () => {
    const editor = editorOf(message.text, change, () => {
      editor.replaceWith(text);
      actions.hidden = false;
      edit.focus();
    });
    text.replaceWith(editor);
    actions.hidden = true;
    editor.querySelector("textarea").focus();
  });
  actions.append(edit);
  return shown;
}

function editorOf(text, change, close) {
  const area = element("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1) });
  area.ariaLabel = "Edit the message";
  const editor = element("form", { className: "editor" }, area,
    element("div", { className: "buttons" },
      button("Cancel", close),
      element("button", { type: "submit", className: "first", textContent: "Ask again" })));
  const submit = () => area.value.trim() && change(area.value.trim());
  editor.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return editor;
}

/** An answer: `add` takes events, `finish` shows what is known at its end. */
export class Answer {
  #message;
  #blocks = element("div", { className: "blocks" });
  #reasoning = element("details", { className: "reasoning", hidden: true },
    element("summary", { textContent: "Thoughts" }), element("div", { className: "text" }));
  #waiting = element("p", { className: "waiting", ariaHidden: "true" }, "…");
  #figures = element("dl", { className: "figures" });
  #notes = element("div", { className: "notes" });
  #actions = element("div", { className: "actions" });

  constructor(message, again) {
    this.#message = message;
    this.element = element("article", { className: "answer" }, name("Model"),
      this.#reasoning, this.#blocks, this.#waiting, this.#notes, this.#figures, this.#actions);
    const copy = button("Copy", () => copied(copy, message.text));
    this.#actions.append(copy, button("Regenerate", again));
    this.#actions.hidden = true;
  }

  /** Takes an event of an answer that comes. */
  add(event) {
    const message = this.#message;
    message.text += event.text ?? "";
    if (event.reasoning) message.reasoning = (message.reasoning ?? "") + event.reasoning;
    Object.assign(message, event.figures && { figures: event.figures }, event.miss && { miss: event.miss },
      event.error && { error: event.error }, event.done === "length" && { cut: true });
    if (event.blocks) this.show(event.blocks, event.from);
    if (event.reasoning) this.#showReasoning();
    this.#showFigures();
  }

  /** Shows blocks of HTML in place of those from `from` on. */
  show(blocks, from = 0) {
    while (this.#blocks.children.length > from) this.#blocks.lastElementChild.remove();
    for (const html of blocks) {
      const block = element("div");
      block.innerHTML = html; // made by the page's server, which leaves no tag of the answer in it
      this.#blocks.append(block);
    }
  }

  /** Shows what is known when no more comes. */
  finish() {
    const { text, error, stopped, cut, miss } = this.#message;
    this.#waiting.remove();
    this.#showReasoning();
    this.#showFigures();
    const notes = [];
    if (error) notes.push(element("p", { className: "error", textContent: error, role: "alert" }));
    if (stopped) notes.push(element("p", { textContent: text ? "Stopped." : "Stopped before the first token." }));
    if (cut) notes.push(element("p", { textContent: "Cut at the longest answer, or at the context's end." }));
    if (miss) notes.push(element("p", { className: "miss", textContent: words.ofMiss(miss) }));
    this.#notes.replaceChildren(...notes);
    this.#actions.hidden = false;
    this.#actions.firstElementChild.hidden = !text;
  }

  #showReasoning() {
    const { reasoning } = this.#message;
    this.#reasoning.hidden = !reasoning;
    this.#reasoning.lastElementChild.textContent = reasoning ?? "";
  }

  #showFigures() {
    if (this.#message.text) this.#waiting.hidden = true;
    this.#figures.replaceChildren(...words.ofFigures(this.#message.figures ?? {}).map(([label, value]) =>
      element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: value }))));
  }
}

/** Copies the code beside a button of a piece of code. */
export function copyCode(event) {
  const pressed = event.target.closest("button.copy");
  if (pressed) copied(pressed, pressed.closest(".code").querySelector("code").textContent);
}

async function copied(pressed, text) {
  await navigator.clipboard.writeText(text);
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
}

function name(who) {
  return element("h2", { className: "who", textContent: who });
}
