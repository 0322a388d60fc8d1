// Draws the last seconds of a timeline. The protocol is described in timeline_view.py; times are ms from the view's making.

const DEVICE_LANES = 8; // lower numbers lie in the device's lane
const LABEL = 92;
const SHARE = 64;
const ROW = 20;
const BEHIND_MS = 400; // the right edge lags by this, so that what it shows has come
const FRAME_MS = 50;

// As in the still figures: hues of Okabe and Ito's palette.
const COLORS = {
  light: {
    device: ["#0072b2", "#56b4e9", "#cc79a7", "#c9ced4"], bubble: "#d55e00", work: "#e69f00", other: "#8c6bb1",
    awaiting: "#b8bfc7", user: "#cc79a7", lag: "#57606a", grid: "#d8dde3",
  },
  dark: {
    device: ["#3b9fdd", "#a5dcff", "#e39bc4", "#4b545e"], bubble: "#ff8a4c", work: "#f0b429", other: "#b39ddb",
    awaiting: "#566270", user: "#e39bc4", lag: "#aab4bf", grid: "#333a43",
  },
};
const KINDS = {
  awaiting: "awaiting", capture: "other", "garbage coll.": "other", callbacks: "other", "user spans": "user",
  "user cells": "user",
};

// What each pixel of [t0, t1) is covered to, 0 to 1, by intervals given as [start, end, ...].
export function coverage(intervals, t0, t1, pixels) {
  const covered = new Float64Array(pixels);
  const scale = pixels / (t1 - t0);
  for (let i = 0; i < intervals.length; i += 2) {
    const a = Math.max((intervals[i] - t0) * scale, 0);
    const b = Math.min((intervals[i + 1] - t0) * scale, pixels);
    if (!(b > a)) continue;
    const first = Math.floor(a);
    const last = Math.min(Math.floor(b), pixels - 1);
    if (first === last) {
      covered[first] += b - a;
      continue;
    }
    covered[first] += first + 1 - a;
    for (let x = first + 1; x < last; x++) covered[x] += 1;
    covered[last] += b - last;
  }
  for (let x = 0; x < pixels; x++) covered[x] = Math.min(covered[x], 1);
  return covered;
}

// The stretches of [t0, t1) in which something could run, from [at, count, ...].
export function runnable(counts, t0, t1) {
  const found = [];
  for (let i = 0; i < counts.length; i += 2) {
    const end = i + 2 < counts.length ? counts[i + 2] : t1;
    if (counts[i + 1] > 0 && end > t0 && counts[i] < t1) found.push(Math.max(counts[i], t0), Math.min(end, t1));
  }
  return found;
}

// Everything that has arrived and may still be shown.
export class Records {
  constructor(seconds) {
    this.keep = 1000 * (seconds + 2);
    this.clear();
  }
  clear() {
    this.lanes = new Map();
    this.lags = [];
    this.counts = [];
    this.now = -Infinity;
    this.ahead = -Infinity; // the kernel's clock less this one's, by the message that came fastest
  }
  add(now, at, rows, numbers, lags, counts) {
    this.now = Math.max(this.now, now);
    this.ahead = Math.max(this.ahead, now - at);
    for (let i = 0; i < numbers.length; i++) {
      if (!this.lanes.has(numbers[i])) this.lanes.set(numbers[i], []);
      this.lanes.get(numbers[i]).push(rows[2 * i], rows[2 * i + 1]);
    }
    for (const value of lags) this.lags.push(value);
    for (const value of counts) this.counts.push(value);
    const from = this.now - this.keep;
    for (const [number, list] of this.lanes) this.lanes.set(number, dropped(list, 1, from));
    this.lags = dropped(this.lags, 0, from);
    // One change before the beginning says how many could run then.
    while (this.counts.length >= 4 && this.counts[2] < from) this.counts.splice(0, 2);
  }
}

function dropped(pairs, place, from) {
  if (!pairs.length || pairs[place] >= from) return pairs;
  const kept = [];
  for (let i = 0; i < pairs.length; i += 2) if (pairs[i + place] >= from) kept.push(pairs[i], pairs[i + 1]);
  return kept;
}

