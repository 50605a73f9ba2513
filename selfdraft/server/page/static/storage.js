// The browser's storage, made safe: it may be off, full, or hold rubbish, and the page works all the same.

const PREFIX = "selfdraft.";
let onFailure = () => {};

/** Calls `report` whenever something could not be kept. */
export function whenNotKept(report) {
  onFailure = report;
}

/** The value kept under `key`, or undefined. */
export function read(key) {
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? undefined : JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Keeps a value; returns whether that worked. */
export function write(key, value) {
  try {
    localStorage.setItem(PREFIX + key, JSON.stringify(value));
    return true;
  } catch {
    onFailure();
    return false;
  }
}

export function remove(key) {
  try {
    localStorage.removeItem(PREFIX + key);
  } catch {
    onFailure();
  }
}

/** Names of all keys that begin with `start`. */
export function keys(start) {
  try {
    const all = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + start));
    return all.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Calls `changed(key)` when another tab of this page keeps or removes something. */
export function whenChangedElsewhere(changed) {
  addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) changed(event.key.slice(PREFIX.length));
  });
}

/** Plain text kept for this tab only (the open chat, the API key). */
export const session = {
  get(key) {
    try {
      return sessionStorage.getItem(PREFIX + key);
    } catch {
      return null;
    }
  },
  set(key, text) {
    try {
      sessionStorage.setItem(PREFIX + key, text);
    } catch {
      // It holds until the page is reloaded, which is all that can be done.
    }
  },
};
