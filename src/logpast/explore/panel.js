// The panel: all that is known about a token, or an overview of the text.

const panelElement = document.getElementById("panel");
const WORDS = 8, PASSAGES = 8, SLOTS = 4, BEFORE = 8;

// An element with attributes and children; texts are always shown as text.
function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") element.addEventListener("click", value); else element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// 43 %, 4.3 %, 0.043 %, or 1 in 23,000.
function percent(probability) {
  if (probability === 1) return "100 %";
  if (probability >= 0.995) return probability > 0.9995 ? ">99.9 %" : `${(100 * probability).toFixed(1)} %`;
  if (probability >= 0.0995) return `${Math.round(100 * probability)} %`;
  if (probability >= 0.0001) return `${Number((100 * probability).toPrecision(2))} %`;
  return probability > 0 ? `1 in ${rounded(1 / probability)}` : "0";
}

const thousands = new Intl.NumberFormat("en");

// A number of two digits.
function rounded(number) {
  return number < 1e15 ? thousands.format(Number(number.toPrecision(2))) : number.toExponential(0);
}

// ×8.1, ÷120: how many times likelier.
function factor(nats) {
  return `${nats >= 0 ? "×" : "÷"}${rounded(Math.exp(Math.abs(nats)))}`;
}

// A whole number, with thousands between commas.
function whole(number) {
  return thousands.format(number);
}

