// SPDX-License-Identifier: Apache-2.0
// Requests from the page to its server.

const JSON_TYPE = { "Content-Type": "application/json" };
// Replaces the browsers' own "Failed to fetch" or "network error" when the server is gone.
const ENDED = "The chat has ended. Run vllm-metal chat again, and open the address that it prints.";

/** Returns the served model: {name, label, context, millions, max_tokens}. */
export const model = () => ask("api/model");

/** Returns the engine's current counters. */
export const metrics = () => ask("api/metrics");

/** Renders texts of Markdown; returns blocks of HTML for each. */
export const markdown = (texts) =>
  ask("api/markdown", { method: "POST", headers: JSON_TYPE, body: JSON.stringify({ texts }) });

/**
 * Requests an answer and streams its events.
 *
 * @param {object} asked - messages and sampling, and whether to continue the last message.
 * @param {AbortSignal} signal - ends it, also in the engine.
 * @param {(event: object) => void} take - gets each event.
 */
export async function answer(asked, signal, take) {
  const reply = await request("api/answer", {
    method: "POST", headers: JSON_TYPE, body: JSON.stringify(asked), signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = {};
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done && !last.done && !last.error) throw new Error(ENDED);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) take(last = JSON.parse(line));
  }
}

async function ask(path, options) {
  return (await request(path, options)).json();
}

async function request(path, options) {
  const reply = await fetch(path, options).catch(lost);
  if (!reply.ok) throw new Error(await refusal(reply));
  return reply;
}

function lost(error) {
  throw error.name === "AbortError" ? error : new Error(ENDED);
}

async function refusal(reply) {
  try {
    return (await reply.json()).error;
  } catch {
    return `The page's server returned status ${reply.status}.`;
  }
}
