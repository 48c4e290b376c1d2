// What `mla cost` counts (mla/cost.py, mla/roofline.py), in the same order of operations: equal to it as long as counts
// stay below 2^53. Axes: N heads, H hidden, Lq query rank, L KV rank, P nope, R rope, V value. A setting is
// { model, config: {H, N, Lq, L, P, R, V, layers}, requests, query, keys, dtype, rows, ranks, gpu }, where `query` and
// `keys` are tokens of one request (keys count the new ones too) and `ranks` share the heads.

export const ITEMSIZE = { bfloat16: 2, float16: 2, float32: 4 };
export const LONGEST = 4096; // new tokens up to which the break-even is looked for
const SMALLEST = { N: 1, H: 1, Lq: 1, L: 1, P: 1, R: 0, V: 1, layers: 1 };
const FP8_TILE = 128; // numbers of a latent that share a float32 scale in an fp8 row

export function countBatch(requests, query, keys) {
  const pairs = query * (keys - query) + (query * (query + 1)) / 2;
  return { tokens: requests * query, keys: requests * keys, pairs: requests * pairs };
}

// Bytes of one cached row, and of a number in the caches that it is compared with. An fp8 row keeps the latent in
// bytes, a scale for each 128 of them, and the rope part in 16 bits: 512 + 16 + 128 = 656 for DeepSeek-V3.
export function rowsOf({ config: c, dtype, rows }) {
  if (rows === "fp8") return { bytes: c.L + 4 * Math.ceil(c.L / FP8_TILE) + 2 * c.R, itemsize: ITEMSIZE[dtype] };
  const itemsize = ITEMSIZE[rows === "dtype" ? dtype : rows];
  return { bytes: (c.L + c.R) * itemsize, itemsize };
}

const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
const cost = (form, flops, bytes) => ({ form, flops: sum(flops), bytes: sum(bytes) });
const up = (c) => c.L * c.N * (c.P + c.V);
const pairFlops = (c, counts, width) => ({ pairs: 2 * counts.pairs * c.N * width });

function attendBytes(c, counts, itemsize, row) {
  return {
    cache: counts.keys * row,
    query: counts.tokens * c.N * (c.P + c.R) * itemsize,
    output: counts.tokens * c.N * c.V * itemsize,
    weights: up(c) * itemsize,
  };
}

export function expandedCost(c, counts, itemsize, row) {
  const flops = { up: 2 * counts.keys * up(c), ...pairFlops(c, counts, c.P + c.R + c.V) };
  const expanded = 2 * counts.keys * c.N * (c.P + c.V) * itemsize;
  return cost("expanded", flops, { ...attendBytes(c, counts, itemsize, row), expanded });
}

export function absorbedCost(c, counts, itemsize, row) {
  const flops = { absorption: 2 * counts.tokens * up(c), ...pairFlops(c, counts, 2 * c.L + c.R) };
  const latents = 2 * counts.tokens * c.N * 2 * c.L * itemsize;
  return cost("absorbed", flops, { ...attendBytes(c, counts, itemsize, row), latents });
}

export function projectionCost(c, counts, itemsize, row) {
  const t = counts.tokens, width = c.N * (c.P + c.R);
  const query = c.Lq ? c.H * c.Lq + c.Lq * width : c.H * width;
  const down = c.H * (c.L + c.R), output = c.N * c.V * c.H;
  const moved = {
    weights: (query + down + output) * itemsize,
    hidden: 2 * t * c.H * itemsize,
    query: t * (2 * (c.Lq || 0) + width) * itemsize,
    cache: t * row,
    output: t * c.N * c.V * itemsize,
  };
  return cost("projections", { query: 2 * t * query, down: 2 * t * down, output: 2 * t * output }, moved);
}

export function groupedName(heads, kvHeads) {
  return kvHeads === heads ? "mha" : kvHeads === 1 ? "mqa" : `gqa-${kvHeads}`;
}

export function groupedCost(c, counts, kvHeads, itemsize) {
  const moved = {
    cache: counts.keys * kvHeads * (c.P + c.R + c.V) * itemsize,
    query: counts.tokens * c.N * (c.P + c.R) * itemsize,
    output: counts.tokens * c.N * c.V * itemsize,
  };
  return cost(groupedName(c.N, kvHeads), pairFlops(c, counts, c.P + c.R + c.V), moved);
}

// MHA, the most groups up to 8 that divide the heads, MQA.
export function kvHeadsOf(heads) {
  const groups = [8, 7, 6, 5, 4, 3, 2].find((g) => heads % g === 0 && g < heads);
  return [...new Set([heads, ...(groups ? [groups] : []), 1])];
}

export function seconds(gpu, one) {
  return Math.max(one.flops / gpu.flops, one.bytes / gpu.bandwidth);
}

export function bound(gpu, one) {
  return one.flops / one.bytes > gpu.flops / gpu.bandwidth ? "compute" : "memory";
}

export function breakEvenFlops(c) {
  const extra = 2 * c.L - c.P - c.V;
  return extra > 0 ? (c.L * (c.P + c.V)) / extra : Infinity;
}

// Both forms with `query` new tokens for each request, `context` cached before: what the plot over query lengths shows.
export function formsAt(c, gpu, context, requests, query, itemsize, row) {
  const counts = countBatch(requests, query, context + query);
  const expanded = seconds(gpu, expandedCost(c, counts, itemsize, row));
  const absorbed = seconds(gpu, absorbedCost(c, counts, itemsize, row));
  return { query, expanded, absorbed, winner: expanded <= absorbed ? "expanded" : "absorbed" };
}

