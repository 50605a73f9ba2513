// The page put together: what each button and key does. Everything it knows is in the modules it imports.

import { Attachments } from "./attach.js";
import { Chats, isAnswering, titleOf } from "./chats.js";
import { announce, byId, fitHeight, onEnter } from "./dom.js";
import { Panel } from "./panel.js";
import { keepOnly } from "./pictures.js";
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
let chosen; // the model that answers, as the server describes it

whenNotKept(() => notify("This browser cannot keep more: its storage is full or off. Deleting chats makes room."));
const panel = new Panel();
const attachments = new Attachments(refresh);
const conversation = new Conversation({ edit, regenerate });
const chats = new Chats(showCurrent, (chat) => running.has(chat));
const sidebar = { open: openChat, rename: (chat, title) => chats.rename(chat, title), remove: removeChat };

function showCurrent() {
  conversation.show(chats.current);
  system.value = chats.current.system;
  refresh();
}

/** Brings everything but the messages up to date. */
function refresh() {
  const busy = running.has(chats.current);
  showChats(chats, sidebar);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = !isSendable();
  document.title = chats.current.messages.length ? `${titleOf(chats.current)} – Selfdraft` : "Selfdraft";
}

function isSendable() {
  return phase === "ready" && Boolean(input.value.trim() || attachments.images.length);
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

async function send() {
  const text = input.value.trim();
  if (!isSendable() || running.has(chats.current) || isTaken(chats.current)) return;
  if (!modelSelect.value) await lookAtServer(true);
  if (!modelSelect.value) return notify("The server names its model only to those who give its API key.");
  const chat = chats.current;
  input.value = "";
  fitHeight(input);
  say(chat, text, await attachments.take());
}

/** Two tabs that write one chat would each lose what the other wrote. */
function isTaken(chat) {
  const taken = isAnswering(chat) && !running.has(chat);
  if (taken) notify("Another tab is answering in this chat. Stop it there; if that tab is gone, reload this page.");
  return taken;
}

function say(chat, text, images = []) {
  chat.messages.push({ role: "user", content: text, status: "done", ...(images.length && { images }) });
  reply(chat);
}

async function reply(chat) {
  const message = { role: "assistant", content: "", reasoning: "", status: "streaming" };
  const controller = new AbortController();
  chat.messages.push(message);
  running.set(chat, controller);
  chats.save(chat);
  showCurrent();
  conversation.toEnd();
  announce("Answering");
  await answer(chat, message, { model: modelSelect.value, ...panel.options() }, controller.signal, () => {
    conversation.update(message);
    if (Date.now() - chat.updated > SAVE_EVERY) keep(chat);
  });
  if (running.get(chat) === controller) running.delete(chat);
  keep(chat);
  refresh();
  await conversation.finish(message);
  if (message.status === "failed" || !isKnown(chosen)) lookAtServer(!isKnown(chosen));
}

/** Saves a chat that was not deleted meanwhile. */
function keep(chat) {
  if (chats.has(chat)) chats.save(chat);
}

function stop(chat) {
  running.get(chat)?.abort();
  running.delete(chat);
}

function edit(message, text, images) {
  if (isTaken(chats.current)) return;
  cutBefore(message);
  say(chats.current, text, images);
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

function serverChanged({ phase: now, reason, models }) {
  phase = now;
  byId("server-failed").hidden = now !== "failed";
  byId("server-failed").textContent = `The model is not there: ${reason ?? "the server's log says why"}. Start the server again.`;
  byId("server-loading").hidden = now !== "loading";
  byId("server-gone").hidden = now !== "gone";
  if (now === "ready") showModels(models);
  refresh();
}

function showModels(models) {
  const before = modelSelect.value;
  const names = models.map(({ id }) => id).filter(Boolean);
  modelSelect.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) modelSelect.value = before;
  modelSelect.hidden = names.length < 2;
  byId("model-name").hidden = names.length > 1;
  byId("model-name").textContent = names[0] ?? "";
  const limits = () => {
    chosen = models.find(({ id }) => id === modelSelect.value);
    panel.setMaxDepth(chosen?.max_depth);
    attachments.allow(Boolean(chosen) && (!isKnown(chosen) || chosen.architecture.input_modalities.includes("image")));
  };
  modelSelect.onchange = limits;
  limits();
}

/** What a model reads is told once it was loaded; until then it is given what it is sent. */
function isKnown(model) {
  return Boolean(model?.architecture);
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
system.addEventListener("input", () => (chats.current.system = system.value));
system.addEventListener("change", () => keep(chats.current));
document.addEventListener("keydown", escapePressed);
matchMedia("(min-width: 800px)").addEventListener("change", () => byId("chats").hidePopover());
addEventListener("pagehide", () => {
  for (const [chat, controller] of running) {
    controller.abort(); // or the connection that ends with the page would count as a failure
    chat.messages.at(-1).status = "stopped";
    keep(chat);
  }
});

showCurrent();
keepOnly(chats.pictures());
input.focus();
const lookAtServer = watchServer(serverChanged);
