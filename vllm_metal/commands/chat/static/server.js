// SPDX-License-Identifier: Apache-2.0
// What the page asks its server.

const JSON_TYPE = { "Content-Type": "application/json" };

/** The served model: {name, context}. */
export const model = () => ask("api/model");

/** The engine's counters at this moment. */
export const figures = () => ask("api/figures");

/** Blocks of HTML of each text. */
export const markdown = (texts) =>
  ask("api/markdown", { method: "POST", headers: JSON_TYPE, body: JSON.stringify({ texts }) });

/**
 * Asks for an answer and hands its events on as they come.
 *
 * @param {object} asked - messages and sampling.
 * @param {AbortSignal} signal - ends it, at the engine too.
 * @param {(event: object) => void} take - gets each event.
 */
export async function answer(asked, signal, take) {
  const reply = await fetch("api/answer", {
    method: "POST", headers: JSON_TYPE, body: JSON.stringify(asked), signal,
  });
  if (!reply.ok) throw new Error(await refusal(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) take(JSON.parse(line));
  }
}

async function ask(path, options) {
  const reply = await fetch(path, options);
  if (!reply.ok) throw new Error(await refusal(reply));
  return reply.json();
}

async function refusal(reply) {
  try {
    return (await reply.json()).error;
  } catch {
    return `the page's server says ${reply.status}`;
  }
}
