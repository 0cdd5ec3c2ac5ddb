"use strict";
const plan = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* Bytes and seconds for people, as everywhere in fxremat. */
function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${n.toFixed(0)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}
function seconds(s) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]])
    if (s * factor >= 1 || unit === "µs") return `${Number((s * factor).toPrecision(3))} ${unit}`;
}
function add(parent, tag, text, fields = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  Object.assign(made, fields);
  parent.append(made);
  return made;
}

/* The step: instants on an axis of seconds with a gap for the loss point, and one after the end. */
const count = plan.times_s.length;
const gap = plan.makespan_s * 0.015 || 1;
const lossS = plan.times_s[plan.loss_point];
const begins = plan.times_s.map((t, i) => (i > plan.loss_point ? t + gap : t));
const whole = [0, Math.max(begins[count - 1], plan.makespan_s + gap) + gap];
const onAxis = (t, isEnd) => (t > lossS || (t === lossS && !isEnd) ? t + gap : t);

/* Lives: tensor, first instant, instant after the last, area. Lowest area first. */
const lives = [];
for (let i = 0; i < plan.lives.length; i += 4) {
  const [tensor, begin, end, area] = plan.lives.slice(i, i + 4);
  lives.push({ tensor, begin, end, area, nbytes: plan.tensors[tensor][1] });
}
const heights = plan.areas.map(() => new Float64Array(count + 1));
for (const life of lives) {
  heights[life.area][life.begin] += life.nbytes;
  heights[life.area][life.end] -= life.nbytes;
}
const totals = new Float64Array(count);
for (const height of heights)
  for (let i = 0, now = 0; i < count; i++) {
    now += height[i];
    height[i] = now;
    totals[i] += now;
  }
for (const stage of plan.stages) stage.fate = `${stage.what}: ${stage.why}`;
const stageOf = new Map(plan.stages.map((stage) => [stage.stage, stage]));
const copies = plan.events.filter((event) => event[1] !== "compute");

/* What is computed and copied, each in a colour of its own. */
const fates = {
  forward: "--forward", "forward again": "--again", backward: "--backward", copies: "--copy",
};
const fateOf = ([op, lane, begin]) =>
  lane !== "compute" ? "copies" : op.startsWith("B") ? "backward" : begin >= lossS ? "forward again" : "forward";

/* Layout of the picture, in CSS pixels. */
const left = 74, right = 12, top0 = 16, memoryHeight = 340, laneHeight = 17, laneGap = 5;
const hostHeight = plan.host_bytes ? 46 : 0;
const lanes = ["compute", "D2H", "H2D"].filter((lane) => lane === "compute" || copies.length);
const laneNames = { compute: "compute", D2H: "to host", H2D: "from host" };
const lanesTop = top0 + memoryHeight + 30 + (hostHeight ? hostHeight + 12 : 0);
const fullHeight = lanesTop + lanes.length * (laneHeight + laneGap) + 2;
/* The step with everything kept may be many times as high: what is above is cut off. */
const own = Math.max(plan.budget_bytes, plan.peak_bytes);
const most = Math.max(own, plan.kept ? Math.min(plan.baseline_bytes, 2.2 * own) : 0) * 1.07;
let view = whole, columns = [], width = 0;

const toX = (u) => left + ((u - view[0]) / (view[1] - view[0])) * (width - left - right);
const toU = (x) => view[0] + ((x - left) / (width - left - right)) * (view[1] - view[0]);
const toY = (n) => top0 + memoryHeight * (1 - n / most);

function instantAt(u) {
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (begins[middle] <= u) low = middle;
    else high = middle - 1;
  }
  return low;
}

