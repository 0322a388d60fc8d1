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

// Take the place of every element with the class `mark`. A page whose element was replaced moves to the new one.
function hydrate(mark, makeRoot) {
  const found = document.getElementsByClassName(mark); // kept up to date by the browser
  const roots = [];
  function look() {
    for (const place of found) {
      if (place.dataset.interactiveInferLive) continue;
      place.dataset.interactiveInferLive = "yes";
      let root = roots.find((root) => !root.isConnected);
      if (root === undefined) roots.push((root = makeRoot()));
      place.replaceChildren(root);
    }
  }
  look();
  const timer = setInterval(look, 200);
  return () => clearInterval(timer);
}

// Calls `tell(visible)` when the last of `roots` goes out of sight for a while, or one comes back into it.
function watchVisibility(tell) {
  const inSight = new Map();
  let visible = true, timer = null;
  function decide() {
    const now = !document.hidden && [...inSight.values()].some((seen) => seen);
    clearTimeout(timer);
    if (now === visible) return;
    const change = () => { visible = now; tell(now); };
    if (now) change();
    else timer = setTimeout(change, 1000);
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) inSight.set(entry.target, entry.isIntersecting);
    decide();
  });
  document.addEventListener("visibilitychange", decide);
  return {
    add: (root) => observer.observe(root),
    stop() {
      clearTimeout(timer);
      observer.disconnect();
      document.removeEventListener("visibilitychange", decide);
    },
  };
}
