// The sampling parameters as a form. `fields` is what form.py says of them.

const SEND_EVERY_MS = 60;
const HANDS_OFF_MS = 1000; // after somebody's own change, what the kernel says of that field waits so long

class ParameterForm {
  constructor(fields, values, change) {
    this.change = change;
    this.values = values;
    this.touched = {};
    this.inputs = {};
    this.node = make("div", { className: "fields" });
    for (const field of fields) this.addField(field);
    this.problem = make("div", { className: "error", role: "alert", hidden: true });
    this.fill();
  }
  addField(field) {
    const { name, kind, hint } = field;
    const label = make("label", { textContent: name.replaceAll("_", " "), title: hint });
    const range = { min: String(field.min ?? ""), max: String(field.max ?? ""), step: String(field.step ?? "") };
    const inputs = [];
    if (kind === "slider") {
      // What is typed in may lie beyond the slider.
      inputs.push(make("input", { type: "range", ...range }), make("input", { type: "number", step: "any" }));
      inputs[1].setAttribute("aria-label", `${name.replaceAll("_", " ")}, exact value`);
    } else if (kind === "number") inputs.push(make("input", { type: "number", min: range.min, step: "1", className: "wide" }));
    else if (kind === "box") inputs.push(make("input", { type: "checkbox" }));
    else if (kind === "lines") inputs.push(make("textarea", { rows: 1, className: "wide" }));
    else inputs.push(make("input", { type: "text", className: "wide", autocomplete: "off" }));
    inputs[0].id = newId();
    label.htmlFor = inputs[0].id;
    for (const input of inputs) {
      input.title = hint;
      input.dataset.name = name;
      // While a number is typed it is not the number that is meant yet.
      const event = input.type === "range" || input.type === "checkbox" ? "input" : "change";
      input.addEventListener("input", () => { this.touched[name] = Date.now(); });
      input.addEventListener(event, () => this.changed(name, input));
      if (input.tagName === "INPUT")
        input.addEventListener("keydown", ({ key }) => key === "Enter" && this.changed(name, input));
    }
    this.inputs[name] = inputs;
    this.node.append(label, ...inputs);
    if (kind === "box") this.node.append(make("span"));
  }
  changed(name, input) {
    const number = input.type === "range" || input.type === "number";
    if (number && !Number.isFinite(input.valueAsNumber)) { // it was emptied, or holds no number: nothing is meant
      this.touched[name] = 0;
      this.fill();
      return;
    }
    const value = input.type === "checkbox" ? input.checked : number ? Number(input.value) : input.value;
    if (value === this.values[name]) return;
    this.touched[name] = Date.now();
    this.values = { ...this.values, [name]: value };
    for (const other of this.inputs[name]) if (other !== input) other.value = input.value;
    this.problem.hidden = true;
    this.waiting = { ...this.waiting, [name]: value };
    this.timer ??= setTimeout(() => {
      const changes = this.waiting;
      this.timer = this.waiting = null;
      for (const [name, value] of Object.entries(changes)) this.change(name, value);
    }, SEND_EVERY_MS);
  }
  // What the kernel has.
  set(values) {
    this.values = { ...this.values, ...values };
    this.fill();
  }
  fill() {
    let later = false;
    for (const [name, inputs] of Object.entries(this.inputs)) {
      if (Date.now() - (this.touched[name] ?? 0) < HANDS_OFF_MS) { later = true; continue; }
      for (const input of inputs) {
        if (input.type === "checkbox") input.checked = this.values[name];
        else if (input.value !== String(this.values[name])) input.value = String(this.values[name]);
      }
    }
    if (later) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.fill(), HANDS_OFF_MS);
    }
  }
  refuse(name, problem) {
    this.problem.textContent = shown(problem);
    this.problem.hidden = false;
    for (const input of this.inputs[name] ?? []) input.setAttribute("aria-invalid", "true");
    this.touched[name] = 0;
    this.fill();
  }
  accept() {
    for (const input of Object.values(this.inputs).flat()) input.removeAttribute("aria-invalid");
  }
  disable() {
    for (const input of Object.values(this.inputs).flat()) input.disabled = true;
  }
}
