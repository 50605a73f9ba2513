// One message on the page. `update()` brings its element up to date with the message; the rest is in view.js.

import { copy, el, fitHeight, iconButton, onEnter, textButton } from "./dom.js";
import { showFigures } from "./figures.js";
import { markdownInto } from "./markdown.js";
import { pictureOf } from "./pictures.js";

const FIGURES_EVERY = 250; // milliseconds; faster than this nobody reads them
const THOUGHTS_EVERY = 100;

export const messageView = (message, actions) =>
  message.role === "user" ? userView(message, actions) : answerView(message, actions);

function userView(message, actions) {
  const node = el("article", { className: "message user", "aria-label": "You" });
  const images = message.images ?? [];
  const read = () => {
    const copyButton = textButton("Copy", () => copy(message.content, copyButton));
    const said = message.content ? [el("div", { className: "bubble", dir: "auto" }, message.content)] : [];
    const buttons = message.content ? [copyButton, textButton("Edit", write)] : [textButton("Edit", write)];
    node.replaceChildren(picturesView(images), ...said, el("div", { className: "actions" }, ...buttons));
  };
  const write = () => {
    const area = el("textarea", { value: message.content, className: "bubble", dir: "auto", "aria-label": "Edit message" });
    const cancel = () => {
      read();
      node.querySelector(".actions button:last-child").focus();
    };
    const kept = new Set(images);
    const send = () => (area.value.trim() || kept.size) && actions.edit(message, area.value.trim(), [...kept]);
    onEnter(area, send);
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it ends the edit, not the answer
      cancel();
    });
    const buttons = el("div", { className: "actions" }, textButton("Cancel", cancel), textButton("Send", send, "primary"));
    node.replaceChildren(picturesView(images, (image) => kept.delete(image)), area, buttons);
    fitHeight(area);
    area.focus();
  };
  read();
  return { node, update: () => Promise.resolve() };
}

/** The images of a message. With `remove(image)` each has a button that takes it out. */
function picturesView(images, remove) {
  const views = images.map((image) => {
    const view = el("div", { className: "picture" }, pictureView(image));
    const takeOut = () => {
      remove(image);
      view.remove();
    };
    if (remove) view.append(iconButton("cross", `Remove ${image.name}`, takeOut, "small"));
    return view;
  });
  return el("div", { className: "pictures" }, ...views);
}

function pictureView({ id, name }) {
  const picture = el("img", { alt: name, title: name });
  pictureOf(id).then((url) => {
    if (url) picture.src = url;
    else picture.replaceWith(el("span", { className: "gone" }, `${name} is not kept in this browser any more`));
  });
  return picture;
}

function answerView(message, actions) {
  const thinking = thinkingView(message);
  const waiting = el("p", { className: "waiting" }, "Waiting for the first token");
  const body = el("div", { className: "markdown", dir: "auto" });
  const note = el("div", { className: "note" });
  const figures = el("div", { className: "figures" });
  const copyButton = textButton("Copy", () => copy(message.content, copyButton));
  const again = textButton("Regenerate", () => actions.regenerate(message), "quiet only-last");
  const node = el("article", { className: "message answer", "aria-label": "Answer" });
  node.append(thinking.node, waiting, body, note, figures, el("div", { className: "actions" }, copyButton, again));
  const markdown = markdownInto(body);
  let figuresAt = 0;

  const update = () => {
    const streaming = message.status === "streaming";
    node.dataset.status = message.status;
    node.setAttribute("aria-busy", String(streaming));
    waiting.hidden = !streaming || Boolean(message.content || message.reasoning);
    copyButton.hidden = !message.content;
    again.hidden = message.status === "failed"; // the failure has a button of its own
    thinking.update();
    if (!streaming || Date.now() - figuresAt > FIGURES_EVERY) {
      showFigures(figures, message);
      figuresAt = Date.now();
    }
    if (!streaming) note.replaceChildren(...ending(message, actions));
    return markdown.set(message.content);
  };
  return { node, update, text: () => body.innerText };
}

function thinkingView(message) {
  const label = el("summary");
  const text = el("div", { className: "thoughts", dir: "auto", tabIndex: 0 });
  const node = el("details", { className: "thinking", hidden: true }, label, text);
  let wasThinking = false;
  let shown = "";
  let nextAt = 0;
  /** Long thoughts take long to lay out: at most a quarter of the time goes into it. */
  const show = (thinking) => {
    const started = Date.now();
    if (shown === message.reasoning || (thinking && started < nextAt)) return;
    text.textContent = shown = message.reasoning;
    if (thinking) text.scrollTop = text.scrollHeight;
    nextAt = Date.now() + Math.max(THOUGHTS_EVERY, 3 * (Date.now() - started));
  };
  const update = () => {
    node.hidden = !message.reasoning;
    if (!message.reasoning) return;
    const thinking = Boolean(message.thinkingSince) && message.status === "streaming";
    const seconds = ((message.thoughtMs ?? 0) + (thinking ? Date.now() - message.thinkingSince : 0)) / 1000;
    const words = thinking ? `Thinking, ${Math.floor(seconds)} s` : `Thought for ${seconds.toFixed(1)} s`;
    if (label.textContent !== words) label.textContent = words;
    if (thinking !== wasThinking) node.open = thinking;
    show(thinking);
    wasThinking = thinking;
  };
  return { node, update };
}

/** What is to be said about how an answer ended, if anything. */
function ending(message, actions) {
  if (message.status === "stopped") return [el("p", {}, "Stopped before the end.")];
  if (message.status === "failed") return [failure(message.error ?? {}, () => actions.regenerate(message))];
  if (message.reason === "length") return [el("p", {}, "Cut at the limit of tokens. Raise “Longest answer” in the settings.")];
  if (!message.content) return [el("p", {}, "The model gave an empty answer.")];
  return [];
}

function failure(error, retry) {
  const words = el("div", {}, el("p", {}, el("b", {}, error.message ?? "The answer failed.")), el("p", {}, error.remedy ?? ""));
  return el("div", { className: "failure", role: "alert" }, words, textButton("Retry", retry, "secondary only-last"));
}
