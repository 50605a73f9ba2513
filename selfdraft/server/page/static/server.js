// What the server says about itself: loading, ready, or gone, and which models it has. Polled while the page is seen.

import { request } from "./api.js";

const RETRY = 2000;
const CHECK = 10000;

/** Calls `changed({phase, models})` with phase "ready", "loading" or "gone" whenever that changes. */
export function watchServer(changed) {
  let phase = "";
  let timer = 0;
  async function look() {
    clearTimeout(timer);
    const now = await currentPhase();
    if (now !== phase) {
      const models = now === "ready" ? await servedModels() : [];
      phase = now;
      changed({ phase, models });
    }
    timer = setTimeout(next, phase === "ready" ? CHECK : RETRY);
  }
  const next = () => document.visibilityState === "visible" && look();
  document.addEventListener("visibilitychange", next);
  look();
  return look;
}

async function currentPhase() {
  try {
    await request("/health", { mayAsk: false });
    return "ready";
  } catch (error) {
    if (error.status === 503) return "loading";
    return error.status === 0 ? "gone" : "ready"; // it answers, if only to ask for a key
  }
}

async function servedModels() {
  try {
    const { data } = await (await request("/v1/models")).json();
    return data;
  } catch {
    return [];
  }
}
