"use strict";
// The data of the page: an index in JSON, and columns of numbers, which are unpacked once.

const index = JSON.parse(document.getElementById("index").textContent);
const { pieces, recall, slots } = index;
const count = index.tokens;
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f2: Uint16Array };
const data = {};

const HALF = new Float32Array(65536); // the value of each half-precision number
for (let bits = 0; bits < HALF.length; bits++) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  HALF[bits] = (bits >> 15 ? -1 : 1) * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)); // slower
}

// The numbers of a column; null if the page does not have it.
async function column(name) {
  const element = document.querySelector(`[data-column="${name}"]`);
  if (!element) return null;
  const unpacked = new Blob([bytesOf(element.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  element.remove();
  const values = new TYPES[index.types[name]](await new Response(unpacked).arrayBuffer());
  if (index.types[name] !== "f2") return values;
  const numbers = new Float32Array(values.length);
  for (let i = 0; i < values.length; i++) numbers[i] = HALF[values[i]];
  return numbers;
}

// What laying out the text and colouring it needs: the tokens, and the losses that are compared first.
async function loadText() {
  const first = ["model", index.comparisons[0][0]];
  const [place, ...losses] = await Promise.all([column("place"), ...first.map((name) => column(`loss ${name}`))]);
  data.place = place;
  data.losses = Object.fromEntries(first.map((name, i) => [name, losses[i]]));
  data.ids = new Uint32Array(count);
  for (let i = 0; i < count; i++) data.ids[i] = pieces.id[place[i]];
}

// All the rest.
async function loadDetails() {
  const names = ["weights", "detailed", "own-pieces", "own-probabilities", "mixed-pieces", "mixed-probabilities",
    "attention", "filters"];
  for (const name of names) data[name] = await column(name);
  for (const name of index.series) data.losses[name] ??= await column(`loss ${name}`);
  data.complete = true;
}

const gains = {};

// How much lower the loss of each token is than in a comparison, in nats.
function gainOver(name) {
  return gains[name] ??= data.losses[name].map((loss, i) => loss - data.losses.model[i]);
}

// The largest position of a sorted array whose value is at most this.
function lastUpTo(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// Where the stream of a token begins, the token's place in it, and the first position of its window there. Position 0
// of a stream holds end-of-text, position j its j-th token.
function placeOf(token) {
  const start = index.streams[lastUpTo(index.streams, token)];
  const inStream = token - start, window = index.model.window;
  return { start, inStream, windowStart: inStream - (inStream % window), inWindow: inStream % window };
}

// The number of a token among those with details; -1 if it has none.
function detailOf(token) {
  const found = lastUpTo(data.detailed, token);
  return found >= 0 && data.detailed[found] === token ? found : -1;
}

// The most likely tokens of a source at a token with details: pieces and probabilities.
function likeliest(source, detail) {
  const found = data[`${source}-pieces`], number = found.length / index.details;
  return Array.from({ length: number }, (_, i) => {
    const at = i * index.details + detail;
    return { piece: found[at], probability: data[`${source}-probabilities`][at] };
  });
}