/* For each column of pixels the instant at which most is held, so that no peak is lost. */
function chooseColumns(scale) {
  columns = [];
  for (let x = left; x < width - right; x += 1 / scale) {
    const last = instantAt(toU(x + 1 / scale));
    let best = instantAt(toU(x));
    for (let i = best + 1; i <= last; i++) if (totals[i] > totals[best]) best = i;
    columns.push(best);
  }
}

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  width = element("step").clientWidth;
  canvas.width = width * scale;
  canvas.height = fullHeight * scale;
  canvas.style.height = `${fullHeight}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return [pen, scale];
}

function draw() {
  const [pen, scale] = prepare(element("memory"));
  prepare(element("marks"));
  chooseColumns(scale);
  drawScale(pen);
  if (plan.kept) drawKept(pen);
  const base = new Float64Array(columns.length);
  plan.areas.forEach((area, index) => {
    pen.fillStyle = area.colour;
    runs(columns.length, (c) => columns[c], (from, to) => {
      const nbytes = heights[index][columns[from]];
      const y = toY(base[from] + nbytes);
      if (nbytes) pen.fillRect(left + from / scale, y, (to - from) / scale, toY(base[from]) - y);
      for (let c = from; c < to; c++) base[c] += nbytes;
    });
  });
  drawLine(pen, plan.budget_bytes, "--accent", [6, 4], `budget ${bytes(plan.budget_bytes)}`);
  drawPeak(pen);
  const measured = plan.measured_peak_bytes;
  if (measured) drawLine(pen, measured, "--ink", [1, 3]);
  if (hostHeight) drawHost(pen);
  drawLanes(pen);
}

/* Calls `each` for runs of equal values. */
function runs(length, value, each) {
  for (let from = 0; from < length; ) {
    let to = from + 1;
    while (to < length && value(to) === value(from)) to++;
    each(from, to);
    from = to;
  }
}

function step(range, wanted) {
  const raw = range / wanted, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
}

function drawScale(pen) {
  pen.strokeStyle = theme("--line");
  pen.fillStyle = theme("--soft");
  pen.lineWidth = 1;
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024)));
  const every = step(most / unit, 6) * unit;
  pen.textAlign = "right";
  for (let n = 0; n <= most; n += every) {
    const y = Math.round(toY(n)) + 0.5;
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
    pen.fillText(bytes(n), left - 8, y);
  }
  pen.textAlign = "center";
  const perTick = step(view[1] - view[0], Math.max(2, (width - left - right) / 72));
  for (let t = 0; t <= plan.makespan_s; t += perTick) {
    const x = toX(onAxis(t, true));
    if (x < left || x > width - right) continue;
    pen.fillText(t ? seconds(t) : "0", x, top0 + memoryHeight + 12);
  }
  const atLoss = [toX(lossS), toX(lossS + gap)];
  if (atLoss[0] > left && atLoss[1] < width - right) {
    pen.fillText("loss", (atLoss[0] + atLoss[1]) / 2, top0 - 8);
  }
}

function drawLine(pen, nbytes, colour, dashes, text = "") {
  const y = Math.round(toY(nbytes)) + 0.5;
  pen.strokeStyle = pen.fillStyle = theme(colour);
  pen.setLineDash(dashes);
  pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
  pen.setLineDash([]);
  pen.textAlign = "left";
  pen.fillText(text, left + 6, y - 8);
}

/* A line at the instant of the peak. */
function drawPeak(pen) {
  const x = Math.round(toX(begins[plan.peak_instant])) + 0.5;
  if (x < left || x > width - right) return;
  pen.strokeStyle = pen.fillStyle = theme("--ink");
  pen.setLineDash([2, 3]);
  pen.beginPath(); pen.moveTo(x, top0); pen.lineTo(x, top0 + memoryHeight); pen.stroke();
  pen.setLineDash([]);
  const nearLoss = Math.abs(x - toX(lossS + gap / 2)) < 32;
  pen.textAlign = nearLoss ? "left" : "center";
  pen.fillText("peak", nearLoss ? x + 16 : x, top0 - 8);
}

/* The same step with everything kept: its backward begins where the plan's does. */
function drawKept(pen) {
  const { seconds: each, peaks_bytes: peaks, loss_point: lossPoint, loss_point_bytes: atLoss } = plan.kept;
  const floor = top0 + memoryHeight, height = (n) => Math.max(toY(n), top0);
  pen.save();
  pen.beginPath(); pen.rect(left, 0, width - left - right, floor); pen.clip();
  pen.beginPath();
  pen.moveTo(toX(0), floor);
  let at = 0, end = toX(0);
  each.forEach((s, i) => {
    if (i === lossPoint) {
      pen.lineTo(end, height(atLoss));
      pen.lineTo(toX(lossS + gap), height(atLoss));
      at = lossS + gap;
    }
    pen.lineTo(toX(at), height(peaks[i]));
    at += s;
    end = toX(at);
    pen.lineTo(end, height(peaks[i]));
  });
  pen.lineTo(end, floor);
  pen.fillStyle = theme("--kept");
  pen.fill();
  pen.strokeStyle = theme("--soft");
  pen.stroke();
  pen.restore();
}

/* Host memory from the start of each copy there to the end of that back. */
function drawHost(pen) {
  const changes = [];
  for (const [, lane, begin, end, , nbytes] of copies)
    changes.push(lane === "D2H" ? [onAxis(begin), nbytes] : [onAxis(end, true), -nbytes]);
  changes.sort((a, b) => a[0] - b[0]);
  const bottom = top0 + memoryHeight + 26 + hostHeight;
  const scale = (hostHeight - 6) / plan.host_bytes;
  pen.save();
  pen.beginPath(); pen.rect(left, 0, width - left - right, fullHeight); pen.clip();
  pen.fillStyle = theme("--copy");
  pen.globalAlpha = 0.65;
  let now = 0;
  changes.forEach(([u, change], i) => {
    now += change;
    const next = i + 1 < changes.length ? changes[i + 1][0] : u;
    const x = Math.round(toX(u));
    pen.fillRect(x, bottom - now * scale, Math.round(toX(next)) - x, now * scale);
  });
  pen.restore();
  pen.fillStyle = theme("--soft");
  pen.textAlign = "right";
  pen.fillText("host", left - 8, bottom - hostHeight / 2 + 6);
  pen.fillText(bytes(plan.host_bytes), left - 8, bottom - hostHeight / 2 - 7);
}

const laneY = (lane) => lanesTop + lanes.indexOf(lane) * (laneHeight + laneGap);

function drawLanes(pen) {
  pen.textAlign = "right";
  for (const lane of lanes) {
    pen.fillStyle = theme("--soft");
    pen.fillText(laneNames[lane], left - 8, laneY(lane) + laneHeight / 2);
    pen.fillStyle = theme("--line");
    pen.fillRect(left, laneY(lane), width - left - right, laneHeight);
  }
  pen.save();
  pen.beginPath(); pen.rect(left, lanesTop, width - left - right, fullHeight); pen.clip();
  for (const event of plan.events) {
    const [, lane, begin, end] = event;
    const x = toX(onAxis(begin)), wide = toX(onAxis(end, true)) - x;
    pen.fillStyle = theme(fates[fateOf(event)]);
    pen.fillRect(x, laneY(lane), Math.max(wide - (wide > 3 ? 0.7 : 0), 0.6), laneHeight);
  }
  pen.restore();
}

/* What is pointed at. */
function lifeAt(x, y) {
  const scale = window.devicePixelRatio || 1;
  const instant = columns[Math.floor((x - left) * scale)];
  let from = 0;
  for (const life of lives) {
    if (life.begin > instant || life.end <= instant) continue;
    if (y <= toY(from) && y > toY(from + life.nbytes)) return life;
    from += life.nbytes;
  }
  return null;
}

function eventAt(x, y) {
  const lane = lanes.find((l) => y >= laneY(l) && y <= laneY(l) + laneHeight);
  const u = toU(x);
  return lane && plan.events.find((e) => e[1] === lane && onAxis(e[2]) <= u && u <= onAxis(e[3], true));
}

/* The first column that shows `instant` or a later one. */
function columnFrom(instant) {
  let low = 0, high = columns.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (columns[middle] < instant) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* Draws over all lives for which `wanted` holds. */
function mark(wanted) {
  const [pen, scale] = prepare(element("marks"));
  if (!wanted) return;
  const base = new Float64Array(columns.length);
  pen.fillStyle = theme("--ink");
  pen.globalAlpha = 0.55;
  for (const life of lives) {
    const shown = wanted(life), last = columnFrom(life.end);
    for (let c = columnFrom(life.begin); c < last; c++) {
      if (shown) {
        const y = toY(base[c] + life.nbytes);
        pen.fillRect(left + c / scale, y, 1 / scale, toY(base[c]) - y);
      }
      base[c] += life.nbytes;
    }
  }
}

const tip = element("tip");
function tell(lines, event) {
  tip.replaceChildren();
  lines.filter((line) => line && line[1]).forEach(([tag, text]) => {
    add(add(tip, "div"), tag, text);
  });
  tip.hidden = !lines.length;
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${x}px`;
  tip.style.top = `${below ? event.clientY + 16 : event.clientY - 10 - tip.offsetHeight}px`;
}

