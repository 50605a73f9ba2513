// How fast an answer came, and how many drafted tokens were accepted at each position.

import { el } from "./dom.js";

const shown = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Fills `node` with the figures of `message`: live ones while it streams, the final ones after. */
export function showFigures(node, message) {
  const { timings, usage } = message;
  const items = [
    figure(timings?.tokens_per_second, 1, "tok/s"),
    figure(timings?.tokens_per_cycle, 2, "tokens per cycle"),
    acceptance(timings?.acceptance_per_position),
    figure(usage?.completion_tokens, 0, usage?.completion_tokens === 1 ? "token" : "tokens"),
    prompt(usage, timings),
  ].filter(Boolean);
  node.replaceChildren(...items);
  node.hidden = items.length === 0;
}

function figure(value, digits, unit) {
  if (!Number.isFinite(value)) return null;
  return el("span", { className: "figure" }, el("b", {}, shown(value, digits)), ` ${unit}`);
}

function prompt(usage, timings) {
  if (!Number.isFinite(usage?.prompt_tokens)) return null;
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const parts = [`prompt ${shown(usage.prompt_tokens, 0)}`];
  if (cached) parts.push(`${shown(cached, 0)} cached`);
  if (Number.isFinite(timings?.prompt_ms)) parts.push(`${shown(timings.prompt_ms / 1000, 2)} s`);
  return el("span", { className: "figure" }, parts.join(", "));
}

/** One bar a draft position. */
function acceptance(rates) {
  const known = Array.isArray(rates) ? rates.filter((rate) => Number.isFinite(rate)) : [];
  if (known.length === 0) return null;
  const percents = known.map((rate) => Math.round(100 * Math.min(1, Math.max(0, rate))));
  const label = `Accepted by draft position: ${percents.map((value, index) => `${index + 1}: ${value}%`).join(", ")}`;
  const bars = percents.map((value) => {
    const fill = el("i", { className: "fill" });
    fill.style.height = `${value}%`; // through the object model: the CSP forbids style attributes only
    return el("span", { className: "bar" }, fill);
  });
  return el(
    "span",
    { className: "figure acceptance", role: "img", "aria-label": label, title: label },
    el("span", { className: "bars" }, ...bars),
    el("span", {}, `${percents.join(" · ")} % accepted`),
  );
}
