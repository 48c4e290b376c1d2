// Attention of one query in parts: a state is { out, lse }, and states merge. The formulas are those of mla/state.py.

// Attention over some keys; over none it is the neutral element, (0, -inf). `values` has `width` numbers a key.
export function attend(scores, values, width) {
  const most = Math.max(...scores); // -Infinity for none
  const weights = scores.map((score) => Math.exp(score - most));
  const total = weights.reduce((a, b) => a + b, 0);
  const column = (i) => weights.reduce((a, weight, s) => a + weight * values[s][i], 0) / (total || 1);
  return { out: Array.from({ length: width }, (_, i) => column(i)), lse: total ? most + Math.log(total) : -Infinity };
}

// The weights of two states: e^(lse - m), both 0 where neither has a key.
export function weights(a, b) {
  const m = Math.max(a.lse, b.lse);
  return m === -Infinity ? [0, 0] : [Math.exp(a.lse - m), Math.exp(b.lse - m)];
}

export function merge(a, b) {
  const [wa, wb] = weights(a, b), total = wa + wb;
  return {
    out: a.out.map((x, i) => (total ? (wa * x + wb * b.out[i]) / total : 0)),
    lse: total ? Math.max(a.lse, b.lse) + Math.log(total) : -Infinity,
  };
}

// What a kernel that computes with powers of 2 hands out: the same output, the logarithm to base 2.
export function base2({ out, lse }) {
  return { out, lse: lse / Math.LN2 };
}

export const HANDED = ["natural", "second", "both", "none"];

// Keys 0 .. split - 1 and the rest apart, then merged. `handed`: natural; second (the second part's logarithm is to
// base 2); both (of both parts); none (no logarithm: averaged by the number of keys). `share` is what each part counts.
export function split(scores, values, at, handed) {
  const width = values[0].length, n = scores.length;
  const part = (first, last) => attend(scores.slice(first, last), values.slice(first, last), width);
  const whole = part(0, n);
  let [a, b] = [part(0, at), part(at, n)], share;
  if (handed === "both") a = base2(a);
  if (handed === "both" || handed === "second") b = base2(b);
  let merged = merge(a, b);
  if (handed === "none") {
    share = [at / n, (n - at) / n];
    merged = { out: a.out.map((x, i) => share[0] * x + share[1] * b.out[i]), lse: null };
  } else {
    const [wa, wb] = weights(a, b);
    share = [wa / (wa + wb), wb / (wa + wb)];
  }
  const norm = (x) => Math.hypot(...x);
  const off = norm(merged.out.map((x, i) => x - whole.out[i])) / norm(whole.out);
  return { a, b, merged, whole, share, off };
}

// Whole numbers from a seed, the same on every machine, made into scores and values in steps of 1/8.
export function draw(seed, keys, width, kind) {
  let state = seed >>> 0;
  const next = (steps) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 4294967296) * steps);
  };
  const scores = Array.from({ length: keys }, () => (next(33) - 16) / 8);
  const values = Array.from({ length: keys }, () => Array.from({ length: width }, () => (next(33) - 16) / 8));
  if (kind === "equal") scores.fill(0.5);
  if (kind === "peaked") scores[next(keys)] = 6;
  return { scores, values };
}
