// Requests to the server that serves this page, with its API key, and what its refusals mean.

import { askForKey } from "./key.js";
import { session } from "./storage.js";

let key = session.get("key") || null;

export const hasKey = () => key !== null;

/** A refusal or a failure, in words for the person who reads the page. `status` is 0 if there was no answer. */
export class ServerError extends Error {
  constructor(message, status = 0, remedy = remedyFor(status)) {
    super(message);
    this.status = status;
    this.remedy = remedy;
  }
}

/**
 * A response with a good status. Asks for the API key when the server wants one.
 * Throws ServerError, or AbortError if `signal` was used.
 */
export async function request(path, { body, signal, mayAsk = true } = {}) {
  for (;;) {
    const sent = key;
    const response = await send(path, body, signal, sent);
    if (response.status !== 401) return checked(response);
    if (key !== sent) continue; // given meanwhile, for another request
    const given = mayAsk ? await askForKey(sent !== null) : null;
    if (mayAsk) {
      key = given; // a refused one is forgotten
      session.set("key", key ?? "");
    }
    if (given === null) throw new ServerError("The server asks for an API key.", 401);
  }
}

async function send(path, body, signal, apiKey) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(apiKey && { Authorization: `Bearer ${apiKey}` }) };
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  let tooLong = false;
  try {
    const { error } = await response.json();
    message = error?.message ?? message;
    tooLong = error?.code === "context_length_exceeded";
  } catch {
    // The status alone has to do.
  }
  const wait = Number(response.headers.get("Retry-After"));
  const remedy = tooLong ? remedyFor(413) : wait > 0 ? `Try again in ${wait} seconds.` : undefined;
  throw new ServerError(message, response.status, remedy);
}

function remedyFor(status) {
  if (status === 0) return "If the server is down, start it with “selfdraft serve”. Then retry.";
  if (status === 401) return "Retry to enter the key the server was started with.";
  if (status === 413 || status === 507) return "Shorten the message, or start a new chat.";
  if (status === 429) return "The server is busy. Try again in a moment.";
  if (status === 503) return "The server is still loading its model. Try again when it is ready.";
  if (status >= 500) return "The server's log says more.";
  return "Change the message or the settings, then retry.";
}

/** Markdown as HTML that is safe to show. */
export async function renderMarkdown(text) {
  const wellFormed = text.toWellFormed?.() ?? text;
  const response = await request("/page/render", { body: { text: wellFormed }, mayAsk: false });
  return (await response.json()).html;
}
