// Pictures that go with the next message of a chat: chosen, pasted or dropped. They are sent within the request, so large ones are
// made smaller before that; the server does the same to what is left.

import { make } from "./dom.js";

const PIXELS = 1 << 20;
const BYTES = 1 << 20; // a smaller file goes as it is

export class Images {
  #urls = [];
  #most = 0;
  #sent;
  #refuse;
  #shown;
  #chooser;
  #added = Promise.resolve();

  // shown: where they are seen; chooser: an input for files; sent: how many a chat has before the next message, with which they
  // are sent again; refuse: told what can't be taken.
  constructor(shown, chooser, { sent, refuse }) {
    this.#shown = shown;
    this.#sent = sent;
    this.#chooser = chooser;
    this.#refuse = refuse;
    chooser.addEventListener("change", async () => {
      await this.add([...chooser.files]);
      chooser.value = ""; // so that the same file can be chosen again
    });
  }

  // How many the server takes with a request; 0: none.
  set most(count) {
    this.#most = count;
  }

  get most() {
    return this.#most;
  }

  get urls() {
    return [...this.#urls];
  }

  choose() {
    this.#chooser.click();
  }

  // Once all that were added are there, or refused: reading a large one takes a moment.
  get added() {
    return this.#added;
  }

  add(files) {
    this.#added = this.#added.then(() => this.#read(files));
    return this.#added;
  }

  async #read(files) {
    for (const file of files) {
      if (this.#sent() + this.#urls.length >= this.#most) {
        this.#refuse(`A chat has at most ${this.#most} image${this.#most === 1 ? "" : "s"} here.`);
        return;
      }
      try {
        const url = await read(file);
        this.put([...this.#urls, url]); // as they are now: some may have been removed meanwhile
      } catch {
        this.#refuse(`${file.name} is no image that this browser can read.`);
      }
    }
  }

  // These instead of what was there.
  put(urls) {
    this.#urls = urls;
    this.#shown.replaceChildren(
      ...urls.map((url, i) => {
        const button = make("button", { type: "button", title: "Remove it", ariaLabel: `Remove image ${i + 1}` }, picture(url, i));
        button.addEventListener("click", () => this.put(this.#urls.filter((_, other) => other !== i)));
        return button;
      }),
    );
    this.#shown.hidden = !urls.length;
  }

  // Those that go with a message; the next one has none.
  take() {
    const urls = this.urls;
    this.put([]);
    return urls;
  }
}

export function picture(url, i) {
  return make("img", { src: url, alt: `Image ${i + 1}` });
}

// What a message says, with its pictures before the text.
export function content(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// The same request with pictures so short that people can look at it.
export function shortened({ path, body }) {
  const short = (name, value) => (name === "url" && value.length > 60 ? `${value.slice(0, 40)}…` : value);
  return { path, body: JSON.parse(JSON.stringify(body), short) };
}

async function read(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, Math.sqrt(PIXELS / (bitmap.width * bitmap.height)));
  if (scale === 1 && file.size <= BYTES) return whole(file);
  const [width, height] = [bitmap.width, bitmap.height].map((length) => Math.max(1, Math.round(length * scale)));
  const canvas = make("canvas", { width, height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/webp", 0.9);
}

function whole(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
