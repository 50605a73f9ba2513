// What the server says about itself: loading, ready, failed or gone, and its models. Polled while the page is seen.

import { hasKey, request } from "./api.js";

const RETRY = 2000;
const CHECK = 10000;
const PHASES = { ok: "ready", loading: "loading", failed: "failed" }; // one that is stopping is as good as gone

/**
 * Calls `changed({phase, reason, models})` with phase "ready", "loading", "failed" (with a reason) or "gone" whenever
 * that changes, and when the models come to be known: a server with a key tells them only when it has been given.
 * Returns a function that looks now, and with true asks for the models anew, and for the key if they need one.
 */
export function watchServer(changed) {
  let phase = "";
  let models = [];
  let timer = 0;
  async function look(anew = false) {
    const now = await currentPhase();
    const isNew = now.phase !== phase;
    const wanted = now.phase === "ready" && (isNew || anew || (models.length === 0 && hasKey()));
    if (isNew || wanted) {
      models = wanted ? await servedModels() : [];
      phase = now.phase;
      changed({ ...now, models });
    }
    clearTimeout(timer); // two looks at once must not leave two timers
    timer = setTimeout(next, phase === "ready" ? CHECK : RETRY);
  }
  const next = () => document.visibilityState === "visible" && look();
  document.addEventListener("visibilitychange", next);
  look();
  return look;
}

async function currentPhase() {
  try {
    const { status, error } = await (await fetch("/health")).json();
    return { phase: PHASES[status] ?? "gone", reason: error };
  } catch {
    return { phase: "gone" };
  }
}

async function servedModels() {
  try {
    const { data } = await (await request("/v1/models")).json();
    return data.filter(({ type = "model" }) => type === "model"); // others embed or rank
  } catch {
    return [];
  }
}