const fate = (stage) => stageOf.get(stage)?.fate ?? "";

function aboutLife(life) {
  const [name, nbytes, stage, operation, module, kind] = plan.tensors[life.tensor];
  const own = lives.filter((other) => other.tensor === life.tensor);
  const again = own.indexOf(life) > 0 && life.begin > plan.loss_point && kind === "ACTIVATIONS";
  const travelled = copies.some((copy) => copy[0] === `copy ${name}`);
  const made = operation ? `${operation}${module ? ` in ${module}` : ""}` : "";
  const how = again ? (travelled ? "back from the host" : "computed again") : "";
  return [
    ["b", name],
    ["div", `${bytes(nbytes)} of ${plan.areas[life.area].kind === kind ? label(kind) : name}`],
    ["span", [made, how].filter(Boolean).join(", ")],
    ["span", stage >= 0 ? `stage ${stage}` : ""],
    ["span", kind === "ACTIVATIONS" ? fate(stage) : ""],
  ];
}

const label = (kind) =>
  kind === "ACTIVATIONS" ? "activations" : plan.areas.find((area) => area.kind === kind).name;

function aboutEvent([op, , begin, end, stage, nbytes, peak]) {
  const module = stageOf.get(stage)?.module;
  return [
    ["b", op],
    ["div", `${seconds(end - begin)}, from ${seconds(begin)} on`],
    ["span", nbytes ? bytes(nbytes) : `peak ${bytes(peak)}`],
    ["span", `stage ${stage}${module ? `, ${module}` : ""}`],
    ["span", fate(stage)],
  ];
}

