"use strict";
/* Of what this is. */
function showTitle() {
  element("model").replaceChildren();
  if (plan.model) element("model").append(" of ", add(element("model"), "b", plan.model));
  element("budget").textContent = bytes(plan.budget_bytes);
  element("about").replaceChildren();
  const about = [plan.batch, plan.device, `written ${plan.written}`].filter(Boolean);
  for (const text of about) add(element("about"), "span", text);
  document.title = `${plan.model || "A step"} within ${bytes(plan.budget_bytes)}`;
}

/* A colour, a line or a frame, and what it means. */
function legend(list, style, text, wanted) {
  const item = add(element(list), "li");
  Object.assign(add(item, "i").style, style);
  add(item, "span", text);
  if (!wanted) return;
  item.addEventListener("mouseenter", () => mark(wanted));
  item.addEventListener("mouseleave", () => mark(null));
}

function showLegends() {
  for (const list of ["lanes", "activations", "others"]) element(list).replaceChildren();
  const happen = new Set(plan.events.map(fateOf));
  for (const [name, colour] of Object.entries(fates))
    if (happen.has(name)) legend("lanes", { background: `var(${colour})` }, name);
  const line = (style) => ({ height: "0", borderRadius: "0", borderTop: style });
  legend("lanes", line("2px dashed var(--accent)"), "budget");
  if (plan.measured_peak_bytes) legend("lanes", line("2px dotted var(--ink)"), "measured peak");
  if (plan.kept) {
    const cut = plan.baseline_bytes > most ? ", cut off above" : "";
    const frame = { background: "var(--kept)", border: "1px solid var(--soft)" };
    legend("lanes", frame, `the step with everything kept${cut}`);
  }
  [...plan.areas].reverse().forEach((area, i) => {
    const index = plan.areas.length - 1 - i;
    const peak = heights[index].reduce((a, b) => Math.max(a, b));
    const text = `${area.name}, ${bytes(peak)}`;
    const list = area.kind === "ACTIVATIONS" ? "activations" : "others";
    legend(list, { background: area.colour }, text, (life) => life.area === index);
  });
}

/* Figures and summary. */
function showFigures() {
  const more = plan.baseline_s ? plan.predicted_s / plan.baseline_s : 1;
  const figures = [
    ["predicted peak", bytes(plan.counted_bytes), "counted_bytes",
      `${((100 * plan.counted_bytes) / plan.budget_bytes).toFixed(1)} % of the budget`],
    ["with everything kept", bytes(plan.baseline_bytes), "baseline_bytes", ""],
    ["least feasible budget", bytes(plan.least_budget_bytes), "least_budget_bytes", ""],
    ["predicted time", seconds(plan.predicted_s), "predicted_s", `${more.toFixed(3)} × everything kept`],
  ];
  if (plan.measured_peak_bytes)
    figures.splice(1, 0, ["measured peak", bytes(plan.measured_peak_bytes), "measured_peak_bytes",
      "of the latest observed step"]);
  if (plan.host_bytes) figures.push(["host memory", bytes(plan.host_bytes), "host_bytes", ""]);
  element("figures").replaceChildren();
  for (const [name, text, field, note] of figures) {
    const item = add(element("figures"), "li");
    add(item, "small", name);
    add(item, "b", text, { id: field }).dataset.value = plan[field];
    add(item, "small", note || " ");
  }
  element("summary").replaceChildren();
  for (const [name, text] of plan.summary) {
    add(element("summary"), "dt", name);
    add(element("summary"), "dd", text);
  }
}

