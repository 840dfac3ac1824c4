// SPDX-License-Identifier: Apache-2.0
// The two side panels: beside the messages in a wide window, over them in a narrow one.

import { byId } from "./dom.js";

const wide = window.matchMedia("(min-width: 62rem)");

/**
 * Connects a panel with the button that shows and hides it.
 *
 * @param {string} id - of the panel; the button's is `show-${id}`.
 * @param {(shown: boolean) => void} changed - called at first and on each change.
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
  // In a window that becomes narrow, both panels would cover the messages.
  wide.addEventListener("change", () => set(wide.matches));
  return { closeIfNarrow: () => wide.matches || shown.hidden || set(false) };
}
