// The list of chats: open, rename, delete.

import { byId, el, iconButton, onEnter } from "./dom.js";
import { isAnswering, titleOf } from "./chats.js";

/** Draws the list. `actions` is {open, rename, remove}, each with a chat. */
export function showChats(chats, actions) {
  const items = chats.sorted().map((chat) => item(chat, chat === chats.current, actions));
  byId("chat-list").replaceChildren(...items);
  byId("no-chats").hidden = items.length > 0;
}

function item(chat, isCurrent, actions) {
  const title = titleOf(chat);
  const open = el(
    "button",
    { type: "button", className: "chat-open", title, onclick: () => actions.open(chat), ...(isCurrent && { "aria-current": "true" }) },
    el("span", { className: "chat-title", dir: "auto" }, title),
  );
  if (isAnswering(chat)) open.append(el("span", { className: "dot", role: "img", "aria-label": "answering" }));
  const row = el("li", { className: "chat" }, open);
  row.append(
    iconButton("pencil", `Rename ${title}`, () => rename(row, chat, title, actions), "small"),
    iconButton("trash", `Delete ${title}`, () => actions.remove(chat), "small"),
  );
  return row;
}

function rename(row, chat, title, actions) {
  const input = el("input", { value: title, maxLength: 120, "aria-label": "Name of the chat" });
  const before = [...row.children];
  let over = false;
  const finish = (keep) => {
    if (over) return;
    over = true;
    row.replaceChildren(...before);
    if (keep && input.value !== title) actions.rename(chat, input.value);
    else before[1].focus();
  };
  onEnter(input, () => finish(true));
  input.addEventListener("blur", () => finish(true));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // or the drawer closes on a phone
    event.stopPropagation();
    finish(false);
  });
  row.replaceChildren(input);
  input.select();
}
