// What the reader does: point, click, search, jump, keys; and the start.

const $ = (id) => document.getElementById(id);
const RANKED = 1000;
const MODES = { control: "gain over the control", "no recall": "gain from recall", "no memory": "gain from memory" };
const state = { current: null, list: [], at: -1, kind: "" };
const rankings = {};

// The comparison that gains are against: that of the colours, or the first.
function reference() {
  return mode === "loss" ? index.comparisons[0][0] : mode;
}

// The tokens that gain most, or lose most, the largest first.
function ranking(kind) {
  const key = `${kind} ${reference()}`;
  return rankings[key] ??= largest(kind === "helped" ? gainOver(reference()) : gainOver(reference()).map((gain) => -gain));
}

// The positions of the largest values above 0, the largest first.
function largest(values) {
  const least = Math.max(values.slice().sort().at(-RANKED) ?? 0, 0.01), found = [];
  for (let i = 0; i < values.length; i++) if (values[i] >= least) found.push(i);
  return found.sort((a, b) => values[b] - values[a]).slice(0, RANKED);
}

// Show a token, or with null the overview. A token that is jumped to comes into view, and the browser's back button
// leads back.
function select(token, jump = false) {
  state.current = token;
  panelElement.classList.toggle("open", token !== null); // on a phone
  mark("current", token === null ? [] : [token]);
  show(token);
  if (token === null) {
    textElement.removeAttribute("aria-activedescendant");
    return;
  }
  if (jump) {
    scrollToToken(token);
    if (location.hash !== `#${token}`) location.hash = token;
  }
  textElement.setAttribute("aria-activedescendant", `t${token}`);
}

// Fill the panel, and mark the passages in the text.
function show(token) {
  const sources = [];
  if (!data.complete) return;
  if (token === null) showOverview();
  else {
    for (const { at, length } of showToken(token)) for (let i = at - length; i <= at; i++) sources.push(i);
  }
  mark("source", sources);
}

function say(token) {
  $("live").textContent = `${label(data.place[token])}: ${percent(Math.exp(-data.losses.model[token]))}, ${factor(gainOver(reference())[token])}`;
}

// --- lists to step through: gains, losses, hits of a search

function useList(kind, list, next = 0) {
  Object.assign(state, { kind, list, next, at: -1 });
  if (kind !== "hits") mark("hit", []);
  showPosition();
}

function step(direction) {
  const { list, at, next } = state;
  if (!list.length) return;
  const to = at >= 0 ? at + direction : direction > 0 ? next : next - 1;
  state.at = (to + list.length) % list.length;
  select(list[state.at], true);
  say(list[state.at]);
  showPosition();
}

function showPosition() {
  const name = { helped: "gain", hurt: "loss", hits: "hit" }[state.kind], number = whole(state.list.length);
  $("steps").hidden = !state.kind;
  $("position").replaceChildren(...(state.at < 0
    ? [`${number} ${name}${number === "1" ? "" : "s"}`]
    : [h("span", { class: "long" }, `${name} `), `${whole(state.at + 1)} of ${number}`]));
}

function jumpTo(kind) {
  useList(kind, ranking(kind));
  step(1);
}

const searched = { text: "", offsets: null };

function search(query) {
  if (!searched.offsets) {
    const lower = pieces.text.map((text) => text.toLowerCase().replace(/\s/g, " ")), parts = [];
    searched.offsets = new Uint32Array(count);
    for (let token = 0, length = 0; token < count; token++) {
      searched.offsets[token] = length;
      parts.push(lower[data.place[token]]);
      length += lower[data.place[token]].length;
    }
    searched.text = parts.join("");
  }
  const wanted = query.toLowerCase(), hits = [], tokens = [];
  for (let at = searched.text.indexOf(wanted); wanted && at >= 0; at = searched.text.indexOf(wanted, at + wanted.length)) {
    const first = lastUpTo(searched.offsets, at), last = lastUpTo(searched.offsets, at + wanted.length - 1);
    hits.push(first);
    for (let token = first; token <= last; token++) tokens.push(token);
  }
  const here = state.current ?? firstInView(), next = Math.max(0, hits.findIndex((token) => token >= here));
  useList(wanted ? "hits" : "", hits, next);
  mark("hit", tokens);
  if (hits.length) scrollToToken(hits[next]);
}

// --- colours

function setMode(name) {
  mode = name;
  $("mode").value = name;
  const scale = name === "loss" ? levels.loss : levels.gain, cells = [];
  const cell = (text, level) => h("span", { class: level }, text);
  if (name === "loss") {
    cells.push(h("span", { class: "name" }, "probability"), cell("≥ 50 %", ""));
    ["< 50 %", "< 10 %", "< 1 %", "< 0.1 %", "< 0.01 %"].forEach((text, i) => cells.push(cell(text, `loss s${i + 1}`)));
  } else {
    const factors = scale.map((nats) => rounded(Math.exp(nats)));
    cells.push(h("span", { class: "name" }, "less likely"));
    factors.toReversed().forEach((text, i) => cells.push(cell(`÷${text}`, `harm s${5 - i}`)));
    factors.forEach((text, i) => cells.push(cell(`×${text}`, `gain s${i + 1}`)));
    cells.push(h("span", { class: "name" }, " likelier"));
  }
  $("legend").replaceChildren(...cells);
  clearLines();
  drawMap();
  if (state.current === null) show(null);
}

