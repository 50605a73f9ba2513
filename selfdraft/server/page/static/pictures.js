// Pictures of the chats, kept in this browser: they are too large for the storage that holds the text.

import { newId } from "./chats.js";

const STORE = "pictures";
const here = new Map(); // id -> data: URL, of those that this page has seen

/** Keeps a picture, given as a data: URL; returns its id. Where nothing can be kept it lasts until the page is left. */
export async function keepPicture(url) {
  const id = newId();
  here.set(id, url);
  await inStore("readwrite", (store) => store.put(url, id));
  return id;
}

/** The data: URL of a picture, or undefined if this browser has it no more. */
export async function pictureOf(id) {
  if (!here.has(id)) {
    const url = await inStore("readonly", (store) => store.get(id));
    if (typeof url === "string" && url.startsWith("data:image/")) here.set(id, url);
  }
  return here.get(id);
}

/** Forgets all pictures but those with these ids. */
export async function keepOnly(ids) {
  const known = (await inStore("readonly", (store) => store.getAllKeys())) ?? [];
  const lost = known.filter((id) => !ids.has(id));
  if (lost.length) await inStore("readwrite", (store) => lost.map((id) => store.delete(id)).at(-1));
}

/** The result of a request to the store, or undefined where there is none. */
async function inStore(mode, ask) {
  try {
    const database = await opened();
    const result = await done(ask(database.transaction(STORE, mode).objectStore(STORE)));
    database.close();
    return result;
  } catch {
    return undefined;
  }
}

function opened() {
  const request = indexedDB.open("selfdraft", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE);
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