// A token by itself: spaces and line breaks can be seen.
function label(piece) {
  return (pieces.label[piece] ?? pieces.text[piece]).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

let pieceOf = null;

function labelOfToken(id) {
  if (!pieceOf) {
    pieceOf = new Map();
    pieces.id.forEach((each, piece) => { if (!pieceOf.has(each)) pieceOf.set(each, piece); });
  }
  return label(pieceOf.get(id));
}

// The text of some tokens on one line.
function textOf(from, to) {
  let text = "";
  for (let token = Math.max(0, from); token < Math.min(to, count); token++) text += pieces.text[data.place[token]];
  return text.replace(/\s+/g, " ");
}

function chip(name, number, isTarget) {
  return h("span", { class: isTarget ? "chip target" : "chip" }, name, " ", h("small", {}, number));
}

function section(title, ...children) {
  return [h("h3", {}, title), ...children.flat().filter(Boolean)];
}

// --- a token

// Fill the panel. Returns the passages that it shows.
function showToken(token) {
  const detail = detailOf(token), found = recall && componentsOf(token), passages = recall ? passagesOf(found) : [];
  const parts = [heading(token), probabilities(token)];
  if (recall) parts.push(sources(token, found));
  if (recall || slots) parts.push(timeAxis(token, passages, detail));
  if (recall) parts.push(passageList(passages, found));
  if (slots) parts.push(slotList(token, detail));
  parts.push(candidates(token, detail, found));
  panelElement.replaceChildren(...parts.flat().filter(Boolean));
  panelElement.scrollTop = 0;
  return passages.slice(0, PASSAGES);
}

function heading(token) {
  const { inWindow } = placeOf(token), piece = data.place[token];
  const document_ = index.documents[lastUpTo(index.documents.map(([start]) => start), token)][1];
  const where = `token ${whole(token + 1)} of ${whole(count)}, ${inWindow + 1} of ${whole(index.model.window)} in its window`;
  const titles = index.documents.length > 1 ? `${where}, in ${document_}` : where;
  return [
    h("div", { class: "sheet-head" },
      h("h2", {}, h("span", { class: "book" }, `… ${textOf(token - BEFORE, token)}`), h("mark", { class: "book" }, label(piece))),
      closeButton()),
    h("p", { class: "note" }, titles + (pieces.text[piece] ? "" : "; a part of a character, which stands at its last part")),
  ];
}

function closeButton() {
  return h("button", { class: "button", id: "close", type: "button", "aria-label": "close", onclick: () => select(null) }, "✕");
}

// The probability, and a table of it without each part of the past.
function probabilities(token) {
  const losses = data.losses, own = losses.model[token];
  const cell = (name) => name in losses
    ? h("td", {}, percent(Math.exp(-losses[name][token])), h("br"), h("small", {}, `${losses[name][token].toFixed(2)} nats`))
    : h("td", {}, "–");
  const memory = index.memory === "state" ? "state" : "memory";
  const parts = [h("p", { class: "big" }, percent(Math.exp(-own)))];
  for (const [name, title] of index.comparisons) {
    const gain = losses[name][token] - own;
    if (Math.abs(gain) < 0.01 && name !== reference()) continue;
    parts.push(h("p", {}, h("span", { class: `verdict ${gain >= 0 ? "gain" : "harm"}` }, `${factor(gain)} `),
      `${gain >= 0 ? "likelier" : "less likely"} than for ${title} (${percent(Math.exp(-losses[name][token]))})`));
  }
  const rows = [];
  if (recall && "no memory" in losses) {
    rows.push(h("tr", {}, h("td"), h("th", { scope: "col" }, "with recall"), h("th", { scope: "col" }, "without recall")),
      h("tr", {}, h("th", { scope: "row" }, `with ${memory}`), cell("model"), cell("no recall")),
      h("tr", {}, h("th", { scope: "row" }, `without ${memory}`), cell("no memory"), cell("neither")));
  }
  if (rows.length) parts.push(h("table", {}, rows));
  return parts;
}

// Shades of the copies by length of the match: the longer, the stronger.
function shade(length) {
  return `color-mix(in srgb, var(--recall) ${Math.round(30 + (70 * length) / Math.max(1, recall.orders))}%, var(--shade))`;
}

function sources(token, found) {
  const { own, copied } = sourcesOf(token, found), total = own + copied.reduce((sum, each) => sum + each, 0);
  if (!(total > 0)) return [];
  const parts = [["the model itself", own, "var(--control)"]];
  copied.forEach((each, length) => parts.push([
    length ? `copies after ${length} equal token${length > 1 ? "s" : ""}` : "frequent tokens", each, shade(length)]));
  const kept = parts.filter(([, each]) => each / total >= 0.005);
  return section("Where this probability comes from",
    h("div", { class: "bar", "aria-hidden": "true" }, kept.map(([, each, colour]) =>
      h("span", { style: `width: ${(100 * each) / total}%; background: ${colour}` }))),
    h("ul", { class: "keylist" }, kept.map(([name, each, colour]) =>
      h("li", {}, h("span", { class: "key", style: `background: ${colour}` }), `${name} ${percent(each / total)}`))));
}

// Passages above a logarithmic time axis, attention to slots below it; now is at the right.
function timeAxis(token, passages, detail) {
  const { inWindow, windowStart } = placeOf(token);
  const reach = Math.max(recall ? recall.reach : 1, slots ? slots.peaks[slots.peaks.length - 1] + index.model.window : 1);
  const width = 380, upper = recall ? 70 : 8, lower = slots && detail >= 0 ? 42 : 0;
  const x = (back) => width - (width * Math.log(Math.max(back, 1))) / Math.log(reach);
  const parts = [svg("rect", { class: "window", x: x(inWindow + 1), y: upper - 4, width: width - x(inWindow + 1), height: 8 })];
  const most = passages.length ? passages[0].weight : 0, top = (each) => upper - (upper - 6) * (each.weight / most);
  if (most) {
    const rest = passages.slice(PASSAGES).map((each) => `M${x(each.lag).toFixed(1)} ${upper}V${top(each).toFixed(1)}`);
    parts.push(svg("path", { class: "rest", d: rest.join("") }));
  }
  for (const each of most ? passages.slice(0, PASSAGES) : []) {
    const stem = svg("g", { class: "passage" }, svg("title", {}, `${whole(each.lag)} tokens ago: ${percent(each.weight)}`),
      svg("line", { class: "stem", x1: x(each.lag), x2: x(each.lag), y1: upper, y2: top(each), style: `stroke: ${shade(each.length)}` }),
      svg("circle", { class: "dot", cx: x(each.lag), cy: top(each), r: 3, style: `fill: ${shade(each.length)}` }));
    stem.addEventListener("click", () => select(each.at, true));
    parts.push(stem);
  }
  if (most) {
    const at = x(passages[0].lag), right = at < width / 2;
    parts.push(svg("text", { class: "name", x: at + (right ? 7 : -7), y: 9, "text-anchor": right ? "start" : "end" },
      `${label(data.place[passages[0].at])} ${percent(most)}`));
  }
  if (lower && windowStart) {
    const weights = attentionOf(detail), largest = Math.max(...weights);
    weights.forEach((weight, slot) => {
      const height = (lower - 4) * (weight / largest), at = x(slots.peaks[slot] + inWindow + 1);
      parts.push(svg("rect", { class: "attention", x: at - 1.5, y: upper + 5, width: 3, height },
        svg("title", {}, `slot of lag ${whole(Math.round(slots.peaks[slot]))}: ${percent(weight)} of attention`)));
    });
  }
  parts.push(svg("line", { class: "axis", x1: 0, x2: width, y1: upper, y2: upper }));
  for (let back = 1; back <= reach; back *= 8) {
    parts.push(svg("line", { class: "axis", x1: x(back), x2: x(back), y1: upper - 3, y2: upper + 3 }),
      svg("text", { x: x(back), y: upper + lower + 18, "text-anchor": back === 1 ? "end" : x(back) < 20 ? "start" : "middle" }, back === 1 ? "1 token ago" : whole(back)));
  }
  const words = [recall && "copies by weight (above)", lower && windowStart && "attention to slots (below)", "the window (grey)"];
  return section("The past, on a logarithmic time axis",
    svg("svg", { viewBox: `-6 0 ${width + 12} ${upper + lower + 24}`, role: "img",
      "aria-label": `${passages.length} earlier passages over the number of tokens since then` }, ...parts),
    h("p", { class: "note" }, words.filter(Boolean).join(", ")));
}

function passageList(passages, found) {
  const all = found.components.reduce((sum, each) => sum + each.weight, 0);
  const title = `Passages that recall used: ${percent(all)} of the prediction`;
  if (!passages.length) return section(title, h("p", { class: "note" }, "The tokens before this one do not occur earlier."));
  const rows = passages.slice(0, PASSAGES).map((each) => h("li", {}, h("button", { type: "button", onclick: () => select(each.at, true) },
    h("span", { class: "book" }, `… ${textOf(each.at - Math.max(BEFORE, each.length + 3), each.at)}`, h("b", {}, label(data.place[each.at]))),
    h("br"), h("small", {}, `${percent(each.weight)} · ${whole(each.lag)} tokens ago · ${each.length}${each.length === recall.orders ? " or more" : ""} equal`))));
  const rest = passages.length - rows.length;
  return section(title, h("ul", { class: "list" }, rows), rest ? h("p", { class: "note" }, `and ${whole(rest)} more`) : null);
}

function attentionOf(detail) {
  return slots.peaks.map((_, slot) => data.attention[slot * index.details + detail]);
}

// Of the words in a slot, those that are much more frequent there than in the whole text.
function typical(words) {
  const weight = (each) => each.share * Math.log(each.times);
  return words.filter((each) => each.times >= 2).sort((a, b) => weight(b) - weight(a));
}

function slotList(token, detail) {
  const { windowStart } = placeOf(token);
  if (detail < 0) return section("Slots", h("p", { class: "note" }, `Attention is kept for the ${whole(index.details)} tokens that gain or lose most.`));
  if (!windowStart) return section("Slots", h("p", { class: "note" }, "The slots are empty in the first window of a text."));
  const weights = attentionOf(detail), total = weights.reduce((sum, each) => sum + each, 0);
  const order = weights.map((_, slot) => slot).sort((a, b) => weights[b] - weights[a]).slice(0, SLOTS);
  const chips = (words) => words.slice(0, WORDS).map((each) => chip(labelOfToken(each.id), percent(each.share), each.id === data.ids[token]));
  const rows = order.map((slot) => {
    const words = wordsOf(slot, token), [from, to] = lagsOf(slot), lags = from === to ? whole(from) : `${whole(from)}–${whole(to)}`;
    const title = h("p", {}, h("b", {}, percent(weights[slot])), ` of attention: ${lags} ${to === 1 ? "token" : "tokens"} before the window`);
    return h("div", { class: "words" }, title, words.length < 2
      ? h("div", {}, words.length ? ["holds ", h("span", { class: "chip" }, labelOfToken(words[0].id))] : "empty")
      : [h("div", {}, "holds most of ", chips(words)),
        words.length > WORDS ? h("div", {}, "more than usual ", chips(typical(words))) : null]);
  });
  return section(`Slots that attention looked at: ${percent(total)} of it`, rows);
}

function candidates(token, detail, found) {
  const target = data.ids[token], rows = [];
  const row = (title, list) => rows.push(h("div", { class: "source-row" }, h("div", {}, title), list.map(({ id, piece, probability }) =>
    chip(piece === undefined ? labelOfToken(id) : label(piece), percent(probability), (id ?? pieces.id[piece]) === target))));
  if (detail >= 0) {
    if (recall) row("mixture of all", likeliest("mixed", detail));
    row(recall ? "the model alone" : "the model", likeliest("own", detail));
  }
  if (found) {
    const used = found.components.filter((each) => each.weight >= 0.005 && each.matches).sort((a, b) => b.weight - a.weight);
    for (const { length, bin, weight, matches, copies } of used.slice(0, 6)) {
      const best = [...copies].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([id, hits]) => ({ id, probability: hits / matches }));
      const lags = `${whole(bin ? recall.edges[bin - 1] + 1 : 1)}–${whole(recall.edges[bin])}`;
      const what = length ? `${length} equal token${length > 1 ? "s" : ""}` : "all tokens";
      row(`copies, ${what}, lag ${lags}: weight ${percent(weight)}`, best);
    }
  }
  const note = detail < 0 ? h("p", { class: "note" }, `The model's candidates are kept for the ${whole(index.details)} tokens that gain or lose most.`) : null;
  return section("Most likely tokens by source", rows, note);
}