export function breakEvenRoofline(c, gpu, context, requests, itemsize, row, limit = LONGEST) {
  for (let query = 1; query <= limit; query++) {
    if (formsAt(c, gpu, context, requests, query, itemsize, row).winner === "expanded") return query;
  }
  return null;
}

// What one of `ranks` GPUs computes: its share of the heads. The latent row is not shared out.
export function shareOf(config, ranks) {
  return { ...config, N: config.N / ranks };
}

// The record of `mla cost --heads N/ranks`, under the same names.
export function costRecord(setting) {
  const { requests, query, keys, gpu } = setting;
  const c = shareOf(setting.config, setting.ranks), itemsize = ITEMSIZE[setting.dtype];
  const stored = rowsOf(setting), counts = countBatch(requests, query, keys), kvHeads = kvHeadsOf(c.N);
  const baselines = kvHeads.map((g) => [groupedName(c.N, g), g * (c.P + c.R + c.V) * stored.itemsize]);
  const costs = [expandedCost, absorbedCost, projectionCost].map((f) => f(c, counts, itemsize, stored.bytes));
  costs.push(...kvHeads.map((g) => groupedCost(c, counts, g, itemsize)));
  return {
    batch: { requests, context: keys - query, ...counts },
    cache_bytes_per_token: [["mla (latent row)", stored.bytes], ...baselines].map(([name, bytes]) => (
      { name, bytes, times_mla: bytes / stored.bytes }
    )),
    rows: costs.map((one) => ({
      ...one, intensity: one.flops / one.bytes, time_us: seconds(gpu, one) * 1e6, bound: bound(gpu, one),
    })),
    winner: seconds(gpu, costs[0]) <= seconds(gpu, costs[1]) ? "expanded" : "absorbed",
    break_even: {
      flops: breakEvenFlops(c),
      roofline: breakEvenRoofline(c, gpu, keys - query, requests, itemsize, stored.bytes),
    },
  };
}

// Bytes of all layers on one of `ranks` GPUs for each cached token, and what fits into `free` bytes there. KV heads are
// shared out as far as there are any; the latent row lies whole on every rank.
export function fits(setting, free) {
  const { config: c, ranks, keys, requests } = setting, stored = rowsOf(setting);
  const caches = kvHeadsOf(c.N).map((g) => ({
    name: groupedName(c.N, g), layer: g * (c.P + c.R + c.V) * stored.itemsize,
    rank: Math.ceil(g / ranks) * (c.P + c.R + c.V) * stored.itemsize,
  }));
  return [{ name: "mla", layer: stored.bytes, rank: stored.bytes }, ...caches].map(({ name, layer, rank }) => {
    const tokens = Math.floor(free / (rank * c.layers)), most = Math.floor(tokens / keys);
    return { name, layer, all: layer * c.layers, times: layer / stored.bytes, rank: rank * c.layers, tokens, requests: most, holds: most >= requests };
  });
}

// What is wrong with a setting: [field, sentence] pairs, none if it can be counted.
export function faults(setting, free) {
  const found = [], c = setting.config;
  const whole = (field, value, least, most) => {
    if (!(Number.isInteger(value) && value >= least && value <= most)) found.push([field, `a whole number from ${least} to ${most}`]);
  };
  for (const [axis, least] of Object.entries(SMALLEST)) if (!(axis === "Lq" && c.Lq === null)) whole(axis, c[axis], least, 65536);
  whole("requests", setting.requests, 1, 65536);
  whole("query", setting.query, 1, 1048576);
  whole("keys", setting.keys, 1, 16777216);
  whole("ranks", setting.ranks, 1, 1024);
  const { gpu } = setting;
  for (const [field, rate] of [["flops", gpu.flops], ["bandwidth", gpu.bandwidth], ["free", free]]) {
    if (!(Number.isFinite(rate) && rate > 0)) found.push([field, "a number above 0"]);
  }
  if (found.length) return found;
  if (setting.keys < setting.query) found.push(["keys", `at least the ${setting.query} new tokens: they are counted too`]);
  if (c.N % setting.ranks) found.push(["ranks", `a number that divides the ${c.N} heads`]);
  if (c.R % 2) found.push(["R", "an even number: rotation takes pairs"]);
  if (setting.rows === "fp8" && c.L % FP8_TILE) found.push(["rows", `not fp8: its scales are for ${FP8_TILE} numbers each, and L is ${c.L}`]);
  if (gpu.itemsize !== ITEMSIZE[setting.dtype]) {
    found.push(["gpu", `your own ceilings: those of ${gpu.name} are for ${gpu.itemsize}-byte elements, and ${setting.dtype} has ${ITEMSIZE[setting.dtype]}`]);
  }
  return found;
}

// The words of the command that prints the same; null where the command does not know the rows.
export function command(setting) {
  const { model, config, requests, query, keys, dtype, rows, ranks, gpu } = setting;
  if (rows === "fp8") return null;
  const machine = gpu.own ? `own:${gpu.own}` : gpu.name; // own: "TFLOPS:GBPS" as typed
  const words = ["mla", "cost", "--model", model ?? "config.json", "--batch", `${requests}q${query}s${keys}`, "--gpu", machine];
  if (dtype !== "bfloat16") words.push("--dtype", dtype);
  if (rows !== "dtype") words.push("--cache-dtype", rows);
  if (ranks > 1) words.push("--heads", String(config.N / ranks));
  return words;
}

// The config.json of dimensions that no preset has.
export function configJson(c) {
  return {
    model_type: "deepseek_v3", hidden_size: c.H, num_attention_heads: c.N, q_lora_rank: c.Lq, kv_lora_rank: c.L,
    qk_nope_head_dim: c.P, qk_rope_head_dim: c.R, v_head_dim: c.V, num_hidden_layers: c.layers, rope_theta: 10000,
  };
}
