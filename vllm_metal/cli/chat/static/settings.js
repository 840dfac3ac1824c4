// SPDX-License-Identifier: Apache-2.0
// The dialog of a conversation's settings: system prompt and sampling.

import { byId } from "./dom.js";

const dialog = byId("settings");
const form = dialog.querySelector("form");
const numbers = [...form.querySelectorAll("input")];
let saved = null;

/** Shows a conversation's settings; `save` gets them when the user saves them. */
export function open({ system, sampling }, save) {
  form.elements.system.value = system;
  for (const input of numbers) input.value = sampling[input.name] ?? "";
  saved = save;
  dialog.returnValue = "";
  dialog.showModal();
}

/** Shows known defaults in empty fields. */
export function setDefaults(values) {
  for (const input of numbers) input.placeholder = values[input.name] ?? "";
}

dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "save") return;
  const given = numbers.filter((input) => input.value !== "");
  saved({
    system: form.elements.system.value.trim(),
    sampling: Object.fromEntries(given.map((input) => [input.name, input.valueAsNumber])),
  });
});
