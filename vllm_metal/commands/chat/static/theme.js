// SPDX-License-Identifier: Apache-2.0
// The theme: as the system has it, light or dark. It is set before the page is drawn.
(() => {
  const KEY = "vllm-metal.theme";
  const ORDER = ["system", "light", "dark"];
  let theme = localStorage.getItem(KEY);
  if (!ORDER.includes(theme)) theme = "system";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.ariaLabel = `Theme: ${theme === "system" ? "as the system" : theme}`;
  };
  show();
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      localStorage.setItem(KEY, theme);
      show();
    });
  });
})();
