const ROW = innerWidth >= 2560 ? 30 : 22;
const LINE = 24;
const WORST = ["detecting", "lost", "deciding", "stopping", "starting", "ready", "suspended", "queue"];

function page(data) {
  timeline(data);
  journal(data);
  openNamed();
  addEventListener("hashchange", openNamed);
}

function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(named instanceof HTMLDetailsElement)) return;
  named.open = true;
  named.scrollIntoView();
}

/* ---- the timeline: lanes of cycles, marks of failures, and a canvas with a row for each node, or for nodes alike */

function timeline(data) {
  const section = document.getElementById("timeline");
  const [tools, chart, lanes, marks, rows] = [".tools", ".chart", ".lanes", ".marks", ".rows"].map((name) => section.querySelector(name));
  const canvas = rows.querySelector("canvas");
  const spacer = rows.querySelector(".spacer");
  const said = tools.querySelector(".window");
  const each = tools.querySelector("[data-rows]");
  const tip = document.body.appendChild(make("div", { class: "tip", hidden: "", "aria-hidden": "true" }));
  const severity = data.kinds.map(([kind]) => WORST.length - WORST.indexOf(kind) * (WORST.includes(kind) ? 1 : 0) - (WORST.includes(kind) ? 0 : WORST.length));
  const until = Math.max(data.until, 1);
  let from = 0;
  let to = until;
  let shown = data.groups;
  let width = 0;
  let gutter = 0;
  let colours = [];

  if (!data.nodes.length) return;
  tools.hidden = chart.hidden = false;
  each.hidden = data.groups.length === data.nodes.length;
  legend(data, section.querySelector(".legend"));
  rows.setAttribute("aria-label", `What each of ${data.nodes.length} nodes did, over ${duration(until)}. The table Nodes has it in numbers.`
    + " Arrow keys move, plus and minus zoom.");

  const x = (at) => gutter + ((at - from) / (to - from)) * (width - gutter);
  const at = (px) => from + ((px - gutter) / (width - gutter)) * (to - from);

  function look(begin, end) {
    const most = until * 1.02;
    const wide = Math.min(Math.max(end - begin, Math.min(20, most)), most);
    from = Math.min(Math.max(begin, -until * 0.01), most - wide);
    to = from + wide;
    render();
  }
  const zoom = (factor, centre = (from + to) / 2) => look(centre - (centre - from) * factor, centre + (to - centre) * factor);

  function render() {
    const style = getComputedStyle(document.documentElement);
    colours = data.kinds.map(([kind]) => style.getPropertyValue(`--${kind}`).trim());
    width = chart.clientWidth;
    gutter = width < 560 ? 84 : Math.min(190, Math.max(120, width * 0.1));
    said.textContent = `${duration(Math.max(0, from))} to ${duration(Math.min(until, to))}`;
    renderLanes();
    renderMarks();
    renderRows();
    renderSteps(data, from, to, gutter);
  }

  function renderLanes() {
    const replicas = [...new Set(data.cycles.map((cycle) => cycle[1]))].slice(0, 6);
    const big = innerWidth >= 2560;
    const [axis, lane] = big ? [26, 26] : [20, 20];
    const svg = draw("svg", { height: axis + replicas.length * lane, viewBox: `0 0 ${width} ${axis + replicas.length * lane}` });
    for (const tick of ticks(Math.max(0, from), to, Math.max(2, (width - gutter) / 110))) {
      svg.append(draw("line", { class: "tick", x1: x(tick), x2: x(tick), y1: axis - 4, y2: axis + replicas.length * lane }));
      if (x(tick) < width - 30) svg.append(draw("text", { x: x(tick) + 3, y: axis - 6 }, tick ? `+${duration(tick)}` : "0"));
    }
    for (const [index, replica] of replicas.entries()) {
      const top = axis + index * lane;
      let drawn = -1;
      for (const [number, cycle] of data.cycles.filter((one) => one[1] === replica).entries()) {
        const [name, , opened, closed, , ended] = cycle;
        const [left, right] = [Math.max(gutter, x(opened)), Math.min(width, x(ended ?? until))];
        if (right < gutter || left > width || right <= drawn) continue;
        drawn = right - 0.5;
        svg.append(draw("rect", { class: `band${number % 2 ? " odd" : ""}`, x: left, y: top + 2, width: Math.max(1, right - left), height: lane - 4 }));
        const close = Math.min(width, x(closed ?? ended ?? until));
        if (number && close > left) svg.append(draw("rect", { class: "rendezvous", x: left, y: top + 2, width: Math.max(1, close - left), height: lane - 4 }));
        const label = name.slice(replica.length + 1);
        if (right - Math.max(left, close) > label.length * 6.5 + 8) svg.append(draw("text", { class: "inband", x: Math.max(left, close) + 4, y: top + lane - 6 }, label));
      }
      svg.append(draw("text", { x: 8, y: top + lane - 6 }, replica.length * 6.6 > gutter ? `${replica.slice(0, Math.floor(gutter / 6.6) - 1)}…` : replica));
    }
    lanes.replaceChildren(svg);
  }

  function renderMarks() {
    const clusters = [];
    for (const [index, [when]] of data.failures.entries()) {
      const px = x(when);
      if (px < gutter - 4 || px > width + 4) continue;
      const last = clusters.at(-1);
      if (last && px - last.px < 26) last.found.push(index);
      else clusters.push({ px, found: [index] });
    }
    marks.replaceChildren(...clusters.map(({ px, found }) => {
      const [when, why, kind] = data.failures[found[0]];
      const label = found.length > 1 ? `${found.length} failures from +${duration(when)}, the first: ${why}` : `+${duration(when)}: ${why}`;
      const button = make("button", { type: "button", "aria-label": label, text: found.length > 1 ? String(Math.min(found.length, 999)) : "!" });
      if (kind === "user") button.classList.add("user");
      button.style.left = `${Math.min(Math.max(px, gutter + 2), width - 13)}px`;
      button.addEventListener("click", () => {
        const named = document.getElementById(`failure-${Math.max(found[0], data.firstFailure)}`);
        if (!named) return;
        named.open = true;
        named.scrollIntoView({ block: "center" });
        named.querySelector("summary").focus();
      });
      hover(button, () => label);
      return button;
    }));
  }

  function renderRows() {
    const high = shown.length * ROW;
    spacer.style.height = `${high}px`;
    const seen = Math.min(rows.clientHeight || high, high);
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(seen * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${seen}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
    context.font = `${innerWidth >= 2560 ? 16 : 12}px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    const first = Math.floor(rows.scrollTop / ROW);
    for (let index = first; index < shown.length; index += 1) {
      const top = index * ROW - rows.scrollTop;
      if (top > seen) break;
      const [label, nodes] = shown[index];
      context.fillStyle = nodes.length > 1 ? ink : soft;
      context.save();
      context.beginPath();
      context.rect(0, top, gutter - 6, ROW);
      context.clip();
      context.fillText(nodes.length > 1 ? `${nodes.length} × ${label}` : label, 8, top + ROW / 2);
      context.restore();
      renderSpans(context, data.spans[nodes[0]], top);
      context.fillStyle = line;
      context.fillRect(0, top + ROW - 0.5, width, 0.5);
    }
  }

  /* At most one rectangle a pixel: where several spans share one, the gravest is drawn. */
  function renderSpans(context, spans, top) {
    let [edge, grave] = [-1, -1];
    for (let index = 0; index < spans.length; index += 4) {
      if (spans[index + 2] < from) continue;
      if (spans[index + 1] > to) break;
      const kind = spans[index];
      const left = Math.max(gutter, x(spans[index + 1]));
      const right = Math.max(left + 1, Math.min(width, x(spans[index + 2])));
      if (right <= edge + 0.5 && severity[kind] <= grave) continue;
      context.fillStyle = colours[kind];
      context.fillRect(left, top + 3, right - left, ROW - 6);
      if (data.kinds[kind][0] === "lost" && right - left > 6) hatch(context, left, top + 3, right - left, ROW - 6);
      [edge, grave] = right > edge + 0.5 ? [right, severity[kind]] : [edge, Math.max(grave, severity[kind])];
    }
  }

  function hatch(context, left, top, wide, high) {
    context.save();
    context.beginPath();
    context.rect(left, top, wide, high);
    context.clip();
    context.strokeStyle = "rgba(255, 255, 255, .45)";
    context.beginPath();
    for (let at = left - high; at < left + wide; at += 7) {
      context.moveTo(at, top + high);
      context.lineTo(at + high, top);
    }
    context.stroke();
    context.restore();
  }

  function under(event) {
    const box = rows.getBoundingClientRect();
    const row = shown[Math.floor((event.clientY - box.top + rows.scrollTop) / ROW)];
    if (!row) return "";
    const [label, nodes] = row;
    const name = nodes.length > 1 ? `${nodes.length} nodes that did the same: ${label}` : label;
    const when = at(event.clientX - box.left);
    const spans = data.spans[nodes[0]];
    for (let index = 0; event.clientX - box.left >= gutter && index < spans.length; index += 4) {
      const [kind, since, end, cycle] = spans.slice(index, index + 4);
      if (since <= when && when < end) {
        const where = cycle < 0 ? "" : `, ${data.cycles[cycle][0]}`;
        return `${name}\n${data.kinds[kind][1]}${where}\n+${duration(since)} to +${duration(end)}: ${duration(end - since)}`;
      }
    }
    return name;
  }

  function tell(event, what) {
    tip.textContent = what;
    tip.hidden = !what;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }

  function hover(element, what) {
    element.addEventListener("pointermove", (event) => tell(event, what(event)));
    element.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  let dragged = null;
  hover(canvas, (event) => (dragged === null ? under(event) : ""));
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return;
    dragged = { px: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged === null) return;
    const by = ((event.clientX - dragged.px) / (width - gutter)) * (dragged.to - dragged.from);
    look(dragged.from - by, dragged.to - by);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, at(event.clientX - rows.getBoundingClientRect().left)));
  rows.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event.clientX - rows.getBoundingClientRect().left));
  }, { passive: false });
  rows.addEventListener("keydown", (event) => {
    const by = (to - from) / 8;
    const keys = { ArrowLeft: () => look(from - by, to - by), ArrowRight: () => look(from + by, to + by), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: () => look(0, until) };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  tools.addEventListener("click", (event) => {
    const how = event.target.dataset.zoom;
    if (how) ({ in: () => zoom(0.5), out: () => zoom(2), all: () => look(0, until) })[how]();
  });
  each.addEventListener("click", () => {
    const all = each.getAttribute("aria-pressed") !== "true";
    each.setAttribute("aria-pressed", String(all));
    shown = all ? data.nodes.map((name, index) => [name, [index]]) : data.groups;
    render();
  });
  rows.addEventListener("scroll", renderRows);
  new ResizeObserver(() => { if (chart.clientWidth !== width) render(); }).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  look(0, until);
}

function legend(data, list) {
  const used = new Set();
  for (const spans of data.spans) for (let index = 0; index < spans.length; index += 4) used.add(spans[index]);
  list.replaceChildren(...data.kinds.flatMap(([kind, words], index) => (
    used.has(index) ? [make("li", {}, make("i", { class: `swatch ${kind}` }), words)] : []
  )));
}

/* ---- steps over time, in the timeline's window */

function renderSteps(data, from, to, gutter) {
  const place = document.querySelector(".steps");
  if (!place) return;
  const [width, high, foot] = [place.clientWidth, innerWidth >= 2560 ? 360 : 220, 22];
  const cycles = data.cycles.filter((cycle) => cycle[4] !== null && cycle[6] !== null && cycle[7] !== null);
  const most = Math.max(1, ...cycles.map((cycle) => cycle[7]));
  const x = (at) => gutter + ((at - from) / (to - from)) * (width - gutter);
  const y = (step) => high - foot - (step / most) * (high - foot - 12);
  const svg = draw("svg", { height: high, viewBox: `0 0 ${width} ${high}` });
  for (const step of roundTicks(most, 4)) {
    svg.append(draw("line", { class: "tick", x1: gutter, x2: width, y1: y(step), y2: y(step) }));
    svg.append(draw("text", { x: gutter - 8, y: y(step) + 4, "text-anchor": "end" }, step.toLocaleString("en")));
  }
  for (const tick of ticks(Math.max(0, from), to, Math.max(2, (width - gutter) / 110))) {
    if (x(tick) < width - 30) svg.append(draw("text", { x: x(tick) + 3, y: high - 6 }, tick ? `+${duration(tick)}` : "0"));
  }
  const inner = draw("svg", { x: gutter, y: 0, width: Math.max(0, width - gutter), height: high, viewBox: `${gutter} 0 ${Math.max(1, width - gutter)} ${high}` });
  const before = new Map();
  for (const [, replica, , , firstAt, ended, first, last] of cycles) {
    const end = ended ?? data.until;
    const known = before.get(replica);
    if (known && known.step > first) {
      const regained = last > known.step ? firstAt + ((end - firstAt) * (known.step - first)) / (last - first) : end;
      const top = Math.min(known.step, last);
      inner.append(draw("polygon", { class: "again", points: `${x(firstAt)},${y(first)} ${x(regained)},${y(top)} ${x(regained)},${y(first)}` }));
      inner.append(draw("line", { class: "dropped", x1: x(known.at), y1: y(known.step), x2: x(firstAt), y2: y(first) }));
    }
    inner.append(draw("path", { class: "made", d: `M${x(firstAt)} ${y(first)}L${x(end)} ${y(last)}` }));
    before.set(replica, { at: end, step: last });
  }
  svg.append(inner);
  place.setAttribute("aria-label", `Steps over time: ${cycles.length} cycles, up to step ${most}`);
  place.replaceChildren(svg);
}

/* ---- the journal: only the lines in sight are elements */

function journal(data) {
  const section = document.getElementById("journal");
  const [form, list, whole, found] = [".search", ".lines", ".line", ".found"].map((name) => section.querySelector(name));
  const spacer = list.querySelector(".spacer");
  const count = data.sentence.length;
  const times = new Float64Array(count);
  let sum = 0;
  data.at.forEach((by, index) => { sum += by; times[index] = sum; });
  const plain = data.sentence.map((sentence, index) => `${data.events[data.event[index]]} ${sentence}`.toLowerCase());
  const longest = data.sentence.reduce((most, sentence) => Math.max(most, sentence.length), 0);
  let shown = null;

  form.hidden = false;
  form.elements.event.append(...data.events.map((name, index) => make("option", { value: index, text: name })));

  const lineOf = (index) => [`+${(times[index] / 1000).toFixed(3)}s`.padEnd(14), data.events[data.event[index]].padEnd(22), data.sentence[index]];

  function filter() {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const event = form.elements.event.value;
    shown = [];
    for (let index = 0; index < count; index += 1) {
      if ((event === "" || data.event[index] === Number(event)) && words.every((word) => plain[index].includes(word))) shown.push(index);
    }
    found.textContent = shown.length < count ? `${shown.length.toLocaleString("en")} of ${count.toLocaleString("en")} entries` : `${count.toLocaleString("en")} entries`;
    list.scrollTop = 0;
    spacer.style.height = `${shown.length * LINE}px`;
    spacer.style.width = `${Math.min(longest + 40, 400)}ch`;
    render();
  }

  function render() {
    const first = Math.max(0, Math.floor(list.scrollTop / LINE) - 5);
    const lines = shown.slice(first, first + Math.ceil(list.clientHeight / LINE) + 10);
    spacer.replaceChildren(...lines.map((index, offset) => {
      const [time, event, sentence] = lineOf(index);
      const row = make("div", { class: "row" }, make("i", { text: time }), " ", make("b", { text: event }), " ", sentence.slice(0, 360));
      row.style.top = `${(first + offset) * LINE}px`;
      row.dataset.index = index;
      return row;
    }));
  }

  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    whole.hidden = false;
    whole.textContent = lineOf(Number(row.dataset.index)).map((part) => part.trimEnd()).join("  ");
  });
  list.addEventListener("scroll", render);
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const words = form.elements.words;
    if (event.key === "/" && document.activeElement !== words && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      words.focus();
    } else if (event.key === "Escape" && document.activeElement === words) {
      words.value = "";
      filter();
    }
  });
  new ResizeObserver(render).observe(list);
  filter();
}

readData().then(page);
