// Prompts, parameters, samples side by side, history. One closure a model.
export default () => {
  const boards = new Set();
  const streams = new Map(); // of the run that is shown, by key
  let model, sight, commons, places;
  let run = null; // the number of the run that is shown
  let running = false;
  let chatting = false;
  let draft = "";
  let conversation = []; // what was said before the answer that is shown
  let chosen = null; // the key of the sample whose answer the conversation goes on from

  class Board {
    constructor() {
      const root = (this.root = rootOf("playground"));
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", `playground of ${model.get("title")}`);
      this.prompt = make("textarea", { className: "prompt", rows: 4 });
      this.prompt.addEventListener("input", () => { draft = this.prompt.value; });
      this.prompt.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey || event.shiftKey)) {
          event.preventDefault();
          this.start();
        }
      });
      this.said = make("div", { role: "log", "aria-label": "conversation" });
      this.form = new ParameterForm(model.get("fields"), model.get("values"), () => {});
      this.samples = make("input", { type: "number", min: "1", max: "16", step: "1", value: "1" });
      this.mode = make("select", { "aria-label": "prompt or chat" });
      this.mode.append(make("option", { value: "prompt", textContent: "Prompt" }));
      this.mode.append(make("option", { value: "chat", textContent: "Chat" }));
      this.mode.hidden = !model.get("can_chat");
      this.mode.addEventListener("change", () => {
        chatting = this.mode.value === "chat";
        for (const board of boards) board.show();
      });
      this.run = button("Run", () => this.start());
      this.run.title = "Shift or Ctrl and Enter";
      this.stop = button("Stop all", () => model.send({ stop: true }));
      this.again = button("New conversation", () => {
        conversation = [];
        chosen = null;
        forget();
        for (const board of boards) board.show();
      });
      this.toCode = button("To code", () => run !== null && model.send({ code: run }));
      const samples = make("label", { textContent: "samples " });
      samples.append(this.samples);
      const bar = make("div", { className: "bar" });
      bar.append(this.mode, this.run, this.stop, this.again, this.toCode, samples);
      const parameters = make("details", {}, make("summary", { textContent: "Parameters" }), this.form.node);
      this.error = errorLine();
      this.code = make("pre", { className: "code", tabIndex: 0, hidden: true, "aria-label": "code" });
      this.answers = make("div", { className: "samples" });
      this.history = make("ol", { "aria-label": "runs" });
      const before = make("details", {}, make("summary", { textContent: "History" }), this.history);
      root.append(this.said, this.prompt, bar, parameters, this.form.problem, this.error.node, this.code,
        this.answers, before);
      // What is saved is brought up to date when nobody is at it: a new output takes the focus away.
      root.addEventListener("focusout", (event) => {
        if (!root.contains(event.relatedTarget)) setTimeout(renewIfQuiet, 300);
      });
      this.show();
      this.drawAnswers();
      this.showHistory();
    }
    start() {
      const text = this.prompt.value;
      const asked = { params: this.form.values, samples: Number(this.samples.value) };
      this.error.node.hidden = this.form.problem.hidden = true;
      this.form.accept();
      if (chatting) asked.chat = [...conversation, ...answer(), { role: "user", content: text }];
      else asked.prompt = text;
      model.send({ run: asked });
    }
    show() {
      if (this.prompt.value !== draft) this.prompt.value = draft;
      this.mode.value = chatting ? "chat" : "prompt";
      this.prompt.setAttribute("aria-label", chatting ? "message" : "prompt");
      this.prompt.placeholder = chatting ? "Say something (Shift+Enter sends)" : "A prompt (Shift+Enter runs)";
      this.run.textContent = chatting ? "Send" : "Run";
      this.again.hidden = !chatting;
      this.said.hidden = !chatting;
      this.said.replaceChildren(
        ...(chatting ? conversation : []).map(({ role, content }) =>
          make("div", { className: "line" }, make("b", { textContent: `${role}: ` }), shown(content)),
        ),
      );
      enable(this.stop, running);
      enable(this.toCode, run !== null);
    }
    drawAnswers() {
      for (const page of this.pages ?? []) page.stream.pages.delete(page);
      this.pages = [];
      this.answers.replaceChildren();
      for (const [key, stream] of streams) {
        const place = this.pages.length + 1;
        const page = new Page(stream, { title: `sample ${place}`, verbs: ["pause", "resume", "cancel"] });
        stream.pages.add(page);
        this.pages.push(page);
        const cell = make("div", {}, page.root);
        if (chatting && streams.size > 1) {
          const choose = button("Go on from this answer", () => {
            chosen = key;
            for (const board of boards) board.markChosen();
          });
          choose.dataset.key = key;
          page.bar.append(choose);
        }
        this.answers.append(cell);
      }
      this.markChosen();
    }
    markChosen() {
      for (const node of this.answers.querySelectorAll("button[data-key]"))
        node.setAttribute("aria-pressed", String(node.dataset.key === (chosen ?? streams.keys().next().value)));
    }
    showHistory() {
      this.history.replaceChildren(
        ...[...model.get("history")].reverse().map(({ number, asked, params }) => {
          const short = asked.length > 60 ? `${asked.slice(0, 60)}…` : asked;
          const open = button(`Run ${number}`, () => model.send({ open: number }));
          open.setAttribute("aria-label", `Run ${number}: ${short}`);
          return make("li", { value: number }, open, " ", make("bdi", { textContent: shown(short) }), ` — ${params}`);
        }),
      );
    }
  }

  // The answer that the conversation goes on from, if there is one.
  function answer() {
    const stream = streams.get(chosen) ?? streams.values().next().value;
    return stream && conversation.length ? [{ role: "assistant", content: stream.texts.join("") }] : [];
  }
  function forget() {
    for (const stream of streams.values()) stream.stop();
    streams.clear();
    for (const board of boards) board.drawAnswers();
  }
  function renewIfQuiet() {
    if (running || run === null || saved === run) return;
    if ([...boards].some(({ root }) => root.contains(document.activeElement))) return;
    saved = run;
    model.send({ renew: true });
  }
  let saved = null;

  function opened(message) {
    for (const stream of streams.values()) stream.stop();
    streams.clear();
    for (const key of message.streams)
      streams.set(key, new TokenStream((content) => model.send({ ...content, stream: key })));
    run = message.opened;
    running = message.running;
    chosen = saved = null;
    chatting = "chat" in message;
    conversation = chatting ? message.chat : [];
    draft = chatting ? "" : message.prompt;
    for (const board of boards) {
      board.code.hidden = true;
      board.samples.value = String(message.streams.length);
      // The seed that was drawn is in the code; the form goes on drawing one.
      board.form.set({ ...message.params, seed: board.form.values.seed });
      board.show();
      board.drawAnswers();
    }
    for (const stream of streams.values()) stream.ask();
  }
  function hear(message) {
    if ("stream" in message) streams.get(message.stream)?.receive(message);
    else if ("opened" in message) opened(message);
    else if (message.settled === run && run !== null) {
      running = false;
      for (const board of boards) board.show();
      renewIfQuiet();
    } else if ("code" in message)
      for (const { code } of boards) { code.textContent = shown(message.code); code.hidden = false; }
    else if ("refused" in message)
      for (const { form } of boards) form.refuse(message.refused, message.problem);
    else if ("error" in message) for (const { error } of boards) error.show(message.error);
  }
  function makeRoot() {
    const board = new Board();
    boards.add(board);
    sight.add(board.root);
    commons.add(board.root);
    return board.root;
  }

  return {
    initialize({ model: ours }) {
      model = ours;
      commons = commonsOf(model);
      sight = watchVisibility(model);
      const remember = () => { for (const board of boards) board.showHistory(); };
      model.on("msg:custom", hear);
      model.on("change:history", remember);
      model.send({ hello: true });
      places = hydrate(model.get("mark"), makeRoot);
      return () => {
        places.leave();
        sight.stop();
        commons.stop();
        model.off("msg:custom", hear);
        model.off("change:history", remember);
        for (const stream of streams.values()) stream.stop();
      };
    },
    render({ el }) {
      el.append(places.root());
    },
  };
};
