// SPDX-License-Identifier: Apache-2.0
// The two panels at the sides: beside the messages where there is room, over them where there is not.

import { byId } from "./dom.js";

const wide = window.matchMedia("(min-width: 62rem)");

/**
 * A panel and the button that shows and hides it.
 *
 * @param {string} id - of the panel; its button's is `show-` and this.
 * @param {(shown: boolean) => void} changed - told of each change, and how it begins.
 */
export function panel(id, changed = () => {}) {
  const shown = byId(id);
  const opener = byId(`show-${id}`);
  const set = (open) => {
    shown.hidden = !open;
    opener.ariaExpanded = String(open);
    changed(open);
  };
  opener.addEventListener("click", () => {
    set(shown.hidden);
    if (!shown.hidden && !wide.matches) shown.querySelector("button, [tabindex]")?.focus();
  });
  shown.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || wide.matches) return;
    event.stopPropagation();
    set(false);
    opener.focus();
  });
  set(wide.matches);
  // A window that gets narrow must not have both over the messages.
  wide.addEventListener("change", () => set(wide.matches));
  return { closeIfNarrow: () => wide.matches || shown.hidden || set(false) };
}
