// The tokens of one generation: how they arrive (TokenStream) and how they look (Page).
// The protocol is described in stream.py. Tokens are numbered from 0.

const ASK_AGAIN_MS = 2000;
const HOVER_MS = 60;

// What has arrived. It is kept for every page, also those that come later.
class TokenStream {
  constructor(send) {
    this.send = (message) => { if (!this.gone && !this.retired) send(message); };
    this.pages = new Set();
    this.texts = [];
    this.micros = [];
    this.logprobs = [];
    this.details = new Map();
    this.steps = new Map(); // of a token, the step that made it, in words
    this.run = 0;
    this.count = 0; // how many tokens there are known to be
    this.status = "";
    this.state = "waiting";
    this.gone = false;
    this.retired = false;
    this.timer = null;
  }
  receive(message) {
    if (this.retired) return; // it was under way before
    if (this.gone) {
      this.gone = false;
      for (const page of this.pages) page.showState();
    }
    if ("detail" in message) {
      this.details.set(message.detail, message);
      for (const page of this.pages) page.explain(message.detail);
      return;
    }
    if ("made" in message) {
      this.steps.set(message.made, message.step);
      for (const page of this.pages) page.explain(message.made);
      return;
    }
    if (message.run < this.run) return;
    if (message.run > this.run) {
      this.run = message.run;
      this.keep(Math.min(message.keep, this.texts.length));
      this.count = 0;
    }
    this.count = Math.max(this.count, message.count);
    const { from, tokens = [] } = message;
    const skip = this.texts.length - from; // what is there already
    if (skip >= 0 && skip < tokens.length) {
      this.texts.push(...tokens.slice(skip));
      this.micros.push(...message.us.slice(skip));
      for (const page of this.pages) page.grow();
    }
    if (message.logprobs) {
      message.logprobs.forEach((value, index) => { this.logprobs[from + index] = value; });
      for (const page of this.pages) page.shade(from, from + message.logprobs.length);
    }
    if (message.status !== undefined && (message.status !== this.status || message.state !== this.state)) {
      this.status = message.status;
      this.state = message.state;
      for (const page of this.pages) page.showState();
    }
    if (this.texts.length < this.count && (this.timer === null || skip >= 0)) this.ask();
  }
  keep(length) {
    this.texts.length = this.micros.length = length;
    this.logprobs.length = Math.min(this.logprobs.length, length);
    this.details.clear();
    this.steps.clear();
    for (const page of this.pages) page.startAgain();
  }
  ask() {
    clearTimeout(this.timer);
    this.send({ resend: this.texts.length });
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.texts.length < this.count) this.ask();
    }, ASK_AGAIN_MS);
  }
  stop() {
    clearTimeout(this.timer);
  }
  // The kernel's side is gone: what is shown stays. Should it be heard again the buttons come back.
  lose() {
    this.gone = true;
    for (const page of this.pages) page.rest();
  }
  // The kernel's side no longer answers, for good; what is shown stays.
  retire({ text, status }) {
    this.stop();
    this.retired = true;
    if (this.texts.join("") !== text) {
      this.keep(0);
      this.texts.push(text);
      this.micros.push(null);
      for (const page of this.pages) page.grow();
    }
    this.count = this.texts.length;
    this.status = status;
    this.state = "finished";
    for (const page of this.pages) page.rest();
  }
  get words() {
    if (this.retired) return `${this.status} · retired: display it again for its buttons`;
    return this.gone && this.state !== "finished" ? `${this.status} · cut off: its kernel is gone` : this.status;
  }
}

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return `${value >= 0.1 || value === 0 ? value.toFixed(1) : value.toExponential(1)} %`;
};
const quoted = (text) => {
  const short = text.length > 60 ? `${text.slice(0, 60)}…` : text;
  return `“${shown(short).replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
};
const nameOf = (text, id) => (text === "" ? `token ${id}` : quoted(text));

// Lines of tokens, drawn one by one where they can be seen and as plain text where they cannot: a long text costs the
// page a node a line. A chunk ends at a line's end, or between words once it is long.
const CHUNK = { tokens: 400, characters: 6000, lines: 60 };

class Chunk {
  constructor(first) {
    this.first = first; // token
    this.lines = [[]]; // of [token, text]
    this.tokens = 0;
    this.characters = 0;
    this.node = make("div", { className: "chunk" });
    this.node.append(make("div", { className: "line" }));
    this.drawn = true;
    this.near = true; // what is in sight
  }
  isFull(factor) {
    return (
      this.tokens >= factor * CHUNK.tokens ||
      this.characters >= factor * CHUNK.characters ||
      this.lines.length >= factor * CHUNK.lines
    );
  }
  add(token, text, draw) {
    this.lines.at(-1).push([token, text]);
    this.tokens++;
    this.characters += text.length;
    if (this.drawn) this.node.lastChild.append(draw(token, text));
    else this.node.lastChild.append(shown(text));
  }
  newLine() {
    this.lines.push([]);
    this.node.append(make("div", { className: "line" }));
  }
  draw(inDetail, draw) {
    if (inDetail === this.drawn) return;
    this.drawn = inDetail;
    this.lines.forEach((line, index) => {
      const parts = inDetail
        ? line.map(([token, text]) => draw(token, text))
        : [shown(line.map(([, text]) => text).join(""))];
      this.node.children[index].replaceChildren(...parts);
    });
  }
  spans(token) {
    return [...this.node.querySelectorAll("span")].filter((span) => span.token === token);
  }
}

class Page {
  constructor(stream, { title, verbs }) {
    this.stream = stream;
    this.selected = null;
    this.shaded = false;
    this.root = rootOf("token-view");
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", title);
    const ask = (verb) => () => stream.send({ do: verb });
    this.buttons = Object.fromEntries(
      verbs.map((verb) => [verb, button(verb[0].toUpperCase() + verb.slice(1), ask(verb))]),
    );
    this.shadeButton = button("Shade", () => this.toggleShade());
    this.shadeButton.title = "Shade tokens by probability: the darker, the less likely";
    this.shadeButton.setAttribute("aria-pressed", "false");
    this.status = make("span", { className: "status" });
    this.said = make("span", { className: "unseen", role: "status" }); // changes of state, for screen readers
    this.bar = make("div", { className: "bar", role: "toolbar", "aria-label": "this generation" });
    this.bar.append(...Object.values(this.buttons), this.shadeButton, this.status, this.said);
    this.detail = make("div", { className: "detail", "aria-live": "polite", hidden: true });
    this.detail.id = newId();
    this.text = make("div", {
      className: "lines",
      tabIndex: 0,
      role: "region",
      "aria-label": "text; the arrow keys go from token to token",
      "aria-describedby": this.detail.id,
    });
    this.error = errorLine();
    this.root.append(this.text, this.detail, this.bar, this.error.node);
    this.span = (token, text) => {
      const span = make("span", { textContent: shown(text) });
      span.token = token;
      this.paint(span);
      return span;
    };
    this.near = new IntersectionObserver((entries) => this.scrolled(entries), {
      root: this.text,
      rootMargin: "800px 0px",
    });
    this.atEnd = true;
    this.text.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.text;
      this.atEnd = scrollHeight - scrollTop - clientHeight < 30;
      this.top = scrollTop;
    });
    this.root.addEventListener("moved", () => { // which has lost the place in the text
      this.text.scrollTop = this.atEnd ? this.text.scrollHeight : this.top;
    });
    this.text.addEventListener("pointerover", (event) => this.hovered(event));
    this.text.addEventListener("pointerleave", () => clearTimeout(this.hoverTimer));
    this.text.addEventListener("focus", () => {
      if (this.selected === null && this.stream.texts.length) this.select(0, false);
    });
    this.text.addEventListener("keydown", (event) => this.pressed(event));
    this.startAgain();
    this.showState();
  }

  // -- text

  startAgain() {
    this.near.disconnect();
    this.drawnTokens = 0;
    this.selected = null;
    this.detail.hidden = true;
    this.chunks = [];
    this.text.replaceChildren();
    this.addChunk();
    this.grow();
  }
  addChunk() {
    const before = this.chunks.at(-1);
    if (before !== undefined && !before.near && !this.holds(before, this.selected)) before.draw(false, this.span);
    const chunk = new Chunk(this.drawnTokens);
    chunk.node.chunk = chunk;
    this.chunks.push(chunk);
    this.text.append(chunk.node);
    this.near.observe(chunk.node);
    return chunk;
  }
  scrolled(entries) {
    for (const { target, isIntersecting } of entries) {
      const chunk = target.chunk;
      chunk.near = isIntersecting;
      if (chunk !== this.chunks.at(-1)) chunk.draw(isIntersecting || this.holds(chunk, this.selected), this.span);
    }
  }
  holds(chunk, token) {
    return token !== null && chunk === this.chunkOf(token);
  }
  grow() {
    const { texts } = this.stream;
    let chunk = this.chunks.at(-1);
    for (; this.drawnTokens < texts.length; this.drawnTokens++) {
      const token = this.drawnTokens;
      texts[token].split("\n").forEach((part, index) => {
        if (index > 0) {
          if (chunk.isFull(1)) chunk = this.addChunk();
          else chunk.newLine();
        } else if (chunk.isFull(2) && (/^\s/.test(part) || chunk.isFull(4))) {
          chunk = this.addChunk();
        }
        for (let at = 0; at < part.length; at += CHUNK.characters) {
          if (at > 0) chunk = this.addChunk(); // one token that is longer than a chunk
          chunk.add(token, part.slice(at, at + CHUNK.characters), this.span);
        }
      });
    }
    if (this.atEnd && !this.frame)
      this.frame = requestAnimationFrame(() => {
        this.frame = null;
        if (this.text.scrollHeight > this.text.clientHeight) this.text.scrollTop = this.text.scrollHeight;
      });
  }

  // -- state

  showState() {
    const { state, gone, retired } = this.stream;
    const status = shown(this.stream.words);
    if (this.status.textContent !== status) this.status.textContent = status;
    const news = retired ? "retired" : gone ? "its kernel is gone" : state;
    if (this.said.dataset.news === news) return;
    if (this.said.dataset.news) this.said.textContent = news;
    this.said.dataset.news = news;
    const can = {
      pause: state === "waiting" || state === "running",
      resume: state === "paused",
      cancel: state !== "finished",
      continue: state === "finished",
    };
    for (const [verb, node] of Object.entries(this.buttons)) enable(node, !gone && can[verb]);
    enable(this.shadeButton, !gone);
    for (const node of [...Object.values(this.buttons), this.shadeButton]) node.hidden = retired;
    this.root.dataset.state = state;
    if (state === "finished" && this.shaded && !gone) this.stream.send({ shade: true });
  }
  toggleShade() {
    this.shaded = !this.shaded;
    this.shadeButton.setAttribute("aria-pressed", String(this.shaded));
    if (this.shaded) this.stream.send({ shade: true });
    this.shade(0, this.stream.texts.length);
  }
  shade(from, to) {
    for (const chunk of this.chunks)
      if (chunk.drawn && chunk.first < to && chunk.first + chunk.tokens >= from)
        for (const span of chunk.node.querySelectorAll("span")) this.paint(span);
  }
  paint(span) {
    const logprob = this.stream.logprobs[span.token];
    const known = this.shaded && typeof logprob === "number";
    // One step for each halving or so of the probability: 100 % is 0, 0.1 % and less is 9.
    if (known) span.dataset.shade = String(Math.min(9, Math.round(-1.3 * logprob)));
    else delete span.dataset.shade;
    if (span.token === this.selected) span.className = "selected";
  }

  // -- one token

  hovered(event) {
    clearTimeout(this.hoverTimer);
    const { token } = event.target;
    if (token !== undefined) this.hoverTimer = setTimeout(() => this.select(token, false), HOVER_MS);
  }
  pressed(event) {
    const last = this.stream.texts.length - 1;
    if (last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const now = this.selected ?? -1;
    const target = {
      ArrowRight: Math.min(now + 1, last),
      ArrowLeft: Math.max(now - 1, 0),
      ArrowDown: Math.min(now + 10, last),
      ArrowUp: Math.max(now - 10, 0),
      Home: 0,
      End: last,
      Escape: null,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    this.select(target, true);
  }
  chunkOf(token) {
    let low = 0, high = this.chunks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.chunks[middle].first <= token) low = middle;
      else high = middle - 1;
    }
    return this.chunks[low];
  }
  select(token, scroll) {
    if (this.stream.retired) token = null;
    for (const span of this.text.querySelectorAll(".selected")) span.removeAttribute("class");
    this.selected = token;
    this.detail.hidden = token === null;
    if (token === null) return;
    const chunk = this.chunkOf(token);
    chunk.draw(true, this.span);
    const spans = chunk.spans(token);
    for (const span of spans) span.className = "selected";
    if (scroll && spans.length) spans[0].scrollIntoView({ block: "nearest" });
    if (!this.stream.details.has(token) || !this.stream.steps.has(token)) this.stream.send({ detail: token });
    this.explain(token);
  }
  explain(token) {
    if (token !== this.selected) return;
    const { texts, micros } = this.stream;
    const known = this.stream.details.get(token);
    const words = [`Token ${token + 1} of ${texts.length}`];
    const logprob = known?.logprob ?? this.stream.logprobs[token];
    if (typeof logprob === "number") words.push(percent(logprob));
    if (known?.rank != null) words.push(`rank ${known.rank}`);
    if (micros[token] != null)
      words.push(`${(micros[token] / 1000).toFixed(1)} ms ${token === 0 ? "from the call" : "after the one before"}`);
    if (known === undefined) words.push(`probability: ${this.stream.gone ? "its kernel is gone" : "asked for…"}`);
    else if (known.problem) words.push(known.problem);
    const head = make("div");
    head.append(make("bdi", { textContent: nameOf(texts[token] ?? "", known?.id ?? "") }), ` ${words.join(" · ")}`);
    const list = make("ol", { "aria-label": "most likely here" });
    for (const [id, text, logprob] of known?.alternatives ?? []) {
      const bar = make("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * Math.exp(logprob)).toFixed(1)}%`;
      const item = make("li", { className: id === known.id ? "chosen" : "" });
      const box = make("span", { className: "share" }, bar);
      item.append(box, make("bdi", { textContent: nameOf(text, id) }), ` ${percent(logprob)}`);
      list.append(item);
    }
    const step = make("div", { textContent: this.stream.steps.get(token) ?? "" });
    this.detail.replaceChildren(head, step, list);
  }
  rest() {
    clearTimeout(this.hoverTimer);
    if (this.stream.retired) {
      if (this.shaded) this.toggleShade();
      this.select(null);
    }
    this.showState();
  }
}
