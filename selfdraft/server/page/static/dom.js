// Building elements. Text always goes in as text; only markdown.js writes HTML.

const ICONS = {
  pencil: "M4 16l1-4 8-8 3 3-8 8zM11 6l3 3",
  cross: "M6 6l8 8M14 6l-8 8",
  trash: "M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10",
};

/** An element with properties, attributes, `onclick`-like listeners, and children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon only; its label is for assistive technology and as a tooltip. */
export function iconButton(name, label, onclick, className = "") {
  return el("button", { type: "button", className: `icon-button ${className}`, title: label, "aria-label": label, onclick }, icon(name));
}

export function textButton(label, onclick, className = "quiet") {
  return el("button", { type: "button", className, onclick }, label);
}

export const byId = (id) => document.getElementById(id);

/** Makes a text area as high as its text. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

/** Enter runs `send`; Shift+Enter, and Enter that ends an input method's word, do not. */
export function onEnter(area, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
}

/** Copies text; says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  const done = await writeClipboard(text);
  button.textContent = done ? "Copied" : "Copying is blocked";
  announce(button.textContent);
  setTimeout(() => (button.textContent = label), 1500);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no clipboard API outside secure contexts
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = el("textarea", { value: text, className: "offscreen" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

/** Says a sentence to a screen reader. */
export function announce(text) {
  byId("announcer").textContent = text;
}
