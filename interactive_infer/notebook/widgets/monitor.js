// How full and how busy an engine is. One closure a model.
const HISTORY = 180; // looks: a minute
const WIDTH = 260, HEIGHT = 36;

export default () => {
  const pages = new Set();
  const history = new Map();
  let rows = null, closed = false, sight, commons, places, model;

  function draw(page) {
    if (rows === null) return;
    rows.forEach(([name, words, value, most], index) => {
      let row = page.body.children[index];
      if (row === undefined) {
        const meter = make("meter", { min: 0, "aria-label": name });
        row = make("tr", {}, make("th", { scope: "row", textContent: name }), make("td"), make("td", {}, meter));
        page.body.append(row);
      }
      row.children[0].textContent = name;
      row.children[1].textContent = words;
      const meter = row.children[2].firstChild;
      meter.hidden = most === null;
      if (most !== null) { meter.max = most; meter.value = value ?? 0; }
    });
    for (const [name, graph] of page.graphs) {
      const values = history.get(name) ?? [];
      const most = Math.max(graph.least, ...values);
      const points = values.map((value, index) => {
        const x = WIDTH - (values.length - 1 - index) * (WIDTH / (HISTORY - 1));
        return `${x.toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1)}`;
      });
      graph.line.setAttribute("points", points.join(" "));
      graph.label.textContent = `${name}, the last minute (up to ${most < 10 ? most.toFixed(1) : Math.round(most)})`;
    }
    page.end.textContent = closed ? "The engine is closed." : "";
  }
  function graphOf(least) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "polyline");
    svg.setAttribute("width", WIDTH);
    svg.setAttribute("height", HEIGHT);
    svg.setAttribute("role", "img");
    svg.append(line);
    const label = make("div", { className: "status" });
    return { svg, line, label, least };
  }
  function makeRoot() {
    const root = rootOf("monitor");
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", `monitor of ${model.get("title")}`);
    const table = make("table"), body = make("tbody");
    table.append(make("caption", { textContent: shown(model.get("title")) }), body);
    const busy = `${model.get("device")} busy`;
    const graphs = new Map([["tokens/s", graphOf(1)], [busy, graphOf(1)]]);
    const error = errorLine();
    const page = { body, graphs, error, end: make("div", { className: "status", role: "status" }) };
    root.append(table);
    for (const [name, { svg, label }] of graphs) {
      svg.setAttribute("aria-label", `${name} over the last minute`);
      root.append(label, svg);
    }
    root.append(page.end, error.node);
    commons.add(root);
    pages.add(page);
    sight.add(root);
    draw(page);
    return root;
  }

  return {
    initialize({ model: ours }) {
      model = ours;
      commons = commonsOf(model);
      sight = watchVisibility(model);
      const hear = (message) => {
        if ("error" in message) for (const page of pages) page.error.show(message.error);
        if (message.closed) closed = true;
        if ("figures" in message) {
          rows = message.figures;
          for (const [name, , value] of rows) {
            if (!history.has(name)) history.set(name, []);
            const values = history.get(name);
            values.push(value ?? 0);
            if (values.length > HISTORY) values.shift();
          }
        }
        for (const page of pages) draw(page);
      };
      model.on("msg:custom", hear);
      places = hydrate(model.get("mark"), makeRoot);
      return () => {
        places.leave();
        sight.stop();
        commons.stop();
        model.off("msg:custom", hear);
      };
    },
    render({ el }) {
      el.append(places.root());
    },
  };
};
