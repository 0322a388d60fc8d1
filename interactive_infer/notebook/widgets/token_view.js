// The text of one generation, with its buttons. One closure a model.
export default () => {
  let stream, sight, commons, places;

  function makeRoot() {
    const page = new Page(stream, { title: "generated text", verbs: ["pause", "resume", "cancel", "continue"] });
    stream.pages.add(page);
    sight.add(page.root);
    commons.add(page.root);
    return page.root;
  }

  // The text so far as the output: of JupyterLab and Notebook, when somebody saves, or the kernel will write no end.
  function writeDown(model) {
    if (stream.state === "finished") return;
    const text = stream.texts.join("");
    const inside = /^(.*?<pre[^>]*>)[^<]*(<\/pre><div[^>]*>)[^<]*/s; // as display.py writes it; text has no "<" there
    const fill = (_, before, between) => before + escaped(text) + between + escaped(stream.words);
    places.hold();
    setOutput(model, (html) => ({ "text/plain": text, "text/html": html.replace(inside, fill) }));
  }
  function cutOff(model) {
    stream.lose();
    writeDown(model);
  }

  return {
    initialize({ model }) {
      stream = new TokenStream((message) => model.send(message));
      commons = commonsOf(model, () => cutOff(model));
      sight = watchVisibility(model);
      const whole = () => {
        if ("run" in model.get("snapshot")) stream.receive(model.get("snapshot"));
      };
      const part = (message) => {
        if ("error" in message) for (const page of stream.pages) page.error.show(message.error);
        else if (!("output" in message)) stream.receive(message);
      };
      const retire = () => {
        const left = model.get("retired");
        if (!("text" in left)) return false;
        stream.retire(left);
        sight.stop();
        return true;
      };
      const saving = (_, state) => { if (state === "started") writeDown(model); };
      const saved = model.widget_manager?.context?.saveState;
      saved?.connect(saving);
      model.on("change:snapshot", whole);
      model.on("msg:custom", part);
      model.on("change:retired", retire);
      whole();
      if (!retire()) stream.ask(); // for what came between the kernel's opening of this model and now
      places = hydrate(model.get("mark"), makeRoot);
      return () => {
        places.leave();
        stream.stop();
        sight.stop();
        commons.stop();
        saved?.disconnect(saving);
        model.off("change:snapshot", whole);
        model.off("change:retired", retire);
        model.off("msg:custom", part);
        stream.lose();
      };
    },
    render({ el }) {
      el.append(places.root());
    },
  };
};
