// SPDX-License-Identifier: Apache-2.0
// The theme: light, dark, or the system's. Loaded first, so that the page never flashes in another.
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
    if (button) button.ariaLabel = `Theme: ${theme}`;
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
