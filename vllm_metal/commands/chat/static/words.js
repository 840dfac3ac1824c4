// SPDX-License-Identifier: Apache-2.0
// An answer's figures, and why its prompt's prefix was missed, in words.

const CAUSES = {
  date: "a date or time changed",
  counter: "a number changed",
  identifier: "a random name changed",
  edit: "a message was changed",
  message_inserted: "a message was put in between",
  message_removed: "a message was taken out",
  tools_reordered: "tools came in another order",
  tools_changed: "other tools were given",
  template: "the chat template wrote the same messages otherwise",
  granularity: "the last block was not full",
  evicted: "it had left the cache",
  in_flight: "the prompt before was not computed yet",
  first_seen: "no prompt before begins so",
};

/** Pairs of a label and a value, of those figures that are known. */
export function ofFigures(figures) {
  const { ttft, tokens, speed, prompt, cached, drafted, accepted } = figures;
  const pairs = [];
  if (ttft != null) pairs.push(["First token", seconds(ttft)]);
  if (speed != null) pairs.push(["Speed", `${speed.toFixed(1)} tok/s`]);
  if (tokens != null) pairs.push(["Answer", `${tokens} tokens`]);
  if (prompt != null) pairs.push(["Prompt", `${prompt} tokens`]);
  if (cached != null) pairs.push(["Cached", `${cached} tokens`]);
  if (drafted) pairs.push(["Drafts accepted", `${accepted} of ${drafted}`]);
  return pairs;
}

/** A miss as one sentence. */
export function ofMiss(miss) {
  const { cause, lost, token, message, role, before, now } = miss;
  const where = [];
  if (token != null) where.push(`token ${token}`);
  if (message != null) where.push(`message ${message}${role ? ` (${role})` : ""}`);
  const place = where.length ? ` from ${where.join(", ")} on` : "";
  const texts = before != null || now != null ? `: “${before ?? ""}” became “${now ?? ""}”` : "";
  return `Prefix missed: ${lost} tokens were computed again${place}, as ${CAUSES[cause] ?? cause}${texts}.`;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}
