// SPDX-License-Identifier: Apache-2.0
// The page's events: questions, answers, stops, edits, and changes of the conversation.

import { button, byId, element } from "./dom.js";
import { Answer, copyCode, question, sends } from "./messages.js";
import { panel } from "./panels.js";
import * as plots from "./plots.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const KEEP_MS = 1000; // how often a streamed answer is stored
const CURRENT = "vllm-metal.current";
const messages = byId("messages");
const box = byId("question");

let current = null; // the displayed conversation
let running = null; // AbortController of the streamed answer

const list = panel("list");
panel("metrics", (shown) => (shown ? plots.start() : plots.stop()));

/** Requests an answer, or the rest of one. */
async function ask(answer = null) {
  const conversation = current;
  const asked = { messages: said(conversation), sampling: conversation.sampling, continue: answer !== null };
  if (answer) answer.resume();
  else {
    answer = answerOf({ role: "assistant", text: "" });
    conversation.messages.push(answer.message);
    messages.append(answer.element);
  }
  const { message } = answer;
  toEnd(true);
  begin();
  let kept = performance.now();
  try {
    await server.answer(asked, running.signal, (event) => {
      const atEnd = isAtEnd();
      answer.add(event);
      if (atEnd) toEnd();
      if (performance.now() - kept > KEEP_MS) {
        kept = performance.now();
        keep(conversation);
      }
    });
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  const atEnd = isAtEnd();
  answer.finish();
  if (atEnd) toEnd();
  end(message);
  keep(conversation);
}

const answerOf = (message) => new Answer(message, () => regenerate(message), resume);

function begin() {
  running = new AbortController();
  messages.ariaBusy = "true"; // a screen reader then waits until the answer is complete
  byId("send").hidden = true;
  byId("stop").hidden = false;
  byId("status").textContent = "The model is answering.";
}

function end(message) {
  running = null;
  messages.ariaBusy = "false";
  byId("send").hidden = false;
  byId("stop").hidden = true;
  byId("status").textContent = message.error ? "The answer failed." : message.stopped ? "Stopped." : "The answer is complete.";
}

function said({ system, messages }) {
  const texts = messages.filter(({ text }) => text).map(({ role, text }) => ({ role, content: text }));
  return system ? [{ role: "system", content: system }, ...texts] : texts;
}

function send(text) {
  const message = { role: "user", text };
  current.messages.push(message);
  messages.append(question(message, (changed) => edit(message, changed)));
  keep(current);
  showEmpty();
  ask();
}

function edit(message, text) {
  if (running) return;
  cutAt(message);
  box.focus();
  send(text);
}

function regenerate(message) {
  if (running) return;
  cutAt(message);
  box.focus();
  ask();
}

function resume(answer) {
  if (running) return;
  const next = current.messages[current.messages.indexOf(answer.message) + 1];
  if (next) cutAt(next);
  box.focus();
  ask(answer);
}

/** Removes a message and all that follow. */
function cutAt(message) {
  const at = current.messages.indexOf(message);
  current.messages.length = at;
  while (messages.children.length > at) messages.lastElementChild.remove();
}

function keep(conversation) {
  const fits = store.keep(conversation);
  if (!fits) byId("status").textContent = "The browser's storage is full: delete conversations.";
  showList();
}

async function show(conversation) {
  running?.abort();
  current = conversation;
  sessionStorage.setItem(CURRENT, conversation.id);
  const answers = [];
  messages.replaceChildren(...conversation.messages.map((message) => {
    if (message.role === "user") return question(message, (text) => edit(message, text));
    const answer = answerOf(message);
    answer.finish();
    answers.push([answer, message.text]);
    return answer.element;
  }));
  showEmpty();
  showList();
  if (!answers.length) return;
  try {
    const blocks = await server.markdown(answers.map(([, text]) => text));
    answers.forEach(([answer], index) => answer.show(blocks[index]));
  } catch (error) {
    byId("status").textContent = error.message;
  }
  toEnd(true);
}

function showList() {
  byId("list").querySelector("ul").replaceChildren(...store.all().map((conversation) => {
    const { id, title } = conversation;
    const open = button(title, () => { show(conversation); list.closeIfNarrow(); box.focus(); }, { className: "open" });
    if (id === current.id) open.ariaCurrent = "true";
    const remove = button("×", () => {
      if (!window.confirm(`Delete “${title}”?`)) return;
      store.remove(id);
      if (id === current.id) show(store.all()[0] ?? store.fresh());
      else showList();
    }, { className: "remove", ariaLabel: `Delete ${title}`, title: "Delete" });
    return element("li", {}, open, remove);
  }));
}

function showEmpty() {
  byId("empty").hidden = current.messages.length > 0;
}

const isAtEnd = () => messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80;

function toEnd() {
  messages.scrollTop = messages.scrollHeight;
}

function stop() {
  running?.abort();
  box.focus();
}

function fitBox() {
  box.rows = Math.min(8, box.value.split("\n").length);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = box.value.trim();
  if (!text || running) return;
  box.value = "";
  fitBox();
  box.focus();
  send(text);
});
box.addEventListener("input", fitBox);
box.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !byId("settings").open) stop();
});
messages.addEventListener("click", copyCode);
byId("new").addEventListener("click", () => {
  show(store.fresh());
  list.closeIfNarrow();
  box.focus();
});
byId("show-settings").addEventListener("click", () => settings.open(current, (changed) => {
  Object.assign(current, changed);
  store.keepSettings(changed);
  keep(current);
}));
window.addEventListener("pagehide", () => store.keep(current));
store.watch(showList);

const last = sessionStorage.getItem(CURRENT);
const kept = store.all();
show(kept.find(({ id }) => id === last) ?? kept[0] ?? store.fresh());
box.focus();

byId("connect").addEventListener("click", connect);
connect();

/** Shows the served model, or why there is none. */
async function connect() {
  const notice = byId("notice");
  try {
    const { name, label, context, millions, max_tokens } = await server.model();
    notice.hidden = true;
    byId("model").textContent = label;
    byId("model").title = context ? `${name}, ${context} tokens of context` : name;
    settings.setDefaults({ max_tokens });
    byId("toy").hidden = !millions;
    byId("toy").firstElementChild.textContent =
      `${label} is a toy model with ${millions} million parameters, for trying out the engine. For real answers: `;
  } catch (error) {
    notice.hidden = false;
    notice.firstElementChild.textContent = error.message;
  }
}