/* The frontier. */
function showFrontier() {
  element("budgets").hidden = !plan.frontier.length;
  if (!plan.frontier.length) return;
  const svg = element("frontier"), wide = svg.clientWidth || 560, end = wide - 32;
  svg.setAttribute("viewBox", `0 0 ${wide} 300`);
  svg.replaceChildren();
  const make = (tag, fields, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    svg.append(made);
    return made;
  };
  const all = [...plan.frontier, [plan.counted_bytes, plan.predicted_s]];
  const [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]), plan.budget_bytes)];
  const [y0, y1] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const x = (n) => 62 + ((end - 62) * (n - x0)) / (x1 - x0 || 1);
  const y = (s) => 250 - (216 * (s - y0)) / (y1 - y0 || 1);
  const ticks = Math.max(1, Math.min(4, Math.floor((end - 62) / 90)));
  for (let i = 0; i <= 4; i++) {
    const s = y0 + ((y1 - y0) * i) / 4;
    make("line", { x1: 62, x2: end, y1: y(s), y2: y(s), stroke: "var(--line)" });
    make("text", { x: 54, y: y(s) + 4, "text-anchor": "end" }, seconds(s));
  }
  for (let i = 0; i <= ticks; i++) {
    const n = x0 + ((x1 - x0) * i) / ticks;
    make("text", { x: x(n), y: 272, "text-anchor": "middle" }, bytes(n));
  }
  make("text", { x: (62 + end) / 2, y: 292, "text-anchor": "middle" }, "budget");
  make("line", { x1: x(plan.budget_bytes), x2: x(plan.budget_bytes), y1: 24, y2: 250,
    stroke: "var(--accent)", "stroke-dasharray": "5 4" });
  const points = plan.frontier;
  let path = "";
  points.forEach(([n, s], i) => { path += i ? `H${x(n)}V${y(s)}` : `M${x(n)} ${y(s)}`; });
  make("path", { d: `${path}H${x(x1)}`, fill: "none", stroke: "var(--soft)", "stroke-width": 2 });
  if (points.length < 200) for (const [n, s] of points) {
    const dot = make("circle", { cx: x(n), cy: y(s), r: 2.6, fill: "var(--soft)" });
    dot.addEventListener("mousemove", (event) => tell([["b", bytes(n)], ["span", seconds(s)]], event));
    dot.addEventListener("mouseleave", (event) => tell([], event));
  }
  make("circle", { cx: x(plan.counted_bytes), cy: y(plan.predicted_s), r: 6, fill: "none",
    stroke: "var(--ink)", "stroke-width": 2 });
}

/* The table. */
const headings = [
  ["stage", "stage", String], ["module", "module"], ["forward", "forward_s", seconds],
  ["boundary", "boundary_bytes", bytes], ["saved", "saved_bytes", bytes],
  ["held", "held_bytes", bytes], ["on the host", "moved_bytes", bytes],
  ["again", "extra_s", seconds], ["what happens to it, and why", "fate"],
];
let sorted = ["stage", 1];

/* Nothing is done to a stage that is kept: where several follow each other, a row tells of all. */
const isPlain = (stage) => !stage.extra_s && !stage.moved_bytes && stage.held_bytes === stage.saved_bytes;
const unfolded = new Set();

function folded(stages) {
  const found = new Map();
  runs(stages.length, (i) => isPlain(stages[i]), (from, to) => {
    if (isPlain(stages[from]) && to - from > 1) found.set(stages[from], stages.slice(from, to));
  });
  return found;
}

/* The row that tells of `stages`; returns the list of their own rows, to be shown by a click. */
function foldRow(body, stages, columns) {
  const [first, last] = [stages[0], stages[stages.length - 1]];
  const held = stages.reduce((sum, stage) => sum + stage.held_bytes, 0);
  const line = add(body, "tr", undefined, { className: "fold" });
  const cell = add(line, "td", undefined, { colSpan: columns });
  const rows = [];
  const toggle = (open) => {
    cell.textContent = `${open ? "▾" : "▸"} stages ${first.stage}–${last.stage}: kept, ${bytes(held)}`;
    for (const row of rows) row.hidden = !open;
    unfolded[open ? "add" : "delete"](first.stage);
  };
  toggle(false);
  line.addEventListener("click", () => toggle(!unfolded.has(first.stage)));
  return rows;
}

function showTable() {
  const shown = headings.filter(([, field]) => plan.stages.some((stage) => stage[field]));
  const [head, body] = ["thead", "tbody"].map((part) => document.querySelector(`#stages ${part}`));
  head.replaceChildren();
  body.replaceChildren();
  const row = add(head, "tr");
  for (const [name, field, format] of shown) {
    const cell = add(row, "th", name, { className: format ? "number" : "" });
    cell.dataset.field = field;
    if (field === sorted[0]) cell.ariaSort = sorted[1] > 0 ? "ascending" : "descending";
    cell.addEventListener("click", () => {
      sorted = [field, field === sorted[0] ? -sorted[1] : format && field !== "stage" ? -1 : 1];
      showTable();
    });
  }
  const [by, sign] = sorted;
  const order = (a, b) => (a[by] < b[by] ? -sign : a[by] > b[by] ? sign : a.stage - b.stage);
  const stages = [...plan.stages].sort(order);
  const folds = sorted[0] === "stage" ? folded(stages) : new Map();
  let fold = null;
  for (const stage of stages) {
    if (folds.has(stage)) fold = foldRow(body, folds.get(stage), shown.length);
    const line = add(body, "tr");
    if (fold && isPlain(stage)) fold.push(line);
    else fold = null;
    line.hidden = Boolean(fold);
    for (const [, field, format] of shown) {
      const text = format && (stage[field] || field === "stage") ? format(stage[field]) : stage[field] || "";
      const cell = add(line, "td", text, { className: format ? "number" : field });
      cell.dataset[field] = stage[field];
    }
    line.addEventListener("mouseenter", () =>
      mark((life) => plan.tensors[life.tensor][2] === stage.stage));
    line.addEventListener("mouseleave", () => mark(null));
  }
}

