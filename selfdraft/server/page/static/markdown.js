// Markdown on the page: rendered by the server, put in place block by block. The only module that writes HTML.

import { renderMarkdown } from "./api.js";
import { copy, el, textButton } from "./dom.js";

const INTERVAL = 120;
const AFTER_FAILURE = 1000;
const sources = new WeakMap();

/**
 * Shows Markdown in `node`. `set(text)` may be called at any rate: the server is asked about eight times a second at
 * most, less often when it is slow, and the last text is always shown. The promise is settled when it is.
 */
export function markdownInto(node) {
  let wanted = "";
  let shown = "";
  let running = null;
  async function work() {
    while (shown !== wanted) {
      const text = wanted;
      const started = performance.now();
      const rendered = await show(node, text);
      shown = text;
      const took = performance.now() - started;
      const pause = Math.max(rendered ? INTERVAL : AFTER_FAILURE, 3 * took);
      if (shown !== wanted) await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
  return {
    set(text) {
      wanted = text;
      running ??= work().finally(() => (running = null));
      return running;
    },
  };
}

/** Whether the server rendered it. */
async function show(node, text) {
  try {
    const html = await renderMarkdown(text);
    node.classList.remove("as-is");
    patch(node, html);
    return true;
  } catch {
    node.classList.add("as-is"); // too long to render, or no server: the text itself is still worth reading
    node.textContent = text;
    return false;
  }
}

/** Replaces only the blocks that changed, so that a selection or a focused button survives the next piece. */
function patch(node, html) {
  const template = el("template");
  template.innerHTML = html;
  const fresh = [...template.content.children];
  const old = [...node.childNodes];
  fresh.forEach((block, index) => {
    const source = block.outerHTML;
    if (sources.get(old[index]) === source) return;
    const dressed = dress(block);
    sources.set(dressed, source);
    if (old[index]) old[index].replaceWith(dressed);
    else node.append(dressed);
  });
  old.slice(fresh.length).forEach((block) => block.remove());
}

/** Gives each code block its bar with the language and a copy button. */
function dress(block) {
  const holder = el("div", {}, block);
  for (const code of holder.querySelectorAll("pre")) {
    const place = el("span");
    code.replaceWith(place);
    code.tabIndex = 0; // a block that scrolls must be reachable by keyboard
    const button = textButton("Copy", () => copy(code.textContent.replace(/\n$/, ""), button), "quiet copy-code");
    button.setAttribute("aria-label", "Copy code");
    const bar = el("div", { className: "code-bar" }, el("span", {}, code.dataset.language || "text"), button);
    place.replaceWith(el("div", { className: "code-block" }, bar, code));
  }
  return holder.firstElementChild;
}
