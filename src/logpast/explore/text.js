// The text: laid out in lines of equal height, of which only those in view exist, and a map of it.

const textElement = document.getElementById("text");
const linesElement = document.getElementById("lines");
const mapElement = document.getElementById("map");
const viewElement = document.getElementById("view");
const LINE = 30; // height, as in explore.css
const SPARE = 12; // lines above and below the view
const TEXT = 0, TITLE = 1, BLANK = 2;

const levels = {
  loss: [0.5, 0.1, 0.01, 0.001, 0.0001].map((probability) => -Math.log(probability)),
  gain: [1.2, 2, 5, 20, 100].map(Math.log),
};
const layout = { first: new Uint32Array(1), kind: new Uint8Array(1), wrapped: new Uint8Array(1), lines: 0, width: 0 };
const drawn = new Map(); // number of a line -> its element
const marks = { current: new Set(), source: new Set(), hit: new Set() };
let mode = "loss";

// How a token stands in the text. A line break is a sign, but a space in a text that was broken into lines before.
const shown = pieces.text.map((text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥ "));
const isBreak = pieces.text.map((text) => text.includes("\n"));
const onlyBreaks = pieces.text.map((text) => /^\n+$/.test(text));

// Whether lines end where the page was full, as in a text file of 70 columns, rather than where a sentence does.
function isHardWrapped() {
  let length = 0, full = 0, all = 0;
  for (let i = 0; i < count; i++) {
    const text = pieces.text[data.place[i]];
    if (!isBreak[data.place[i]]) { length += text.length; continue; }
    if (text === "\n" && i + 1 < count && !isBreak[data.place[i + 1]] && length) {
      all++;
      full += length >= 50 && length <= 90;
    }
    length = 0;
  }
  return full > all / 2;
}

function measure() {
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.font = getComputedStyle(linesElement).font;
  return Float32Array.from(shown, (text) => canvas.measureText(text).width);
}

// Break the text into lines that fit the width. A line starts with a space or after one where possible.
function layOut() {
  const probe = linesElement.appendChild(document.createElement("div"));
  probe.className = "line";
  layout.width = probe.clientWidth - 4; // letters of two tokens may be set closer than they are measured
  probe.remove();
  if (layout.hardWrapped === undefined) {
    layout.hardWrapped = isHardWrapped();
    if (layout.hardWrapped) pieces.text.forEach((text, piece) => { if (text === "\n") shown[piece] = " "; });
    layout.widths = measure();
  }
  layout.opens ??= pieces.text.map((text) => /^\s|^[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]/u.test(text));
  layout.closes ??= pieces.text.map((text) => /[\s\u2010-\u2014-]$|[\u2e80-\u9fff\uff00-\uffef]$/u.test(text));
  const { widths, opens, closes, width } = layout;
  const first = [], kind = [], wrapped = [];
  const add = (what, token, continues) => { first.push(token); kind.push(what); wrapped.push(continues ? 1 : 0); };
  const titles = index.documents.length > 1 ? index.documents : [];
  let title = 0, start = 0, used = 0, breakAt = -1, usedAtBreak = 0, continues = false;
  for (let i = 0; i < count; i++) {
    const piece = data.place[i];
    if (title < titles.length && titles[title][0] === i) {
      if (i > start) add(TEXT, start, continues);
      if (title) add(BLANK, i);
      add(TITLE, i);
      start = i; used = 0; breakAt = -1; continues = false; title++;
    }
    if (i > start && (opens[piece] || closes[data.place[i - 1]])) { breakAt = i; usedAtBreak = used; }
    used += widths[piece];
    if (used > width && i > start && !onlyBreaks[piece]) {
      const at = breakAt > start ? breakAt : i;
      add(TEXT, start, continues);
      used -= at === i ? used - widths[piece] : usedAtBreak;
      start = at; breakAt = -1; continues = true;
    }
    const next = i + 1 < count ? data.place[i + 1] : -1;
    if (isBreak[piece] && !(next >= 0 && onlyBreaks[next])) {
      const several = pieces.text[piece].split("\n").length > 2 || (i > start && isBreak[data.place[i - 1]]);
      if (layout.hardWrapped && !several && next >= 0) continue;
      add(TEXT, start, continues);
      if (several) add(BLANK, i + 1);
      start = i + 1; used = 0; breakAt = -1; continues = false;
    }
  }
  if (start < count) add(TEXT, start, continues);
  Object.assign(layout, {
    first: Uint32Array.from([...first, count]), kind: Uint8Array.from(kind), wrapped: Uint8Array.from(wrapped), lines: kind.length,
  });
  linesElement.style.height = `${layout.lines * LINE + 2 * LINE}px`;
  textElement.setAttribute("aria-rowcount", layout.lines);
  clearLines();
}

function clearLines() {
  for (const element of drawn.values()) element.remove();
  drawn.clear();
  drawLines();
}

// The line that a token is in.
function lineOf(token) {
  return Math.max(0, Math.min(lastUpTo(layout.first, token), layout.lines - 1));
}

// The colour of a token, as classes: the scale and a step from 1 to 5; none in the middle of the scale.
function levelOf(token) {
  const value = mode === "loss" ? data.losses.model[token] : gainOver(mode)[token];
  const scale = mode === "loss" ? levels.loss : levels.gain, size = Math.abs(value);
  let level = 0;
  while (level < scale.length && size > scale[level]) level++;
  return level ? ` ${mode === "loss" ? "loss" : value > 0 ? "gain" : "harm"} s${level}` : "";
}

function makeToken(token, leading) {
  const span = document.createElement("span"), piece = data.place[token];
  const text = shown[piece];
  span.textContent = leading && text.startsWith(" ") && text.length > 1 ? text.slice(1) : text;
  span.id = `t${token}`;
  span.setAttribute("role", "gridcell");
  let name = `t${levelOf(token)}`;
  if (onlyBreaks[piece]) name += " faint";
  for (const kind in marks) if (marks[kind].has(token)) name += ` ${kind}`;
  span.className = name;
  return span;
}

function makeLine(number) {
  const line = document.createElement("div"), from = layout.first[number];
  line.className = "line";
  line.style.transform = `translateY(${(number + 0.5) * LINE}px)`;
  line.setAttribute("role", "row");
  line.setAttribute("aria-rowindex", number + 1);
  if (layout.kind[number] === TITLE) {
    line.classList.add("title");
    const cell = line.appendChild(document.createElement("span"));
    cell.setAttribute("role", "gridcell");
    cell.textContent = index.documents[lastUpTo(index.documents.map(([start]) => start), from)][1];
  } else {
    for (let token = from; token < layout.first[number + 1]; token++) {
      line.append(makeToken(token, token === from && layout.wrapped[number]));
    }
  }
  return line;
}

// Make the lines that came into view, and remove those that left it.
function drawLines() {
  const top = textElement.scrollTop, from = Math.max(0, Math.floor(top / LINE) - SPARE);
  const to = Math.min(layout.lines, Math.ceil((top + textElement.clientHeight) / LINE) + SPARE);
  for (const [number, element] of drawn) if (number < from || number >= to) { element.remove(); drawn.delete(number); }
  const fresh = document.createDocumentFragment();
  for (let number = from; number < to; number++) {
    if (drawn.has(number) || layout.kind[number] === BLANK) continue;
    const line = makeLine(number);
    drawn.set(number, line);
    fresh.append(line);
  }
  linesElement.append(fresh);
  const part = mapElement.clientHeight / Math.max(layout.lines, 1);
  viewElement.style.transform = `translateY(${(top / LINE) * part}px)`;
  viewElement.style.height = `${Math.max(8, (textElement.clientHeight / LINE) * part)}px`;
}

// Give these tokens, and no others, a mark: `current`, `source` or `hit`.
function mark(kind, tokens) {
  for (const element of linesElement.querySelectorAll(`.${kind}`)) element.classList.remove(kind);
  marks[kind] = new Set(tokens);
  for (const line of drawn.values()) {
    for (const cell of line.children) if (marks[kind].has(Number(cell.id.slice(1)))) cell.classList.add(kind);
  }
  drawMarks();
}

// The height of the text that can be seen: on a phone, the panel covers the rest.
function heightInView() {
  const { top, bottom } = textElement.getBoundingClientRect(), panel = document.getElementById("panel").getBoundingClientRect();
  return (panel.height && panel.left < 1 && panel.top > top ? Math.min(bottom, panel.top) : bottom) - top;
}

function scrollToToken(token) {
  const line = lineOf(token) * LINE, height = heightInView(), y = line - textElement.scrollTop;
  if (y < LINE || y > height - 3 * LINE) textElement.scrollTop = line - height / 3;
  drawLines();
}

// The first token that can be seen.
function firstInView() {
  return Math.min(layout.first[lineOf(0) + Math.ceil(textElement.scrollTop / LINE)] ?? 0, count - 1);
}

const background = document.createElement("canvas"); // the map without marks

function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The map: the mean of each stretch of the text, in the colours of the text.
function drawMap() {
  const width = mapElement.clientWidth, height = mapElement.clientHeight, pen = background.getContext("2d");
  mapElement.width = background.width = width * devicePixelRatio;
  mapElement.height = background.height = height * devicePixelRatio;
  pen.scale(devicePixelRatio, devicePixelRatio);
  const part = height / layout.lines, step = Math.max(1, Math.ceil(2 / part));
  const values = mode === "loss" ? data.losses.model : gainOver(mode);
  const [loss, gain, harm] = ["loss", "gain", "harm"].map(themeColour);
  for (let line = 0; line < layout.lines; line += step) {
    const from = layout.first[line], to = layout.first[Math.min(line + step, layout.lines)];
    let sum = 0;
    for (let token = from; token < to; token++) sum += values[token];
    const mean = to > from ? sum / (to - from) : 0;
    pen.fillStyle = mode === "loss" ? loss : mean > 0 ? gain : harm;
    pen.globalAlpha = Math.min(1, mode === "loss" ? (mean / 8) ** 2 : Math.abs(mean) / 1.5);
    pen.fillRect(0, line * part, width, Math.max(1, step * part));
  }
  drawMarks();
}

// The marked tokens on the map.
function drawMarks() {
  const pen = mapElement.getContext("2d"), part = mapElement.height / layout.lines;
  pen.clearRect(0, 0, mapElement.width, mapElement.height);
  pen.drawImage(background, 0, 0);
  for (const [kind, name] of [["hit", "mark"], ["source", "recall"], ["current", "ink"]]) {
    pen.fillStyle = themeColour(name);
    for (const token of marks[kind]) pen.fillRect(0, lineOf(token) * part - 1, mapElement.width, 3);
  }
}
