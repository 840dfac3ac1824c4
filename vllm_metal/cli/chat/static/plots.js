// SPDX-License-Identifier: Apache-2.0
// The panel of the engine's metrics, as numbers and lines, polled while the panel is open.

import { byId, element } from "./dom.js";
import * as server from "./server.js";

const PERIOD_MS = 2000;
const KEPT = 120; // samples: four minutes
const SVG = "http://www.w3.org/2000/svg";

const share = (part, whole) => (part != null && whole > 0 ? part / whole : null);
const since = (now, before) => (now == null || before == null ? null : now - before);
const percent = (value) => `${Math.round(100 * value)} %`;

// Each value is computed from a sample and the one before it; null if it is unknown.
const PLOTS = [
  { label: "KV cache in use", most: 1, shown: percent, value: (now) => now.kv_cache_usage },
  { label: "Prefix cache hits", most: 1, shown: percent,
    value: (now, before) => share(since(now.prefix_hits, before.prefix_hits), since(now.prefix_queries, before.prefix_queries)) },
  { label: "Drafts accepted", most: 1, shown: percent,
    value: (now, before) => share(since(now.accepted_tokens, before.accepted_tokens), since(now.draft_tokens, before.draft_tokens)) },
  { label: "Requests waiting", least: 4, shown: (value) => `${value}`, value: (now) => now.waiting },
  { label: "Tokens per second", least: 10, shown: (value) => value.toFixed(1),
    value: (now, before) => share(since(now.generated_tokens, before.generated_tokens), now.at - before.at) },
  { label: "Power (watts)", least: 10, shown: (value) => value.toFixed(1),
    value: (now, before) => share(since(now.joules, before.joules), now.at - before.at) },
];

let timer = null;
let before = null;

/** Starts polling. */
export function start() {
  if (timer) return;
  byId("plots").replaceChildren(...PLOTS.map((plot) => {
    plot.values = [];
    plot.last = element("dd", { textContent: "–" });
    plot.line = document.createElementNS(SVG, "polyline");
    const drawn = document.createElementNS(SVG, "svg");
    drawn.setAttribute("viewBox", `0 0 ${KEPT - 1} 32`);
    drawn.setAttribute("preserveAspectRatio", "none");
    drawn.setAttribute("aria-hidden", "true"); // the number has the value for screen readers
    drawn.append(plot.line);
    plot.element = element("dl", { className: "plot", hidden: true }, element("div", {}, element("dt", { textContent: plot.label }), plot.last), drawn);
    return plot.element;
  }));
  before = null;
  timer = setInterval(sample, PERIOD_MS);
  sample();
}

/** Stops polling. */
export function stop() {
  clearInterval(timer);
  timer = null;
}

async function sample() {
  if (document.hidden) return;
  const note = byId("metrics-note");
  try {
    const now = { ...await server.metrics(), at: performance.now() / 1000 };
    note.textContent = "";
    for (const plot of PLOTS) draw(plot, plot.value(now, before ?? {}));
    before = now;
  } catch (error) {
    note.textContent = error.message;
  }
}

function draw(plot, value) {
  const known = value != null && !Number.isNaN(value);
  plot.values = [...plot.values, known ? value : null].slice(-KEPT);
  plot.element.hidden = !plot.values.some((one) => one != null);
  if (known) plot.last.textContent = plot.shown(value);
  const most = plot.most ?? Math.max(plot.least, ...plot.values);
  const at = KEPT - plot.values.length;
  plot.line.setAttribute("points", plot.values
    .map((one, index) => (one == null ? "" : `${at + index},${(31 - 30 * Math.min(1, one / most)).toFixed(1)}`))
    .filter(Boolean).join(" "));
}