let dragged = null;
function onMove(event) {
  const box = element("marks").getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  if (dragged !== null) {
    const [pen] = prepare(element("marks"));
    pen.fillStyle = theme("--ink");
    pen.globalAlpha = 0.12;
    pen.fillRect(Math.min(x, dragged), top0, Math.abs(x - dragged), fullHeight - top0);
    return;
  }
  const inside = x >= left && x < width - right;
  const life = inside && y < top0 + memoryHeight ? lifeAt(x, y) : null;
  const happens = inside && !life ? eventAt(x, y) : null;
  if (life) mark((other) => other.tensor === life.tensor);
  else mark(happens && ((other) => plan.tensors[other.tensor][2] === happens[4]));
  tell(life ? aboutLife(life) : happens ? aboutEvent(happens) : [], event);
}

function listen() {
  const marks = element("marks");
  const at = (event) => event.clientX - marks.getBoundingClientRect().left;
  marks.addEventListener("mousemove", onMove);
  marks.addEventListener("mouseleave", (event) => { dragged = null; mark(null); tell([], event); });
  marks.addEventListener("mousedown", (event) => { dragged = at(event); tell([], event); });
  marks.addEventListener("mouseup", (event) => {
    const [a, b] = [dragged, at(event)].sort((p, q) => p - q);
    dragged = null;
    if (b - a > 6) view = [Math.max(toU(a), whole[0]), Math.min(toU(b), whole[1])];
    draw();
  });
  marks.addEventListener("dblclick", () => { view = whole; draw(); });
  window.addEventListener("resize", () => { draw(); showFrontier(); });
  element("theme").addEventListener("click", () => {
    const root = document.documentElement.dataset;
    root.theme = root.theme === "dark" ? "light" : "dark";
    show();
  });
}
