// SPDX-License-Identifier: Apache-2.0
// Text for an answer's metrics, the limit that ended it, and its prefix-cache miss.

const CAUSES = {
  date: "a date or time",
  counter: "a number",
  identifier: "an identifier",
};
const SENTENCES = {
  edit: "An earlier message changed",
  message_inserted: "A message was added before others",
  message_removed: "An earlier message was removed",
  tools_reordered: "The order of the tools changed",
  tools_changed: "The tools changed",
  template: "The chat template rendered the same messages differently",
  granularity: "Only full blocks are cached, and the last one was not full",
  evicted: "The conversation was evicted from the cache",
  in_flight: "The previous prompt was still being computed",
};
// Special tokens of chat templates, also if cut off at the end of a text.
const SPECIAL = /<\|?[\w:/ ]*\|?>|<\|?[\w:/ ]*\|?$|\[\/?INST\]/g;

/** Returns pairs of label and value for the known metrics. */
export function ofMetrics(metrics) {
  const { ttft, tokens, speed, prompt, cached, drafted, accepted } = metrics;
  const pairs = [];
  if (ttft != null) pairs.push(["First token", seconds(ttft)]);
  if (speed != null) pairs.push(["Speed", `${speed.toFixed(1)} tok/s`]);
  if (tokens) pairs.push(["Answer", count(tokens)]);
  if (prompt != null) pairs.push(["Prompt", count(prompt)]);
  if (cached) pairs.push(["Cached", count(cached)]);
  if (drafted) pairs.push(["Drafts accepted", `${accepted} of ${drafted}`]);
  return pairs;
}

/** Explains in one sentence why tokens of a prompt were recomputed; "" if they were new. */
export function ofMiss(miss) {
  const { cause, lost, message, role, before, now } = miss;
  if (cause === "first_seen") return "";
  let what = message == null ? "The prompt changed" : "An earlier message changed";
  if (role === "system") what = "The system prompt changed";
  else if (!(cause in CAUSES)) what = SENTENCES[cause] ?? cause;
  if (cause in CAUSES) {
    const texts = [before, now].map((text) => `“${(text ?? "").replace(SPECIAL, " ").trim()}”`);
    what += ` (${CAUSES[cause]}: ${texts.join(" became ")})`;
  }
  return `${what}: ${lost} tokens were computed again.`;
}

/** Explains which limit ended an answer, and what to do. */
export function ofLimit({ name, tokens }, thinking) {
  if (name === "context") return `Stopped at the end of the context (${tokens} tokens). Start a new conversation to continue.`;
  const limit = name === "max_tokens" ? `Max tokens (${tokens})` : "the server's token limit";
  return thinking ? `Stopped at ${limit} while reasoning. Raise Max tokens in the settings.` : `Stopped at ${limit}.`;
}

const count = (tokens) => `${tokens} ${tokens === 1 ? "token" : "tokens"}`;

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}
