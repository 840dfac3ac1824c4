// SPDX-License-Identifier: Apache-2.0
// Conversations in the browser's storage, an entry each, and the settings of new ones.
//
// A conversation: {id, title, changed, system, sampling, messages}. A message: {role, text}, and for
// answers also {reasoning, metrics, miss, stopped, cut, error, earlier}.

const PREFIX = "vllm-metal.conversation.";
const DEFAULTS = "vllm-metal.settings";
const TITLE_LENGTH = 48;

/** Returns a new conversation, which is stored from its first message on. */
export function fresh() {
  const { system = "", sampling = {} } = read(DEFAULTS) ?? {};
  return { id: crypto.randomUUID(), title: "New conversation", changed: 0, system, sampling, messages: [] };
}

/** Returns all stored conversations, the last changed one first. */
export function all() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(PREFIX))
    .map(read)
    .filter((found) => found?.messages)
    .sort((one, other) => other.changed - one.changed);
}

/** Stores a conversation; returns false if the browser's storage is full. */
export function keep(conversation) {
  if (!conversation.messages.length) return true;
  conversation.changed = Date.now();
  conversation.title = titleOf(conversation.messages[0].text);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

/** Removes a conversation. */
export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Stores the settings for new conversations. */
export function keepSettings({ system, sampling }) {
  localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling }));
}

/** Calls `changed` when another tab stores or removes a conversation. */
export function watch(changed) {
  window.addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) changed();
  });
}

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}
