// Runs before the first paint: light or dark, as chosen on the page or else as the system says.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem("selfdraft.theme");
    } catch {
      return null;
    }
  };
  const apply = () => {
    const name = chosen();
    document.documentElement.dataset.theme = name === "light" || name === "dark" ? name : dark.matches ? "dark" : "light";
  };
  dark.addEventListener("change", apply);
  apply();
})();
