// One answer from the server, piece by piece. Knows the wire (server-sent events, OpenAI's chunks), not the page.

import { request, ServerError } from "./api.js";
import { pictureOf } from "./pictures.js";

/**
 * Asks for an answer to `chat` and writes it into `message` as it comes; calls `changed` after each piece.
 * Never throws: what went wrong is in `message.status` and `message.error`.
 */
export async function answer(chat, message, options, signal, changed) {
  try {
    const response = await request("/v1/chat/completions", { body: await bodyFor(chat, message, options), signal });
    await readInto(message, response, changed);
    message.status = "done";
  } catch (error) {
    fail(message, error, signal);
  }
  endThinking(message);
  changed();
}

async function bodyFor(chat, message, options) {
  const before = chat.messages.slice(0, chat.messages.indexOf(message)).filter(({ role, content }) => role === "user" || content);
  const said = await Promise.all(
    before.map(async ({ role, content, images, reasoning }) => ({
      role,
      content: images?.length ? await withImages(images, content) : content,
      ...(reasoning && { reasoning_content: reasoning }),
    })),
  );
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  return {
    ...options,
    messages: [...system, ...said],
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
  };
}

/** Images, those that are still there, and then the text. */
async function withImages(images, text) {
  const urls = (await Promise.all(images.map(({ id }) => pictureOf(id)))).filter(Boolean);
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text || !parts.length ? [...parts, { type: "text", text }] : parts;
}

async function readInto(message, response, changed) {
  let finished = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = parsed(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer failed.", 500);
    if (chunk.timings) message.timings = chunk.timings;
    if (chunk.usage) message.usage = chunk.usage;
    for (const { delta, finish_reason: reason } of chunk.choices ?? []) {
      add(message, delta ?? {});
      if (reason) message.reason = reason;
      finished ||= Boolean(reason);
    }
    changed();
  }
  if (!finished) throw new ServerError("The connection ended before the answer did.", 0);
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError("The server sent something that is not JSON.", 500);
  }
}

function add(message, delta) {
  if (delta.reasoning_content) {
    message.thinkingSince ??= Date.now();
    message.reasoning += delta.reasoning_content;
  }
  if (delta.content) {
    endThinking(message);
    message.content += delta.content;
  }
}

function endThinking(message) {
  if (!message.thinkingSince) return;
  message.thoughtMs = (message.thoughtMs ?? 0) + Date.now() - message.thinkingSince;
  delete message.thinkingSince;
}

function fail(message, error, signal) {
  if (signal.aborted) {
    message.status = "stopped";
    return;
  }
  // The body of a response breaks off with a TypeError, which says nothing to a reader.
  const known = error instanceof ServerError ? error : new ServerError("The connection broke during the answer.", 0);
  message.status = "failed";
  message.error = { message: known.message, remedy: known.remedy, status: known.status };
}

/** The data of each server-sent event; comments and other fields are skipped. */
async function* events(body) {
  let rest = "";
  let data = [];
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
    if (done) return;
  }
}