function nextMode() {
  if (!data.complete) return;
  const names = [...$("mode").options].map((each) => each.value);
  setMode(names[(names.indexOf(mode) + 1) % names.length]);
}

// --- keys

// The token above or below, nearest in its place on the line.
function tokenInLine(token, direction) {
  const cell = document.getElementById(`t${token}`);
  let line = lineOf(token) + direction;
  while (line >= 0 && line < layout.lines && layout.kind[line] !== TEXT) line += direction;
  if (!cell || line < 0 || line >= layout.lines) return token;
  scrollToToken(layout.first[line]);
  const { left, right } = document.getElementById(`t${token}`)?.getBoundingClientRect() ?? { left: 0, right: 0 };
  const distance = (each) => {
    const box = each.getBoundingClientRect();
    return Math.abs(box.left + box.right - left - right);
  };
  const nearest = [...drawn.get(line).children].reduce((best, each) => (distance(each) < distance(best) ? each : best));
  return Number(nearest.id.slice(1));
}

function move(key) {
  const from = state.current;
  let to = firstInView();
  if (from !== null && key === "ArrowLeft") to = Math.max(0, from - 1);
  if (from !== null && key === "ArrowRight") to = Math.min(count - 1, from + 1);
  if (from !== null && key === "ArrowUp") to = tokenInLine(from, -1);
  if (from !== null && key === "ArrowDown") to = tokenInLine(from, 1);
  scrollToToken(to);
  select(to);
  say(to);
}

function escape() {
  if ($("search").value || state.kind) {
    $("search").value = "";
    useList("", []);
  } else select(null);
  textElement.focus({ preventScroll: true });
}

const keys = {
  g: () => jumpTo("helped"), l: () => jumpTo("hurt"), n: () => step(1), p: () => step(-1), c: nextMode, t: () => switchTheme(),
  "/": () => $("search").focus(), "?": () => $("help").showModal(), Escape: escape,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = event.target === $("search"), arrows = event.key.startsWith("Arrow");
  if (typing && event.key === "Enter") step(event.shiftKey ? -1 : 1);
  else if (typing && event.key !== "Escape") return;
  else if (event.target.tagName === "SELECT" && event.key !== "Escape") return;
  else if (arrows && !panelElement.contains(event.target)) move(event.key);
  else if (event.key in keys) keys[event.key]();
  else return;
  event.preventDefault();
}

// --- the start

function tokenAt(target) {
  const id = target.closest?.(".t")?.id;
  return id ? Number(id.slice(1)) : null;
}

function listen() {
  let pending = false;
  textElement.addEventListener("scroll", () => {
    if (!pending) requestAnimationFrame(() => { pending = false; drawLines(); });
    pending = true;
  }, { passive: true });
  linesElement.addEventListener("pointerover", (event) => {
    const token = tokenAt(event.target);
    if (event.pointerType === "mouse" && token !== null && state.current === null) show(token);
  });
  linesElement.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    if (token !== null) select(token === state.current ? null : token);
  });
  textElement.addEventListener("pointerleave", () => { if (state.current === null) show(null); });
  const goTo = (event) => {
    const box = mapElement.getBoundingClientRect();
    textElement.scrollTop = ((event.clientY - box.top) / box.height) * layout.lines * LINE - textElement.clientHeight / 2;
  };
  const frame = $("map-frame");
  frame.addEventListener("pointerdown", (event) => { frame.setPointerCapture(event.pointerId); goTo(event); });
  frame.addEventListener("pointermove", (event) => { if (event.buttons) goTo(event); });
  document.addEventListener("keydown", onKey);
  $("search").addEventListener("input", () => search($("search").value));
  $("mode").addEventListener("change", () => setMode($("mode").value));
  $("helped").addEventListener("click", () => jumpTo("helped"));
  $("hurt").addEventListener("click", () => jumpTo("hurt"));
  $("next").addEventListener("click", () => step(1));
  $("previous").addEventListener("click", () => step(-1));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("about-button").addEventListener("click", () => { select(null); panelElement.classList.add("open"); });
  addEventListener("themechange", drawMap);
  addEventListener("hashchange", fromAddress);
  new ResizeObserver(() => {
    const token = firstInView(), moved = textElement.scrollTop > 0;
    layOut();
    if (moved) textElement.scrollTop = lineOf(token) * LINE;
    drawMap();
  }).observe(textElement);
}

// The token whose number the address ends with, after #.
function fromAddress() {
  const token = Number(location.hash.slice(1) || NaN);
  if (token !== state.current && token >= 0 && token < count) select(Math.floor(token), true);
}

async function start() {
  await loadText();
  $("mode").append(...index.comparisons.map(([name]) => h("option", { value: name }, MODES[name])),
    h("option", { value: "loss" }, "probability"));
  mode = index.comparisons[0][0];
  layOut();
  setMode(mode);
  listen();
  performance.mark("text");
  if (document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  await loadDetails();
  $("mode").disabled = false;
  fromAddress();
  show(state.current);
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
}

start();