function isDark(element) {
  for (let at = element; at; at = at.parentElement) {
    const parts = getComputedStyle(at).backgroundColor.match(/[\d.]+/g);
    if (parts && (parts.length < 4 || Number(parts[3]) > 0)) {
      const [r, g, b] = parts.map(Number);
      return 0.299 * r + 0.587 * g + 0.114 * b < 128;
    }
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

const percent = (share) => (share >= 0.9995 ? "100 %" : `${(100 * share).toFixed(1)} %`);

class Drawing {
  constructor(model, records) {
    this.model = model;
    this.records = records;
    this.root = rootOf("timeline-view");
    this.figures = make("span");
    // The device's is somebody's own name.
    this.said = make("div", { className: "said" }, make("bdi", { textContent: model.get("device") }), this.figures);
    this.canvas = make("canvas", { role: "img" });
    this.error = errorLine();
    this.root.append(this.said, this.canvas, this.error.node);
    this.labels = Object.entries(model.get("lanes")).map(([number, label]) => [Number(number), label]);
    this.rows = new Set(); // lanes that have had something: one that empties keeps its place
    this.drawn = 0;
  }
  draw(at) {
    const { records, canvas } = this;
    if (at - this.drawn < FRAME_MS || records.now === -Infinity) return;
    this.drawn = at;
    const t1 = at + records.ahead - BEHIND_MS;
    const t0 = t1 - 1000 * this.model.get("seconds");
    for (const number of records.lanes.keys()) if (number >= DEVICE_LANES) this.rows.add(number);
    const lanes = this.labels.filter(([number]) => this.rows.has(number));
    const width = canvas.clientWidth;
    const height = ROW * (lanes.length + 2) + 18;
    const ratio = window.devicePixelRatio || 1;
    if (width <= LABEL + SHARE) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const colors = isDark(canvas) ? COLORS.dark : COLORS.light;
    const pixels = Math.floor(width - LABEL - SHARE);
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";

    const text = (words, x, y, most) => {
      pen.fillStyle = style.color;
      pen.fillText(words, x, y, most);
    };
    const columns = (covered, row, color, base) => {
      pen.fillStyle = color;
      const foot = ROW * (row + 1) - 2;
      for (let x = 0; x < pixels; x++) {
        if (covered[x] <= 0) continue;
        const under = base ? base[x] : 0;
        const top = Math.max(covered[x] * (ROW - 4), 1);
        pen.fillRect(LABEL + x, foot - under * (ROW - 4) - top, 1, top);
      }
    };
    const mean = (covered) => covered.reduce((sum, value) => sum + value, 0) / pixels;

    pen.fillStyle = colors.grid;
    for (let second = Math.ceil(t0 / 1000); second * 1000 < t1; second++) {
      pen.fillRect(LABEL + ((1000 * second - t0) / (t1 - t0)) * pixels, 0, 1, ROW * (lanes.length + 2));
    }
    const could = coverage(runnable(records.counts, t0, t1), t0, t1, pixels);
    const busy = new Float64Array(pixels);
    columns(could, 0, colors.bubble);
    colors.device.forEach((color, number) => {
      const covered = coverage(records.lanes.get(number) || [], t0, t1, pixels);
      columns(covered, 0, color, busy);
      for (let x = 0; x < pixels; x++) busy[x] = Math.min(busy[x] + covered[x], 1);
    });
    text(this.model.get("device"), 0, ROW / 2, LABEL - 6);
    text(percent(mean(busy)), LABEL + pixels + 6, ROW / 2);
    lanes.forEach(([number, label], index) => {
      const covered = coverage(records.lanes.get(number) || [], t0, t1, pixels);
      const y = ROW * (index + 1.5);
      columns(covered, index + 1, colors[KINDS[label] || "work"]);
      text(label, 0, y);
      text(percent(mean(covered)), LABEL + pixels + 6, y);
    });

    const foot = ROW * (lanes.length + 2) - 2;
    let most = 0;
    for (let i = 0; i < records.lags.length; i += 2) if (records.lags[i] >= t0) most = Math.max(most, records.lags[i + 1]);
    pen.fillStyle = colors.lag;
    for (let i = 0; i < records.lags.length; i += 2) {
      if (records.lags[i] < t0 || records.lags[i] > t1) continue;
      const top = (records.lags[i + 1] / Math.max(most, 1)) * (ROW - 4);
      pen.fillRect(LABEL + ((records.lags[i] - t0) / (t1 - t0)) * pixels, foot - top, 1.5, Math.max(top, 1));
    }
    text("loop lag", 0, foot - ROW / 2 + 2);
    text(`${most.toFixed(1)} ms`, LABEL + pixels + 6, foot - ROW / 2 + 2);
    text(`${this.model.get("seconds")} s ago`, LABEL, foot + 10);
    let x = LABEL + 70;
    const meanings = [[colors.device[0], "decode"], [colors.device[1], "prefill"], [colors.bubble, "idle with work to do"]];
    for (const [color, meaning] of meanings) {
      pen.fillStyle = color;
      pen.fillRect(x, foot + 6, 9, 9);
      text(meaning, x + 13, foot + 10);
      x += 30 + pen.measureText(meaning).width;
    }
    pen.textAlign = "right";
    text("now", LABEL + pixels, foot + 10);
    pen.textAlign = "left";

    let worked = 0;
    let while_there_was = 0;
    for (let x = 0; x < pixels; x++) {
      while_there_was += could[x];
      worked += Math.min(busy[x], could[x]);
    }
    const words = [` busy ${percent(mean(busy))}`];
    if (while_there_was > 0) words.push(`${percent(worked / while_there_was)} while there was work`);
    words.push(`loop at most ${most.toFixed(1)} ms late`);
    this.figures.textContent = words.join(", ");
    canvas.setAttribute("aria-label", this.said.textContent);
  }
}

export default () => {
  const drawings = new Set();
  let model, records, sight, commons, places;

  function makeRoot() {
    const drawing = new Drawing(model, records);
    drawings.add(drawing);
    // It is drawn while it is in sight.
    let inside = false, frame = null;
    const turn = (at) => {
      drawing.draw(at);
      frame = inside ? requestAnimationFrame(turn) : null;
    };
    new IntersectionObserver((entries) => {
      inside = entries.at(-1).isIntersecting;
      if (inside) frame ??= requestAnimationFrame(turn);
    }).observe(drawing.root);
    sight.add(drawing.root);
    commons.add(drawing.root);
    return drawing.root;
  }

  // What it says now as the output: of JupyterLab and Notebook, when somebody saves.
  function writeDown() {
    const words = [...drawings].find(({ root }) => root.isConnected)?.said.textContent;
    if (!words) return;
    places.hold();
    const text = `${words}, in the last ${model.get("seconds")} s`;
    const inside = /^(<div[^>]*>).*(<\/div>)$/s; // as panel.py writes it
    const fill = (_, before, after) => `${before}<p>${escaped(text)}</p>${after}`;
    setOutput(model, (html) => ({ "text/plain": text, "text/html": html.replace(inside, fill) }));
  }

  return {
    initialize({ model: ours }) {
      model = ours;
      records = new Records(model.get("seconds"));
      commons = commonsOf(model);
      sight = watchVisibility(model);
      const part = (message, buffers) => {
        if ("error" in message) for (const { error } of drawings) error.show(message.error);
        if (!("now" in message)) return;
        if (message.first) records.clear();
        const numbers = (index, Kind) => {
          const view = buffers[index];
          const bytes = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
          return new Kind(bytes);
        };
        records.add(
          message.now, performance.now(), numbers(0, Float64Array), numbers(1, Uint8Array), numbers(2, Float64Array),
          numbers(3, Float64Array),
        );
      };
      const saving = (_, state) => { if (state === "started") writeDown(); };
      const saved = model.widget_manager?.context?.saveState;
      saved?.connect(saving);
      model.on("msg:custom", part);
      model.send({ hello: true });
      places = hydrate(model.get("mark"), makeRoot);
      return () => {
        places.leave();
        sight.stop();
        commons.stop();
        saved?.disconnect(saving);
        model.off("msg:custom", part);
      };
    },
    render({ el }) {
      el.append(places.root());
    },
  };
};
