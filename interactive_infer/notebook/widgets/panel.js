// What the front ends of our widgets share. Text reaches the page as text nodes and properties only.

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

// Of a whole page, in which every widget has its own copy of this file.
const newId = () => `interactive-infer-${Math.random().toString(36).slice(2)}`;

// HTML cannot hold NUL; its symbol stands for it, as in the saved notebook.
const shown = (text) => (text.includes("\0") ? text.replaceAll("\0", "\u2400") : text);

// As HTML, for an output that is saved.
const escaped = (text) => shown(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

// A button that stays in the tab order while it can do nothing: who pressed it by keyboard keeps the focus.
function button(label, act) {
  const node = make("button", { type: "button", textContent: label });
  node.addEventListener("click", () => node.getAttribute("aria-disabled") !== "true" && act(node));
  return node;
}
const enable = (node, can) => node.setAttribute("aria-disabled", String(!can));

// The root of a widget's page. Keys pressed in it are not JupyterLab's shortcuts, dollar signs are not mathematics.
const rootOf = (kind) =>
  make("div", { className: `interactive-infer mathjax_ignore ${kind}`, "data-lm-suppress-shortcuts": "true" });

// Where an error of a callback is shown.
function errorLine() {
  const node = make("div", { className: "error", role: "alert", hidden: true });
  const text = make("span");
  const close = button("Dismiss", () => { node.hidden = true; });
  node.append(text, close);
  return { node, show(message) { text.textContent = shown(message); node.hidden = false; } };
}

// What every widget has beside its own: what its callbacks printed, on each of its pages, and its output's upkeep.
// `cutOff` is called when the kernel may be gone.
function commonsOf(model, cutOff = () => {}) {
  const areas = new Set();
  const fill = () => {
    const printed = model.get("printed");
    for (const { node, text } of areas) {
      text.textContent = shown(printed);
      node.hidden = printed === "";
    }
  };
  const hear = (message) => { if ("output" in message) setOutput(model, () => message.output); };
  model.on("change:printed", fill);
  model.on("msg:custom", hear);
  model.on("comm_live_update", cutOff); // it was restarted, or died
  const session = model.widget_manager?.context?.sessionContext; // JupyterLab's and Notebook's
  session?.kernelChanged?.connect(cutOff); // it was shut down
  model.send({ here: true });
  return {
    add(root) {
      const text = make("pre", { tabIndex: 0, role: "log", "aria-label": "printed by this widget's callbacks" });
      const node = make("div", { className: "printed", hidden: true });
      node.append(text, button("Dismiss", () => { node.hidden = true; model.send({ dismiss: true }); }));
      areas.add({ node, text });
      root.append(node);
      fill();
    },
    stop() {
      model.off("change:printed", fill);
      model.off("msg:custom", hear);
      model.off("comm_live_update", cutOff);
      session?.kernelChanged?.disconnect(cutOff);
    },
  };
}

// Put `renewed(its HTML now)` into the notebook's outputs that hold this widget. A page that was reloaded no longer
// knows which display of the kernel's an output was, and drops its updates. Only JupyterLab and Notebook let a widget
// at the notebook.
function setOutput(model, renewed) {
  const mark = model.get("mark");
  for (const { outputs } of model.widget_manager?.context?.model?.cells ?? []) {
    for (let index = 0; index < (outputs?.length ?? 0); index++) {
      const output = outputs.get(index).toJSON();
      const html = [output.data?.["text/html"] ?? ""].flat().join("");
      if (!html.includes(mark)) continue;
      const data = renewed(html);
      const isStale = html !== data["text/html"] || Object.keys(output.data).length !== Object.keys(data).length;
      if (isStale) outputs.set(index, { ...output, data });
    }
  }
}

// Take the place of every element with the class `mark`. A page whose element was replaced moves to the new one, and is
// told by the event "moved". `root()` is a page for elsewhere. `hold()`, before a replacement: the focus moves too.
function hydrate(mark, makeRoot) {
  const found = document.getElementsByClassName(mark); // kept up to date by the browser
  const roots = new Map(); // and whether each has been in the document
  let held = null;
  function root() {
    const root = makeRoot();
    roots.set(root, false);
    return root;
  }
  function look() {
    for (const place of found) {
      if (place.dataset.interactiveInferLive) continue;
      place.dataset.interactiveInferLive = "yes";
      const [free] = [...roots].find(([root, was]) => was && !root.isConnected) ?? [root()];
      place.replaceChildren(free);
      free.dispatchEvent(new Event("moved"));
      if (free.contains(held)) {
        held.focus({ preventScroll: true });
        held = null;
      }
    }
    note();
  }
  function note() {
    for (const root of roots.keys()) if (root.isConnected) roots.set(root, true);
  }
  look();
  const timer = setInterval(look, 200);
  return {
    root,
    hold() {
      note();
      held = document.activeElement;
      for (const ms of [0, 20, 50, 100]) setTimeout(look, ms); // rather than in the course of things
    },
    leave: () => clearInterval(timer),
  };
}

// Tells the kernel whether one of `roots` is in sight: at first; when one comes into it; when the last has been out of it
// for a while; and while it is, again and again, so that the kernel notices when this page is gone.
const IN_SIGHT_MS = 10_000;

function watchVisibility(model) {
  const inSight = new Map();
  const page = newId();
  let visible = null, timer = null;
  const tell = () => model.send({ visible, page });
  function decide() {
    const now = !document.hidden && [...inSight.values()].some((seen) => seen);
    clearTimeout(timer);
    if (now === visible) return;
    const change = () => { visible = now; tell(); };
    if (now) change();
    else timer = setTimeout(change, 1000);
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) inSight.set(entry.target, entry.isIntersecting);
    decide();
  });
  document.addEventListener("visibilitychange", decide);
  const again = setInterval(() => visible && tell(), IN_SIGHT_MS);
  return {
    add: (root) => observer.observe(root),
    stop() {
      clearTimeout(timer);
      clearInterval(again);
      observer.disconnect();
      document.removeEventListener("visibilitychange", decide);
    },
  };
}
