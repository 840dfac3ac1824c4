// SPDX-License-Identifier: Apache-2.0
// The theme, light or dark, or as the system has it. It is set before the page is drawn.
(() => {
  const KEY = "vllm-metal.theme";
  const ORDER = ["system", "light", "dark"];
  let theme = localStorage.getItem(KEY);
  if (!ORDER.includes(theme)) theme = "system";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const system = dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme === "system" ? system : theme;
    const button = document.getElementById("theme");
    if (button) button.ariaLabel = `Theme: ${theme === "system" ? "as the system" : theme}`;
  };
  show();
  dark.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      localStorage.setItem(KEY, theme);
      show();
    });
  });
})();
