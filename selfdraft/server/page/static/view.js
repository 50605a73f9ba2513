// The conversation on the page: the messages of the open chat, and following the newest text while it grows.

import { announce, byId, el } from "./dom.js";
import { messageView } from "./message.js";

const NEAR = 48;

export class Conversation {
  constructor(actions) {
    this.actions = actions;
    this.list = byId("messages");
    this.scroller = byId("conversation");
    this.views = new Map();
    this.following = true;
    this.lastTop = 0;
    this.scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.following && this.toEnd()).observe(this.list);
    byId("to-end").addEventListener("click", () => this.toEnd());
    setInterval(() => this.updateStreaming(), 1000); // seconds of thinking pass without a piece, too
  }

  /** Shows a chat; keeps the elements of messages already shown, and the place of one who reads back in it. */
  show(chat) {
    const stay = chat.id === this.shown && !this.following;
    this.shown = chat.id;
    const old = this.views;
    this.views = new Map(chat.messages.map((message) => [message, old.get(message) ?? messageView(message, this.actions)]));
    const nodes = [...this.views.values()].map((view) => view.node);
    byId("empty").hidden = nodes.length > 0;
    this.list.replaceChildren(...nodes);
    for (const view of this.views.values()) view.update();
    if (!stay) this.toEnd();
  }

  /** Brings one message up to date, if it is on the page. */
  update(message) {
    return this.views.get(message)?.update();
  }

  /** Says a finished answer to screen readers, once. */
  async finish(message) {
    await this.update(message);
    const view = this.views.get(message);
    if (view && message.status !== "failed") announce(view.text().slice(0, 4000));
  }

  updateStreaming() {
    for (const [message, view] of this.views) if (message.status === "streaming") view.update();
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    if (near) this.following = true;
    else if (scrollTop < this.lastTop) this.following = false; // only a reader scrolls up
    this.lastTop = scrollTop;
    byId("to-end").hidden = this.following;
  }

  toEnd() {
    this.following = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    byId("to-end").hidden = true;
  }
}

/** A line at the foot of the page that stays until it is closed or replaced. `undo` is {label, run}. */
export function notify(text, undo) {
  const bar = byId("notice");
  const close = () => (bar.hidden = true);
  const button = (label, run) => el("button", { type: "button", className: "quiet", onclick: run }, label);
  const buttons = [button("Dismiss", close)];
  if (undo) {
    buttons.unshift(
      button(undo.label, () => {
        close();
        undo.run();
      }),
    );
  }
  bar.replaceChildren(el("span", { role: "status" }, text), ...buttons);
  bar.hidden = false;
}
