// What recall found for a token, looked up again as recall/naive.py defines it, and what the slots hold of the past.

// What followed the tokens before this one at all earlier places of the stream within reach, nearest first. `each` gets
// the place, its lag, the bin of the lag, and how many of the tokens before it are those before this token.
function forEachMatch(token, each) {
  const { start } = placeOf(token), { ids } = data, { orders, edges } = recall;
  const reach = Math.min(recall.reach, token - start);
  for (let lag = 1, bin = 0; lag <= reach; lag++) {
    while (lag > edges[bin]) bin++;
    const at = token - lag, most = Math.min(orders, at - start);
    let length = 0;
    while (length < most && ids[at - 1 - length] === ids[token - 1 - length]) length++;
    each(at, lag, bin, length);
  }
}

// The components of the mixture for a token, by length and lag of the match: their weight, the number of matches, and
// how often each token followed. A match of n tokens is also one of fewer. With them the matches of a token or more.
function componentsOf(token) {
  const bins = recall.edges.length, matches = [];
  const components = Array.from({ length: (recall.orders + 1) * bins }, (_, i) => ({
    length: Math.floor(i / bins), bin: i % bins, weight: data.weights[(i + 1) * count + token], matches: 0, copies: new Map(),
  }));
  forEachMatch(token, (at, lag, bin, length) => {
    for (let order = 0; order <= length; order++) {
      const component = components[order * bins + bin], id = data.ids[at];
      component.matches++;
      component.copies.set(id, (component.copies.get(id) || 0) + 1);
    }
    if (length) matches.push({ at, lag, bin, length });
  });
  return { matches, components };
}

// How much of the whole prediction each match adds to its follower, the largest first.
function passagesOf({ matches, components }) {
  const bins = recall.edges.length;
  const share = components.map((each) => (each.matches ? each.weight / each.matches : 0));
  for (let i = bins; i < share.length; i++) share[i] += share[i - bins]; // a match is also one of fewer tokens
  return matches.map((match) => ({ ...match, weight: share[match.length * bins + match.bin] }))
    .sort((a, b) => b.weight - a.weight || a.lag - b.lag);
}

// What each source adds to the probability of the token: the model, and copies by length of the match.
function sourcesOf(token, { components }) {
  const own = Math.exp(-data.losses["no recall"][token]) * data.weights[token];
  const copied = new Array(recall.orders + 1).fill(0);
  for (const { length, weight, matches, copies } of components) {
    if (matches) copied[length] += weight * (copies.get(data.ids[token]) || 0) / matches;
  }
  return { own, copied };
}

// The weights of a slot: the lag of the first, and where they are in the column of all slots.
function filterOf(slot) {
  const [first, last] = slots.spans[slot];
  let offset = 0;
  for (const [from, to] of slots.spans.slice(0, slot)) offset += to - from + 1;
  return { first, last, weights: data.filters.subarray(offset, offset + last - first + 1) };
}

// The tokens that a slot holds most of, before the window of a token: their share of the slot's weight, and how many
// times their share of the text that is.
function wordsOf(slot, token) {
  const { start, windowStart } = placeOf(token), { first, last, weights } = filterOf(slot), sums = new Map(), often = frequencies();
  let total = 0;
  for (let lag = first; lag <= last && lag < windowStart; lag++) {
    const weight = weights[lag - first], id = data.ids[start + windowStart - lag - 1];
    sums.set(id, (sums.get(id) || 0) + weight);
    total += weight;
  }
  return [...sums].map(([id, sum]) => ({ id, share: sum / total, times: (sum / total) / (often.get(id) / count) }))
    .sort((a, b) => b.share - a.share);
}

let counted = null;

// How often each token occurs in the text.
function frequencies() {
  if (!counted) {
    counted = new Map();
    for (const id of data.ids) counted.set(id, (counted.get(id) || 0) + 1);
  }
  return counted;
}

// The lags at which a slot's weight is at least half of its largest.
function lagsOf(slot) {
  const { first, weights } = filterOf(slot), large = (weight) => weight >= 0.5;
  return [first + weights.findIndex(large), first + weights.findLastIndex(large)];
}
