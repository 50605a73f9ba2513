// The page put together: what each button and key does. Everything it knows is in the modules it imports.

import { Chats, titleOf } from "./chats.js";
import { announce, byId, fitHeight, onEnter } from "./dom.js";
import { Panel } from "./panel.js";
import { watchServer } from "./server.js";
import { showChats } from "./sidebar.js";
import { whenNotKept } from "./storage.js";
import { answer } from "./stream.js";
import { Conversation, notify } from "./view.js";

const SAVE_EVERY = 2000;

const input = byId("input");
const system = byId("system");
const modelSelect = byId("model");
const running = new Map(); // chat -> AbortController of its answer
let phase = "";

whenNotKept(() => notify("This browser cannot keep more: its storage is full or off. Deleting chats makes room."));
const panel = new Panel();
const conversation = new Conversation({ edit, regenerate });
const chats = new Chats(showCurrent);
const sidebar = { open: openChat, rename: (chat, title) => chats.rename(chat, title), remove: removeChat };

function showCurrent() {
  conversation.show(chats.current);
  system.value = chats.current.system;
  refresh();
}

/** Brings everything but the messages up to date. */
function refresh() {
  const busy = running.has(chats.current);
  showChats(chats, (chat) => running.has(chat), sidebar);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = phase !== "ready" || !input.value.trim();
  document.title = chats.current.messages.length ? `${titleOf(chats.current)} – Selfdraft` : "Selfdraft";
}

function openChat(chat) {
  chats.open(chat);
  byId("chats").hidePopover();
  input.focus();
}

function removeChat(chat) {
  stop(chat);
  const title = titleOf(chat);
  const undo = chats.remove(chat);
  notify(`Deleted “${title}”.`, { label: "Undo", run: undo });
}

function send() {
  const text = input.value.trim();
  if (!text || phase !== "ready" || running.has(chats.current)) return;
  input.value = "";
  fitHeight(input);
  say(chats.current, text);
}

function say(chat, text) {
  chat.messages.push({ role: "user", content: text, status: "done" });
  reply(chat);
}

async function reply(chat) {
  const message = { role: "assistant", content: "", reasoning: "", status: "streaming" };
  const controller = new AbortController();
  chat.messages.push(message);
  running.set(chat, controller);
  chats.save(chat);
  showCurrent();
  announce("Answering");
  await answer(chat, message, { model: modelSelect.value, ...panel.options() }, controller.signal, () => {
    conversation.update(message);
    if (Date.now() - chat.updated > SAVE_EVERY) keep(chat);
  });
  if (running.get(chat) === controller) running.delete(chat);
  keep(chat);
  refresh();
  await conversation.finish(message);
  if (message.status === "failed") lookAtServer();
}

/** Saves a chat that was not deleted meanwhile. */
function keep(chat) {
  if (chats.has(chat)) chats.save(chat);
}

function stop(chat) {
  running.get(chat)?.abort();
  running.delete(chat);
}

function edit(message, text) {
  cutBefore(message);
  say(chats.current, text);
  input.focus();
}

function regenerate(message) {
  cutBefore(message);
  reply(chats.current);
  input.focus();
}

function cutBefore(message) {
  const chat = chats.current;
  stop(chat);
  chat.messages.splice(chat.messages.indexOf(message));
}

function serverChanged({ phase: now, models }) {
  phase = now;
  byId("server-loading").hidden = now !== "loading";
  byId("server-gone").hidden = now !== "gone";
  if (now === "ready") showModels(models);
  refresh();
}

function showModels(models) {
  const chosen = modelSelect.value;
  const names = models.map(({ id }) => id).filter(Boolean);
  modelSelect.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) modelSelect.value = chosen;
  modelSelect.hidden = names.length < 2;
  byId("model-name").hidden = names.length > 1;
  byId("model-name").textContent = names[0] ?? "";
  const limits = () => panel.setMaxDepth(models.find(({ id }) => id === modelSelect.value)?.max_depth);
  modelSelect.onchange = limits;
  limits();
}

function toggleTheme() {
  const root = document.documentElement;
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  root.dataset.theme = theme;
  try {
    localStorage.setItem("selfdraft.theme", theme); // as plain text: theme.js reads it
  } catch {
    // It holds until the page is reloaded.
  }
}

function escapePressed(event) {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.querySelector("dialog[open], :popover-open")) return; // Escape closes that first
  stopCurrent();
}

function stopCurrent() {
  stop(chats.current);
  refresh();
  input.focus();
}

onEnter(input, send);
input.addEventListener("input", () => {
  fitHeight(input);
  refresh();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stopCurrent);
byId("theme").addEventListener("click", toggleTheme);
byId("new-chat").addEventListener("click", () => {
  chats.create();
  byId("chats").hidePopover();
  input.focus();
});
system.addEventListener("change", () => {
  chats.current.system = system.value;
  keep(chats.current);
});
document.addEventListener("keydown", escapePressed);
matchMedia("(min-width: 800px)").addEventListener("change", () => byId("chats").hidePopover());
addEventListener("pagehide", () => [...running.keys()].forEach(keep));

showCurrent();
input.focus();
const lookAtServer = watchServer(serverChanged);
