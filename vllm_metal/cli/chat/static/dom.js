// SPDX-License-Identifier: Apache-2.0
// Helpers to create elements; strings become text nodes, never HTML.

/** Creates an element with properties, and elements or texts as children. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Creates a button that calls `act`. */
export function button(label, act, properties = {}) {
  const made = element("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", act);
  return made;
}

/** Returns the element with an id. */
export const byId = (id) => document.getElementById(id);