/* What is held at the peak: the first rows, and the others after a click. */
const mostHolders = 8;
let allHolders = false;

function showHolders() {
  const [head, body] = ["thead", "tbody"].map((part) => document.querySelector(`#holders ${part}`));
  head.replaceChildren();
  body.replaceChildren();
  const row = add(head, "tr");
  for (const [name, kind] of [["held", "number"], ["share", "number"], ["what it is", ""],
    ["made by", ""], ["what would free it", ""]]) add(row, "th", name, { className: kind });
  const rest = plan.at_peak.length - mostHolders;
  const shown = allHolders || rest < 2 ? plan.at_peak : plan.at_peak.slice(0, mostHolders);
  for (const holder of shown) {
    const line = add(body, "tr", undefined, { className: "holder" });
    add(line, "td", bytes(holder.nbytes), { className: "number" }).dataset.held_bytes = holder.nbytes;
    add(line, "td", `${(100 * holder.share).toFixed(1)} %`, { className: "number" });
    line.style.setProperty("--share", holder.share);
    add(line, "td", holder.text);
    add(add(line, "td"), "code", holder.place);
    add(line, "td", holder.how_to_free);
    const own = new Set(holder.tensors);
    line.addEventListener("mouseenter", () => mark((life) => own.has(life.tensor)));
    line.addEventListener("mouseleave", () => mark(null));
  }
  if (shown.length === plan.at_peak.length) return;
  const sum = plan.at_peak.slice(mostHolders).reduce((all, holder) => all + holder.nbytes, 0);
  const line = add(body, "tr", undefined, { className: "more" });
  add(line, "td", `▸ ${rest} more, ${bytes(sum)}`, { colSpan: 5 });
  line.addEventListener("click", () => { allHolders = true; showHolders(); });
}

/* Graphs of a step that has several. */
const regionHeadings = [
  ["region", "region"], ["covers", "covers"], ["forward", "forward_s", seconds],
  ["held", "held_bytes", bytes], ["peak", "peak_bytes", bytes], ["its plan", "what"],
  ["ended by", "ended_by"], ["then", "after"],
];

function showRegions() {
  element("parts").hidden = !plan.regions.length;
  const [head, body] = ["thead", "tbody"].map((part) => document.querySelector(`#regions ${part}`));
  head.replaceChildren();
  body.replaceChildren();
  if (!plan.regions.length) return;
  const row = add(head, "tr");
  for (const [name, , format] of regionHeadings)
    add(row, "th", name, { className: format ? "number" : "" });
  for (const region of plan.regions) {
    const line = add(body, "tr");
    for (const [, field, format] of regionHeadings) {
      const text = format ? format(region[field]) : region[field];
      const cell = add(line, "td", text, { className: format ? "number" : field });
      cell.dataset[field] = region[field];
    }
    const [first, after] = region.stages;
    line.addEventListener("mouseenter", () => mark((life) => {
      const stage = plan.tensors[life.tensor][2];
      return stage >= first && stage < after;
    }));
    line.addEventListener("mouseleave", () => mark(null));
    line.addEventListener("click", () => {
      view = [region.begin_s, Math.max(region.end_s, region.begin_s + 1e-9)];
      draw();
      element("step").scrollIntoView({ block: "center" });
    });
  }
}

function show() {
  showTitle();
  showFigures();
  showHolders();
  showLegends();
  showRegions();
  showFrontier();
  showTable();
  draw();
}

const asked = location.hash.slice(1);
const dark = asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";
document.body.dataset.peakBytes = totals.reduce((a, b) => Math.max(a, b), 0);
listen();
show();
document.body.dataset.drawn = "yes";