// --- the overview

function showOverview() {
  const means = index.means, { model, control } = index, compared = new Map(index.comparisons).get(reference());
  const about = (each) => `${each.name} (${each.system}, ${rounded(each.parameters)} parameters, window ${whole(each.window)}`
    + `${each.history ? `, history ${whole(each.history)}` : ""}${each.recall ? `, recall ${whole(each.recall)}` : ""})`;
  const names = { model: "the model", "no recall": "without recall", "no memory": "without memory", neither: "without both", control: "control" };
  const rows = index.series.map((each) => h("tr", {}, h("th", { scope: "row" }, names[each]),
    h("td", {}, Math.exp(means[each]).toFixed(2)), h("td", {}, means[each].toFixed(4))));
  panelElement.replaceChildren(
    h("div", { class: "sheet-head" }, h("h2", {}, `${whole(count)} tokens, one by one`), closeButton()),
    h("p", {}, "Point at a token to see what its prediction is made of."),
    index.overlap ? h("p", { class: "warning" }, `Not unseen text: ${index.overlap}.`) : "",
    h("table", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "perplexity"), h("th", { scope: "col" }, "nats per token")), rows),
    h("p", { class: "note" }, `Model: ${about(model)}. `, control ? `Control: ${about(control)}.` : `Compared with ${compared}.`),
    ...section(`Helped most, against ${compared}`, rankList("helped", 12)),
    ...section("Hurt most", rankList("hurt", 6)));
}

function rankList(kind, number) {
  return h("ul", { class: "list" }, ranking(kind).slice(0, number).map((token) =>
    h("li", {}, h("button", { type: "button", onclick: () => select(token, true) },
      h("small", { class: "factor" }, factor(gainOver(reference())[token])),
      h("span", { class: "book" }, `… ${textOf(token - BEFORE, token)}`, h("b", {}, label(data.place[token])))))));
}
