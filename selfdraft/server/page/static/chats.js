// The chats: what is said in them, and keeping them in this browser, each under a key of its own.

import * as storage from "./storage.js";

const KEY = "chat.";
const STATUSES = ["done", "stopped", "failed"];

export const titleOf = (chat) => chat.title || firstLine(chat) || "New chat";

export class Chats {
  constructor(onChange) {
    this.onChange = onChange;
    this.all = storage.keys(KEY).map((key) => revived(storage.read(key))).filter(Boolean);
    this.current = this.all.find((chat) => chat.id === storage.session.get("current")) ?? this.sorted()[0] ?? blank();
    storage.whenChangedElsewhere((key) => key.startsWith(KEY) && this.reload(key));
  }

  /** Newest first. */
  sorted() {
    return [...this.all].sort((a, b) => b.updated - a.updated);
  }

  open(chat) {
    this.current = chat;
    storage.session.set("current", chat.id);
    this.onChange();
  }

  /** An empty chat; it is kept, and listed, from its first message on. */
  create() {
    this.open(blank(this.current.system));
  }

  /** Keeps a chat after it changed. */
  save(chat) {
    chat.updated = Date.now();
    this.put(chat);
  }

  rename(chat, title) {
    chat.title = title.trim().slice(0, 120);
    this.put(chat);
    this.onChange();
  }

  /** Removes a chat; returns what brings it back. */
  remove(chat) {
    this.all = this.all.filter((other) => other !== chat);
    storage.remove(KEY + chat.id);
    if (this.current === chat) this.open(this.sorted()[0] ?? blank(chat.system));
    else this.onChange();
    return () => {
      this.put(chat);
      this.open(chat);
    };
  }

  has(chat) {
    return this.all.includes(chat);
  }

  put(chat) {
    if (!this.has(chat)) this.all.push(chat);
    storage.write(KEY + chat.id, chat);
  }

  reload(key) {
    const id = key.slice(KEY.length);
    const known = this.all.find((chat) => chat.id === id);
    if (known?.messages.some((message) => message.status === "streaming")) return; // this tab is writing it
    const fresh = revived(storage.read(key));
    this.all = this.all.filter((chat) => chat !== known);
    if (fresh) this.all.push(fresh);
    if (this.current === known) this.current = fresh ?? blank();
    this.onChange();
  }
}

function blank(system = "") {
  return { id: newId(), title: "", system, updated: Date.now(), messages: [] };
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function firstLine(chat) {
  const text = chat.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  return text.split("\n")[0].slice(0, 80);
}

/** A chat as read from storage, or undefined if it is not one. What is cut off mid-answer counts as stopped. */
function revived(chat) {
  if (typeof chat?.id !== "string" || !Array.isArray(chat.messages)) return undefined;
  const messages = chat.messages.filter(isMessage).map((message) => ({
    ...message,
    reasoning: typeof message.reasoning === "string" ? message.reasoning : "",
    status: STATUSES.includes(message.status) ? message.status : "stopped",
  }));
  return {
    id: chat.id,
    title: typeof chat.title === "string" ? chat.title : "",
    system: typeof chat.system === "string" ? chat.system : "",
    updated: Number.isFinite(chat.updated) ? chat.updated : 0,
    messages,
  };
}

function isMessage(message) {
  return ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
}
