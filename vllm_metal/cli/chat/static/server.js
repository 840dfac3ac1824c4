// SPDX-License-Identifier: Apache-2.0
// What the page asks its server.

const JSON_TYPE = { "Content-Type": "application/json" };
// Browsers say "Failed to fetch", or "network error", of a server that is not there.
const ENDED = "The chat has ended. Run vllm-metal chat again, and open the address that it prints.";

/** The served model: {name, label, context, millions, max_tokens}. */
export const model = () => ask("api/model");

/** The engine's counters at this moment. */
export const figures = () => ask("api/figures");

/** Blocks of HTML of each text. */
export const markdown = (texts) =>
  ask("api/markdown", { method: "POST", headers: JSON_TYPE, body: JSON.stringify({ texts }) });

/**
 * Asks for an answer and hands its events on as they come.
 *
 * @param {object} asked - messages and sampling, and whether to continue the last message.
 * @param {AbortSignal} signal - ends it, at the engine too.
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
    return `The page's server says ${reply.status}.`;
  }
}
