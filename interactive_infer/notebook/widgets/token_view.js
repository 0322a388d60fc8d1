// The text of one generation. Model text reaches the page as text nodes only.
// The protocol is described in token_view.py. Positions count code points, as in Python.

const ASK_AGAIN_MS = 2000;

function codePoints(text) {
  let count = text.length;
  for (let i = 0; i + 1 < text.length; i++) {
    const unit = text.charCodeAt(i);
    if (unit >= 0xd800 && unit < 0xdc00) {
      const next = text.charCodeAt(i + 1);
      if (next >= 0xdc00 && next < 0xe000) { count--; i++; }
    }
  }
  return count;
}

// Every line of text is a block of its own: adding to the last one lays out that line, not the whole text.
class Page {
  constructor(el) {
    el.classList.add("interactive-infer-token-view");
    this.lines = document.createElement("div");
    this.status = document.createElement("div");
    this.lines.className = "lines";
    this.status.className = "status";
    el.append(this.lines, this.status);
    this.newLine();
  }
  newLine() {
    const line = document.createElement("div");
    this.last = document.createTextNode("");
    line.append(this.last);
    this.lines.append(line);
  }
  append(text) {
    text.split("\n").forEach((part, index) => {
      if (index > 0) this.newLine();
      if (part) this.last.appendData(part);
    });
  }
}

// One closure a model: what has arrived is kept for every view of it, also those that come later.
export default () => {
  const pages = new Set();
  let text = "";
  let length = 0; // of text, in code points
  let wanted = 0; // how much there is known to be
  let status = "";
  let timer = null;

  function receive(start, more, newStatus, ask) {
    const end = start + codePoints(more);
    wanted = Math.max(wanted, end);
    if (start <= length && end > length) {
      const fresh = start === length ? more : Array.from(more).slice(length - start).join("");
      text += fresh;
      length = end;
      for (const page of pages) page.append(fresh);
    }
    if (status !== newStatus) {
      status = newStatus;
      for (const page of pages) page.status.textContent = status;
    }
    if (length < wanted && timer === null) ask();
  }

  return {
    initialize({ model }) {
      function ask() {
        model.send({ resend: length });
        timer = setTimeout(() => {
          timer = null;
          if (length < wanted) ask();
        }, ASK_AGAIN_MS);
      }
      const whole = () => receive(0, model.get("text"), model.get("status"), ask);
      const part = (message) => receive(message.start, message.text, message.status, ask);
      model.on("change:text", whole);
      model.on("msg:custom", part);
      whole();
      ask(); // for what came between the kernel's opening of this model and now
      return () => {
        clearTimeout(timer);
        model.off("change:text", whole);
        model.off("msg:custom", part);
      };
    },
    render({ el }) {
      const page = new Page(el);
      page.append(text);
      page.status.textContent = status;
      pages.add(page);
      return () => pages.delete(page);
    },
  };
};
