// The text of one generation, with its buttons. One closure a model.
export default () => {
  let stream, sight;

  function makeRoot() {
    const page = new Page(stream, { title: "generated text", verbs: ["pause", "resume", "cancel", "continue"] });
    stream.pages.add(page);
    sight.add(page.root);
    return page.root;
  }

  return {
    initialize({ model }) {
      stream = new TokenStream((message) => model.send(message));
      sight = watchVisibility((visible) => model.send({ visible }));
      const whole = () => {
        if ("run" in model.get("snapshot")) stream.receive(model.get("snapshot"));
      };
      const part = (message) => {
        if ("error" in message) for (const page of stream.pages) page.error.show(message.error);
        else stream.receive(message);
      };
      model.on("change:snapshot", whole);
      model.on("msg:custom", part);
      whole();
      stream.ask(); // for what came between the kernel's opening of this model and now
      const leave = hydrate(model.get("mark"), makeRoot);
      return () => {
        leave();
        stream.stop();
        sight.stop();
        model.off("change:snapshot", whole);
        model.off("msg:custom", part);
        for (const page of stream.pages) page.retire();
      };
    },
    render({ el }) {
      el.append(makeRoot());
    },
  };
};
