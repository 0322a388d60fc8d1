// Sliders and fields for sampling parameters. One closure a model.
export default () => {
  const forms = new Set();
  const errors = new Set();
  let model = null, commons, places;

  function makeRoot() {
    const root = rootOf("controls");
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", `sampling parameters: ${model.get("title")}`);
    const change = (name, value) => model.send({ set: name, value });
    const form = new ParameterForm(model.get("fields"), model.get("values"), change);
    const error = errorLine();
    const heading = make("div", { className: "status", textContent: shown(model.get("title")) });
    const end = make("div", { className: "status", role: "status" });
    form.end = () => {
      if (!model.get("ended")) return;
      form.disable();
      end.textContent = "It has ended: these are the parameters that it ended with.";
    };
    form.end();
    root.append(heading, form.node, form.problem, error.node, end);
    commons.add(root);
    // What is saved is brought up to date when nobody is at it: a new output takes the focus away.
    let dirty = false;
    root.addEventListener("input", () => { dirty = true; });
    root.addEventListener("focusout", (event) => {
      if (dirty && !root.contains(event.relatedTarget)) {
        dirty = false;
        setTimeout(() => model.send({ renew: true }), 300);
      }
    });
    forms.add(form);
    errors.add(error);
    return root;
  }

  return {
    initialize({ model: ours }) {
      model = ours;
      commons = commonsOf(model);
      const fill = () => {
        for (const form of forms) { form.accept(); form.set(model.get("values")); }
      };
      const end = () => { for (const form of forms) form.end(); };
      const hear = (message) => {
        if ("error" in message) for (const error of errors) error.show(message.error);
        if ("refused" in message)
          for (const form of forms) { form.set(message.values); form.refuse(message.refused, message.problem); }
      };
      model.on("change:values", fill);
      model.on("change:ended", end);
      model.on("msg:custom", hear);
      places = hydrate(model.get("mark"), makeRoot);
      return () => {
        places.leave();
        commons.stop();
        model.off("change:values", fill);
        model.off("change:ended", end);
        model.off("msg:custom", hear);
        for (const form of forms) form.disable();
      };
    },
    render({ el }) {
      el.append(places.root());
    },
  };
};
