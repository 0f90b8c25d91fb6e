"use strict";
(async () => {
  const data = await unpacked(document.getElementById("data").textContent).catch(() => null);
  if (!data) {
    document.getElementById("verdict").textContent = "This page wants a browser that can unpack gzip: Chrome 80, Firefox 113, Safari 16.4 or later.";
    return;
  }
  const FIELDS = ["name", "kind", "module", "op", "compute", "output", "rule", "why", "source", "region", "served", "original"];
  const LOW = new Set(["bfloat16", "float16"]);
  const MOST = { rows: 300, boxes: 150 };
  const $ = (id) => document.getElementById(id);

  /* Every text goes into the page as text: nothing that a model is named is ever markup. */
  function make(tag, text, attributes = {}, ...children) {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  /* A path, which may be broken behind its dots and underscores. */
  const path = (text) => make("td", "", {}, ...text.split(/(?<=[._])/).flatMap((part) => [part, document.createElement("wbr")]));

  function svg(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    return element;
  }

  function read(rows) {
    const nodes = rows.map((row, index) => {
      const [named, graph, bytes, time, reads, errors = [], ranges = []] = row.slice(FIELDS.length);
      const node = { index, graph, bytes, time, reads, errors, ranges, readers: [] };
      node.error = node.errors.reduce((sum, [, share]) => sum + share, 0);
      FIELDS.forEach((field, position) => (node[field] = data.strings[row[position]]));
      if (data.strings[named]) node.why = node.why.replace("@", () => data.strings[named]);
      return node;
    });
    for (const node of nodes) for (const at of node.reads) if (at >= 0) nodes[at].readers.push(node.index);
    return nodes;
  }

  const nodes = read(data.nodes);
  const key = (node) => `${node.graph}/${node.name}`;
  const byKey = new Map(nodes.map((node) => [key(node), node]));
  const kindOf = (node) =>
    node.kind === "cast" || node.kind === "absorbed" ? "cast"
      : LOW.has(node.compute) ? "low" : node.compute === "-" ? "none" : "full";
  const within = (node, module) => !module || node.module === module || node.module.startsWith(module + ".");
  /* Reasons that differ in a name only are one: a tuned policy has an override for each of many nodes. */
  const stem = (why) => why.split("; ")[0].replace(/^(override \w+) '[^']*'/, "$1");

  const state = { module: "", node: null, text: "", dtype: "", reason: "", measure: "bytes" };
  let shown = nodes;
  let drawn = null; /* the module whose graph is drawn */

  const count = (number) => number.toLocaleString("en");

  /* -- what is shown ------------------------------------------------------------------------------------------- */

  function matches(node) {
    if (!within(node, state.module)) return false;
    if (state.dtype && node.compute !== state.dtype) return false;
    if (state.reason && stem(node.why) !== state.reason) return false;
    if (!state.text) return true;
    const words = `${node.name} ${node.module} ${node.op} ${node.why} ${node.source}`.toLowerCase();
    return state.text.toLowerCase().split(/\s+/).every((word) => words.includes(word));
  }

  function refresh() {
    shown = nodes.filter(matches);
    $("found").textContent = `${count(shown.length)} of ${count(nodes.length)} nodes`;
    drawStrip();
    drawList();
    if (drawn !== state.module) drawGraph();
    for (const button of $("tree").querySelectorAll("button"))
      button.classList.toggle("chosen", button.dataset.module === state.module);
  }

  function choose(node, scroll = true) {
    state.node = node;
    drawCard();
    for (const row of document.querySelectorAll("[data-node]"))
      row.classList.toggle("chosen", node !== null && row.dataset.node === key(node));
    drawStrip();
    const wanted = node ? `#node=${encodeURIComponent(key(node))}` : " ";
    if (node && location.hash !== wanted) try { history.replaceState(null, "", wanted); } catch { /* in a frame */ }
    if (node && scroll) document.querySelector("#list tr.chosen")?.scrollIntoView({ block: "nearest" });
  }

  /* -- the strip: a column a node, or as many nodes a column as there is no room for ---------------------------- */

  const KINDS = ["low", "full", "cast", "none"];

  const size = (node) => (state.measure === "one" ? 1 : state.measure === "error" ? node.error : Math.max(0, node[state.measure]));
  const perColumn = () => Math.ceil(nodes.length / Math.max(1, $("strip").clientWidth || 800));

  function drawStrip() {
    const canvas = $("strip");
    const width = canvas.clientWidth || 800, height = 90, scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const many = perColumn(), columns = [];
    for (let at = 0; at < nodes.length; at += many) columns.push(nodes.slice(at, at + many));
    const totals = columns.map((column) => column.reduce((sum, node) => sum + size(node), 0));
    const largest = Math.max(1e-30, ...totals);
    const step = width / Math.max(1, columns.length);
    const visible = new Set(shown);
    columns.forEach((column, at) => {
      const tall = 6 + (height - 10) * Math.sqrt(totals[at] / largest);
      let top = height;
      for (const seen of [true, false])
        for (const kind of KINDS) {
          const part = column.filter((node) => visible.has(node) === seen && kindOf(node) === kind);
          const share = totals[at] ? part.reduce((sum, node) => sum + size(node), 0) / totals[at] : part.length / column.length;
          pen.globalAlpha = seen ? 1 : 0.15;
          pen.fillStyle = style.getPropertyValue(`--${kind}`);
          pen.fillRect(at * step, top -= share * tall, Math.max(0.7, step - (step > 4 ? 1 : 0)), share * tall);
        }
    });
    if (state.node) {
      pen.globalAlpha = 1;
      pen.strokeStyle = getComputedStyle(canvas).color; /* the variable itself is a function of the theme */
      pen.lineWidth = 2;
      pen.strokeRect(Math.floor(state.node.index / many) * step - 1, 1, Math.max(3, step) + 1, height - 2);
    }
  }

  /* The largest node that is shown of the column there. */
  function atStrip(offset) {
    const many = perColumn(), columns = Math.ceil(nodes.length / many);
    const first = Math.floor((offset / $("strip").clientWidth) * columns) * many;
    const column = nodes.slice(Math.max(0, first), first + many), seen = column.filter(matches);
    return (seen.length ? seen : column).reduce((best, node) => (best && size(best) >= size(node) ? best : node), null);
  }

  /* -- modules ------------------------------------------------------------------------------------------------- */

  function drawTree() {
    const root = { path: "", parts: new Map(), counts: { low: 0, full: 0 } };
    for (const node of nodes) {
      let at = root;
      const kind = kindOf(node);
      const add = (of) => { if (kind in of.counts) of.counts[kind] += 1; };
      add(root);
      for (const part of node.module ? node.module.split(".") : []) {
        if (!at.parts.has(part))
          at.parts.set(part, { path: at.path ? `${at.path}.${part}` : part, parts: new Map(), counts: { low: 0, full: 0 } });
        at = at.parts.get(part);
        add(at);
      }
    }
    const item = (name, of) => {
      const total = Math.max(1, of.counts.low + of.counts.full);
      const bar = make("span", "", { class: "bar", title: `${of.counts.low} in low precision, ${of.counts.full} in FP32 or wider` });
      for (const kind of ["low", "full"])
        bar.append(make("i", "", { style: `background: var(--${kind}); width: ${(100 * of.counts[kind]) / total}%` }));
      const button = make("button", name || data.title, { type: "button", "data-module": of.path });
      button.prepend(bar);
      button.addEventListener("click", () => {
        if (of.parts.size) unfold(state.module !== of.path || button.ariaExpanded === "false");
        state.module = of.path;
        refresh();
      });
      const line = make("li", "", {}, button);
      let list = null; /* its modules, made when they are first shown */
      const unfold = (open) => {
        if (open && !list.childElementCount) for (const [own, below] of of.parts) list.append(item(own, below));
        list.hidden = !open;
        button.ariaExpanded = String(open);
      };
      if (of.parts.size) {
        list = make("ul");
        unfold(!of.path || (!of.path.includes(".") && of.parts.size < 40));
        line.append(list);
      }
      return line;
    };
    $("tree").append(make("ul", "", {}, item("", root)));
  }

  /* -- the graph of a module: its own nodes, and each module below it as one box -------------------------------- */

  function boxOf(node) {
    if (node.module === state.module || !within(node, state.module)) return `n${node.index}`;
    const rest = state.module ? node.module.slice(state.module.length + 1) : node.module;
    return `m${state.module ? state.module + "." : ""}${rest.split(".")[0]}`;
  }

  /* Of a module with nodes of several kinds: how much of it is of each. */
  function shares(members, width) {
    const parts = ["low", "full"].map((kind) => [kind, members.filter((node) => kindOf(node) === kind).length]);
    const each = width / parts.reduce((sum, [, number]) => sum + number, 0);
    let left = 5;
    return parts.map(([kind, number]) => {
      const bar = svg("rect", { class: "share", x: left, y: 36, width: number * each, height: 4, style: `fill: var(--${kind})` });
      left += number * each;
      return bar;
    });
  }

  function drawGraph() {
    const place = $("drawing");
    drawn = state.module;
    place.replaceChildren();
    const boxes = new Map(), edges = new Map();
    for (const node of nodes) {
      if (!within(node, state.module)) continue;
      const id = boxOf(node);
      if (!boxes.has(id)) boxes.set(id, { id, nodes: [] });
      boxes.get(id).nodes.push(node);
      for (const at of node.reads) {
        if (at < 0 || !within(nodes[at], state.module)) continue;
        const from = boxOf(nodes[at]);
        if (from !== id) edges.set(`${from} ${id}`, [from, id]);
      }
    }
    if (boxes.size > MOST.boxes) {
      place.append(make("p", `${count(boxes.size)} boxes are too many to draw: choose a module in the tree.`, { class: "empty" }));
      return;
    }
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "LR", nodesep: 12, ranksep: 34, marginx: 8, marginy: 8 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const box of boxes.values()) {
      const module = box.id.startsWith("m");
      box.label = module ? box.id.slice(1).split(".").pop() : box.nodes[0].op === "placeholder" ? box.nodes[0].name : box.nodes[0].op;
      box.note = module ? `${count(box.nodes.length)} node${box.nodes.length > 1 ? "s" : ""}` : box.nodes[0].compute === "-" ? box.nodes[0].output : box.nodes[0].compute;
      graph.setNode(box.id, { width: 16 + 7.4 * Math.max(box.label.length, box.note.length), height: 40 });
    }
    for (const [from, to] of edges.values()) if (boxes.has(from) && boxes.has(to)) graph.setEdge(from, to);
    dagre.layout(graph);
    const { width = 10, height = 10 } = graph.graph();
    const sheet = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (const edge of graph.edges()) {
      const points = graph.edge(edge).points.map(({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`);
      sheet.append(svg("path", { d: `M${points.join("L")}` }));
    }
    for (const box of boxes.values()) {
      const at = graph.node(box.id), module = box.id.startsWith("m");
      const kinds = new Set(box.nodes.map(kindOf).filter((kind) => kind !== "none" && (kind !== "cast" || box.nodes.length === 1)));
      const colour = kinds.size === 1 ? `var(--${[...kinds][0]})` : "var(--none)";
      const group = svg("g", { transform: `translate(${at.x - at.width / 2} ${at.y - 20})`, tabindex: 0 });
      if (!module) group.setAttribute("data-node", key(box.nodes[0]));
      group.append(
        svg("rect", { width: at.width, height: 40, rx: 5, stroke: colour, "stroke-dasharray": module ? "5 3" : "none" }),
        svg("text", { x: 8, y: 17 }, box.label),
        svg("text", { x: 8, y: 33, opacity: 0.65 }, box.note),
      );
      if (kinds.size > 1) group.append(...shares(box.nodes, at.width - 10));
      const open = () => {
        if (module) { state.module = box.id.slice(1); refresh(); } else choose(box.nodes[0]);
      };
      group.addEventListener("click", open);
      group.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
      sheet.append(group);
    }
    place.append(sheet);
  }

  /* -- nodes --------------------------------------------------------------------------------------------------- */

  function table(names, rows) {
    const head = make("tr", "", {}, ...names.map((name) => make("th", name)));
    return make("table", "", {}, make("thead", "", {}, head), make("tbody", "", {}, ...rows));
  }

  function drawList() {
    const rows = shown.slice(0, MOST.rows).map((node) => {
      const row = make("tr", "", { "data-node": key(node) });
      row.append(path(node.name), path(node.op), make("td", node.compute, { class: node.compute === "-" ? "none" : kindOf(node) }),
        make("td", node.output), path(node.module), make("td", node.why, { title: node.why }));
      row.addEventListener("click", () => choose(node, false));
      if (state.node === node) row.classList.add("chosen");
      return row;
    });
    $("list").replaceChildren(table(["node", "op", "computes", "output", "module", "why"], rows));
    const left = shown.length - MOST.rows;
    if (left > 0) $("list").append(make("p", `${count(left)} more: search, or choose a module.`, { class: "empty" }));
    if (!shown.length) $("list").append(make("p", "No node is so: change the search or a filter, or press Escape for all.", { class: "empty" }));
  }

  const bytesText = (size) => (size < 0 ? "unknown" : size < 1e3 ? `${size} B` : size < 1e6 ? `${(size / 1e3).toPrecision(3)} kB` : `${(size / 1e6).toPrecision(3)} MB`);

  const percent = (share) => (share && share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`);

  /* How large values are: a bar an exponent of two, by the logarithm of how many there are. */
  function drawRange(lowest, tall, headroom, zeros, saturated, flushed, inFloat16) {
    if (!tall) return [": all zeros"];
    const highest = lowest + tall.length - 1;
    const bars = svg("svg", { class: "bars", viewBox: `0 0 ${tall.length} 9`, preserveAspectRatio: "none", role: "img", "aria-label": `from 2^${lowest} to 2^${highest}` });
    [...tall].forEach((digit, at) => bars.append(svg("rect", { x: at + 0.1, y: 9 - digit, width: 0.8, height: digit })));
    const shares = [["zeros", zeros], ["saturated", saturated], ["flushed", flushed], ["would be 0 in float16", inFloat16]];
    const told = shares.filter(([name, share]) => share || name === "saturated" || (name === "flushed" && share !== null));
    return [bars, `2^${lowest} to 2^${highest}, headroom ${headroom} bits; ${told.map(([name, share]) => `${percent(share)} ${name}`).join(", ")}`];
  }

  function drawCard() {
    const card = $("card"), node = state.node;
    card.replaceChildren();
    if (!node) { card.append(make("p", "Choose a node: in the strip, the graph or the list; j and k go on and back.", { class: "empty" })); return; }
    const link = (index) => {
      const to = nodes[index], anchor = make("a", `%${to.name}`, { href: `#node=${encodeURIComponent(key(to))}` });
      return make("span", "", {}, anchor, `: ${to.output} `);
    };
    const lines = make("dl");
    const line = (label, ...what) => { if (what.length && what[0] !== "") lines.append(make("dt", label), make("dd", "", {}, ...what)); };
    line("op", node.op);
    line("module", node.module || data.title);
    line("source", node.source);
    line("reads", ...node.reads.map((at) => (at >= 0 ? link(at) : make("span", data.strings[-1 - at] + " "))));
    line("computes", node.compute);
    line("served by", node.served);
    line("puts out", node.original ? `${node.output} (${node.original} in the original)` : node.output);
    line("read by", ...node.readers.map(link));
    line("because", node.rule === "-" ? node.why : `${node.rule}: ${node.why}`);
    line("bytes", bytesText(node.bytes));
    if (node.time > 0) line("time", `${(node.time / 1e3).toPrecision(3)} us of a step, estimated by the costs of the device`);
    for (const [label, share] of node.errors) line("error", `${data.strings[label]}: ${percent(share)} of the whole`);
    for (const [label, dtype, ...figures] of node.ranges) line("range", `${data.strings[label]}, ${data.strings[dtype]}`, ...drawRange(...figures));
    line("region", node.region);
    line("graph", data.graphs[node.graph]);
    card.append(make("h2", `%${node.name}`), lines);
  }

  /* -- two reports --------------------------------------------------------------------------------------------- */

  function drawComparison() {
    if (!data.other) return;
    const there = new Map(read(data.other.nodes).map((node) => [key(node), node]));
    const rows = [];
    const shownName = (name) => (data.graphs.length > 1 ? name : name.slice(name.indexOf("/") + 1));
    const add = (name, module, before, after) =>
      rows.push(() => make("tr", "", byKey.has(name) ? { "data-node": name } : {}, path(shownName(name)), path(module), make("td", before), make("td", after)));
    const told = (node) => (node.compute === "-" ? node.output : node.compute === node.output ? node.compute : `${node.compute}, out ${node.output}`);
    for (const node of nodes) {
      const before = there.get(key(node));
      if (!before) add(key(node), node.module, "-", told(node));
      else if (told(before) !== told(node)) add(key(node), node.module, told(before), told(node));
    }
    for (const [name, node] of there) if (!byKey.has(name)) add(name, node.module, told(node), "-");
    const place = $("compared");
    place.hidden = false;
    place.append(make("h2", rows.length === 1 ? "compared: 1 node differs" : `compared: ${count(rows.length)} nodes differ`), make("p", `before: ${data.other.verdict}`), make("p", `now: ${data.verdict}`),
      ...(rows.length ? [table(["node", "module", "before", "now"], rows.slice(0, MOST.rows).map((row) => row()))] : []));
    if (rows.length > MOST.rows) place.append(make("p", `${count(rows.length - MOST.rows)} more`, { class: "empty" }));
    place.addEventListener("click", (event) => {
      const name = event.target.closest("[data-node]")?.dataset.node;
      if (name) choose(byKey.get(name));
    });
  }

  /* -- start --------------------------------------------------------------------------------------------------- */

  function fromAddress() {
    const found = /^#node=(.*)$/.exec(location.hash);
    if (!found) return;
    const node = byKey.get(decodeURIComponent(found[1]));
    if (node && node !== state.node) choose(node);
  }

  $("title").textContent = data.title;
  $("verdict").textContent = data.verdict;
  for (const [label, text] of data.lines) $("lines").append(make("dt", label), make("dd", text));
  for (const [kind, text] of [["low", "low precision"], ["full", "FP32 and wider"], ["cast", "casts"], ["none", "no floats"]])
    $("legend").append(make("span", "", {}, make("i", "", { style: `background: var(--${kind})` }), text));
  if (nodes.some((node) => node.time > 0)) $("measure").append(make("option", "height: time, estimated", { value: "time" }));
  if (nodes.some((node) => node.errors.length)) $("measure").append(make("option", "height: part in the error", { value: "error" }));
  const fill = (id, values) => {
    const counts = new Map();
    for (const value of values) if (value && value !== "-") counts.set(value, (counts.get(value) || 0) + 1);
    for (const [value, times] of [...counts].sort((a, b) => b[1] - a[1])) $(id).append(make("option", `${value} (${count(times)})`, { value }));
  };
  fill("dtype", nodes.map((node) => node.compute));
  fill("reason", nodes.filter((node) => node.kind === "op").map((node) => stem(node.why)));
  for (const [id, name] of [["search", "text"], ["dtype", "dtype"], ["reason", "reason"], ["measure", "measure"]])
    $(id).addEventListener("input", () => { state[name] = $(id).value; refresh(); });
  const everything = () => {
    for (const [id, name] of [["search", "text"], ["dtype", "dtype"], ["reason", "reason"]]) state[name] = $(id).value = "";
    state.module = "";
    refresh();
    choose(null);
  };
  const theme = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    drawStrip();
  };
  $("theme").addEventListener("click", theme);
  $("strip").addEventListener("click", (event) => {
    const node = atStrip(event.offsetX);
    if (node) choose(node);
  });
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const on = event.key === "j" ? 1 : event.key === "k" ? -1 : 0;
    if (event.key === "/") { event.preventDefault(); $("search").focus(); }
    else if (event.key === "t") theme();
    else if (event.key === "Escape") everything();
    else if (on && shown.length) {
      const at = state.node ? shown.indexOf(state.node) + on : 0;
      choose(shown[Math.min(shown.length - 1, Math.max(0, at))]);
    }
  });
  addEventListener("hashchange", fromAddress);
  addEventListener("resize", drawStrip);
  drawTree();
  refresh();
  drawCard();
  drawComparison();
  fromAddress();
  document.documentElement.dataset.ready = "";

  async function unpacked(letters) {
    const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    return await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }
})();
