// SPDX-License-Identifier: Apache-2.0
// Makes elements of a page; texts become text, never HTML.

/** An element with properties, and children that are elements or texts. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** A button that does something. */
export function button(label, act, properties = {}) {
  const made = element("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", act);
  return made;
}

/** The element of an id. */
export const byId = (id) => document.getElementById(id);
