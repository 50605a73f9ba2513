// The dialog that asks for the server's API key. Only one is open at a time.

import { byId } from "./dom.js";

let open = null;

/** The key that was entered, or null. `wasWrong`: a key was sent and refused. */
export function askForKey(wasWrong) {
  open ??= ask(wasWrong).finally(() => (open = null));
  return open;
}

function ask(wasWrong) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-wrong").hidden = !wasWrong;
  input.value = "";
  return new Promise((resolve) => {
    let given = null;
    const form = byId("key-form");
    form.onsubmit = (event) => {
      event.preventDefault();
      given = input.value.trim() || null;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given);
    dialog.showModal();
  });
}
