// Images that the next message will show: chosen, pasted or dropped, seen as thumbnails, and taken back.

import { byId, el, iconButton } from "./dom.js";
import { keepPicture } from "./pictures.js";
import { notify } from "./view.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST = 20 * 2 ** 20; // bytes of a file, as the server's own default

export class Attachments {
  /** `onChange()` is called whenever an image comes or goes. */
  constructor(onChange) {
    this.onChange = onChange;
    this.images = []; // {name, url}
    this.allowed = false;
    const chooser = byId("files");
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.add(chooser.files);
      chooser.value = ""; // so that the same file can be chosen again
    });
    byId("input").addEventListener("paste", (event) => this.pasted(event));
    const page = byId("main");
    page.addEventListener("dragover", (event) => this.dragged(event));
    page.addEventListener("dragleave", () => page.classList.remove("dropping"));
    page.addEventListener("drop", (event) => this.dropped(event));
  }

  /** Whether the model reads images. */
  allow(vision) {
    this.allowed = vision;
    byId("attach").hidden = !vision;
  }

  /** Keeps the images and lets them go: what a message says of them. */
  async take() {
    const taken = this.images;
    this.images = [];
    this.show();
    return Promise.all(taken.map(async ({ name, url }) => ({ id: await keepPicture(url), name })));
  }

  async add(files) {
    if (!this.allowed) return notify("This model reads text only.");
    for (const file of [...files]) {
      const refusal = refusalOf(file);
      const url = refusal ? undefined : await imageUrl(file);
      if (url) this.images.push({ name: file.name, url });
      else notify(refusal ?? `${file.name} cannot be read.`);
    }
    this.show();
    byId("input").focus();
  }

  show() {
    byId("attached").replaceChildren(...this.images.map((image) => this.thumbnail(image)));
    byId("attached").hidden = this.images.length === 0;
    this.onChange();
  }

  thumbnail(image) {
    const remove = () => {
      this.images = this.images.filter((other) => other !== image);
      this.show();
      byId("input").focus();
    };
    const picture = el("img", { src: image.url, alt: image.name, title: image.name });
    return el("li", {}, picture, iconButton("cross", `Remove ${image.name}`, remove, "small"));
  }

  /** A table or a text is copied with a picture of itself: then the text is meant. */
  pasted(event) {
    const { files, types } = event.clipboardData;
    if (files.length === 0 || types.includes("text/plain")) return;
    event.preventDefault();
    this.add(files);
  }

  /** Taken even where images are not read, or the browser would leave the page for the file. */
  dragged(event) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    byId("main").classList.toggle("dropping", this.allowed);
  }

  dropped(event) {
    byId("main").classList.remove("dropping");
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    this.add(event.dataTransfer.files);
  }
}

function refusalOf(file) {
  if (!TYPES.includes(file.type)) return `${file.name} is no image that is read here: PNG, JPEG, WebP, GIF and BMP are.`;
  return file.size > MOST ? `${file.name} has more than 20 MiB: make it smaller.` : undefined;
}

/** The file as a data: URL, or undefined if it cannot be read, or shows nothing. */
async function imageUrl(file) {
  try {
    const url = await dataUrl(file);
    await el("img", { src: url }).decode();
    return url;
  } catch {
    return undefined;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
