// The chats: what is said in them, and keeping them in this browser, each under a key of its own.

import * as storage from "./storage.js";

const KEY = "chat.";
const STATUSES = ["done", "stopped", "failed"];

export const titleOf = (chat) => chat.title || firstLine(chat) || "New chat";

/** Whether its last answer is still being written, in this tab or in another. */
export const isAnswering = (chat) => chat.messages.at(-1)?.status === "streaming";

export class Chats {
  /** `isMine(chat)`: this tab is writing it, so what another tab keeps of it does not count. */
  constructor(onChange, isMine) {
    this.onChange = onChange;
    this.isMine = isMine;
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

  /** Ids of all pictures that are shown in them. */
  pictures() {
    return new Set(this.all.flatMap((chat) => chat.messages.flatMap(({ images }) => (images ?? []).map(({ id }) => id))));
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
    if (known && this.isMine(known)) return;
    const fresh = revived(storage.read(key), "streaming"); // another tab lives and writes
    if (fresh && known) fresh.messages = fresh.messages.map((message, index) => sameOr(known.messages[index], message));
    this.all = this.all.filter((chat) => chat !== known);
    if (fresh) this.all.push(fresh);
    if (this.current === known) this.current = fresh ?? blank();
    this.onChange();
  }
}

function blank(system = "") {
  return { id: newId(), title: "", system, updated: Date.now(), messages: [] };
}

/** An id that nothing else has. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function firstLine(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  const text = first?.content.trim() || first?.images?.[0]?.name || "";
  return text.split("\n")[0].slice(0, 80);
}

/** The message we have, if the other tab's is no other or goes on from it: what shows it on the page stays in place. */
function sameOr(ours, theirs) {
  const grown = ours?.status === "streaming" && theirs.role === ours.role && theirs.content.startsWith(ours.content);
  if (grown) return Object.assign(ours, { thinkingSince: undefined }, theirs);
  return JSON.stringify(ours) === JSON.stringify(theirs) ? ours : theirs;
}

/** A chat as read from storage, or undefined if it is not one. `cutOff` is the status of an answer without an end. */
function revived(chat, cutOff = "stopped") {
  if (typeof chat?.id !== "string" || !Array.isArray(chat.messages)) return undefined;
  const messages = chat.messages.filter(isMessage).map((message) => ({
    ...message,
    reasoning: typeof message.reasoning === "string" ? message.reasoning : "",
    images: Array.isArray(message.images) ? message.images.filter(isImage) : undefined,
    status: STATUSES.includes(message.status) ? message.status : cutOff,
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

function isImage(image) {
  return typeof image?.id === "string" && typeof image.name === "string";
}
