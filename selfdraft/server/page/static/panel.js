// The settings: sampling, drafting, thinking. An empty field is not sent, so the model's own default holds.

import { byId, el } from "./dom.js";
import { read, write } from "./storage.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", hint: "0 always takes the likeliest token", min: 0, max: 100, step: "any" },
  { name: "top_p", label: "Top p", hint: "up to 1, which is off", min: 0.001, max: 1, step: "any" },
  { name: "top_k", label: "Top k", hint: "0 is off", min: 0, step: 1 },
  { name: "min_p", label: "Min p", hint: "0 is off", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 is off", min: 0.01, max: 10, step: "any" },
  { name: "max_tokens", label: "Longest answer", hint: "in tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", hint: "same seed, same answer", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, empty: "random" },
  { name: "depth", label: "Draft depth", hint: "tokens drafted a cycle; 0 is off", min: 0, step: 1, empty: "auto" },
];
const THINKING = { "": "default", true: "on", false: "off" };

export class Panel {
  constructor() {
    const kept = read("settings");
    this.values = kept !== null && typeof kept === "object" ? kept : {};
    this.inputs = new Map(FIELDS.map((field) => [field.name, this.input(field)]));
    this.thinking = this.thinkingSelect();
    byId("reset-settings").addEventListener("click", () => this.reset());
  }

  /** The fields of a request that these settings ask for. */
  options() {
    const options = {};
    for (const [name, input] of this.inputs) {
      if (input.value !== "" && input.validity.valid) options[name] = input.valueAsNumber;
    }
    options.depth ??= "auto";
    if (this.thinking.value) options.enable_thinking = this.thinking.value === "true";
    return options;
  }

  /** The deepest draft of the model that is served. */
  setMaxDepth(depth) {
    const input = this.inputs.get("depth");
    if (Number.isInteger(depth)) input.max = depth;
    else input.removeAttribute("max");
    this.check(input);
  }

  input(field) {
    const { name, label, hint, min, max, step, empty = "default" } = field;
    const value = Number.isFinite(this.values[name]) ? this.values[name] : "";
    const id = `set-${name}`;
    const input = el("input", { id, type: "number", min, max, step, value, placeholder: empty, "aria-describedby": `${id}-hint` });
    input.inputMode = step === 1 ? "numeric" : "decimal";
    input.addEventListener("input", () => {
      this.check(input);
      if (input.validity.valid) this.keep(name, input.value === "" ? undefined : input.valueAsNumber);
    });
    byId("sampling").append(row(id, label, hint, input));
    return input;
  }

  thinkingSelect() {
    const options = Object.entries(THINKING).map(([value, text]) => el("option", { value }, text));
    const select = el("select", { id: "set-thinking", "aria-describedby": "set-thinking-hint" }, ...options);
    select.value = String(this.values.enable_thinking ?? "");
    if (select.selectedIndex < 0) select.value = "";
    select.addEventListener("change", () => this.keep("enable_thinking", select.value ? select.value === "true" : undefined));
    byId("sampling").append(row("set-thinking", "Thinking", "for models that can", select));
    return select;
  }

  /** A value out of range is not sent; its row says so. */
  check(input) {
    const valid = input.validity.valid;
    input.setAttribute("aria-invalid", String(!valid));
    byId(`${input.id}-hint`).textContent = valid ? input.dataset.hint : `Not used: ${input.validationMessage}`;
  }

  keep(name, value) {
    this.values[name] = value;
    write("settings", this.values);
  }

  reset() {
    for (const input of this.inputs.values()) {
      input.value = "";
      this.check(input);
    }
    this.thinking.value = "";
    this.values = {};
    write("settings", this.values);
  }
}

function row(id, label, hint, control) {
  control.dataset.hint = hint;
  const words = el("div", {}, el("label", { htmlFor: id }, label), el("small", { id: `${id}-hint` }, hint));
  return el("div", { className: "setting" }, words, control);
}
