// SPDX-License-Identifier: Apache-2.0
// Elements for messages: a question with its editor, and a streamed answer with its metrics.

import { button, element } from "./dom.js";
import * as words from "./words.js";

/** Makes a question; `change` gets the edited text, to be asked instead. */
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

/** Whether a key sends the text: Enter, except in an input method, where it accepts a word. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

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
    else if (sends(event)) submit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return editor;
}

/** An answer: `add` takes streamed events, `finish` ends it, `resume` prepares for more. */
export class Answer {
  #blocks = element("div", { className: "blocks" });
  #reasoning = element("details", { className: "reasoning", hidden: true },
    element("summary", { textContent: "Reasoning" }), element("div", { className: "text" }));
  #waiting = element("p", { className: "waiting", ariaHidden: "true" }, "…");
  #metrics = element("dl", { className: "metrics" });
  #notes = element("div", { className: "notes" });
  #actions = element("div", { className: "actions" });

  #again;
  #more;

  /** `again` regenerates the answer, `more` continues one that was cut off or stopped. */
  constructor(message, again, more) {
    this.message = message;
    this.element = element("article", { className: "answer" }, name("Model"),
      this.#reasoning, this.#blocks, this.#waiting, this.#notes, this.#metrics, this.#actions);
    const copy = button("Copy", () => copied(copy, message.text));
    this.#again = button("Regenerate", again);
    this.#more = button("Continue", () => more(this));
    this.#actions.append(copy, this.#more, this.#again);
    this.#actions.hidden = true;
  }

  /** Takes a streamed event. */
  add(event) {
    const { message } = this;
    message.text += event.text ?? "";
    if (event.reasoning) message.reasoning = (message.reasoning ?? "") + event.reasoning;
    if (event.metrics?.tokens) event.metrics.tokens += message.earlier ?? 0;
    Object.assign(message, event.metrics && { metrics: event.metrics }, event.miss && { miss: event.miss },
      event.error && { error: event.error }, event.limit && { cut: event.limit });
    if (event.blocks) this.show(event.blocks, event.from);
    if (event.reasoning) this.#showReasoning();
    this.#showMetrics();
  }

  /** Replaces the blocks of HTML from index `from` on. */
  show(blocks, from = 0) {
    while (this.#blocks.children.length > from) this.#blocks.lastElementChild.remove();
    for (const html of blocks) {
      const block = element("div");
      block.innerHTML = html; // safe: the page's server rendered it and escapes the answer's tags
      this.#blocks.append(block);
    }
  }

  /** Prepares for the rest of an answer; the metrics will count all of its tokens. */
  resume() {
    const { message } = this;
    message.earlier = message.metrics?.tokens ?? 0;
    for (const name of ["cut", "stopped", "error", "miss"]) delete message[name];
    this.#notes.replaceChildren();
    this.#actions.hidden = true;
  }

  /** Shows notes and buttons after the last event. */
  finish() {
    const { text, reasoning, error, stopped, cut, miss } = this.message;
    this.#waiting.remove();
    this.#showReasoning();
    this.#showMetrics();
    const notes = [];
    if (error) notes.push(element("p", { className: "error", textContent: error, role: "alert" }));
    if (stopped) notes.push(element("p", { textContent: text ? "Stopped." : "Stopped before the first token." }));
    // Conversations stored by an earlier release do not name the limit.
    if (cut?.name) notes.push(element("p", { textContent: words.ofLimit(cut, reasoning && !text) }));
    else if (cut) notes.push(element("p", { textContent: "Stopped at a limit." }));
    const missed = miss ? words.ofMiss(miss) : "";
    if (missed) notes.push(element("p", { className: "miss", textContent: missed }));
    this.#notes.replaceChildren(...notes);
    this.#actions.hidden = false;
    this.#actions.firstElementChild.hidden = !text;
    this.#again.textContent = error ? "Try again" : "Regenerate";
    this.#more.hidden = !text || !(stopped || (cut && cut.name !== "context"));
  }

  #showReasoning() {
    const { reasoning } = this.message;
    this.#reasoning.hidden = !reasoning;
    this.#reasoning.lastElementChild.textContent = reasoning ?? "";
  }

  #showMetrics() {
    if (this.message.text) this.#waiting.hidden = true;
    this.#metrics.replaceChildren(...words.ofMetrics(this.message.metrics ?? {}).map(([label, value]) =>
      element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: value }))));
  }
}

/** Copies the code block of a pressed copy button. */
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
