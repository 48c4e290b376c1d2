// The cache and cost calculator: fields in, cost.js counts, tables and plots out.
import { GPUS, PRESETS } from "./data.js";
import { ITEMSIZE, LONGEST, command, configJson, costRecord, faults, fits, formsAt, rowsOf, shareOf } from "./cost.js";
import { h, number, onWidth, select, table } from "./dom.js";
import { plot } from "./plot.js";

const AXES = {
  N: "N, heads", H: "H, hidden", Lq: "Lq, query rank (empty: none)", L: "L, KV rank", P: "P, nope", R: "R, rope",
  V: "V, value", layers: "layers",
};
const COLOURS = { mla: "latent", absorbed: "latent", expanded: "per-head", mha: "per-head" };
const DTYPES = Object.keys(ITEMSIZE).map((name) => [name, name]);
const ROWS = [["dtype", "like the weights"], ...DTYPES, ["fp8", "fp8 latent, scales, 16-bit rope"]];
const TYPED = "dimensions of your own";

const axesOf = (preset) => Object.fromEntries(Object.keys(AXES).map((axis) => [axis, preset[axis]]));

function fresh() {
  return {
    model: "deepseek-v3", config: axesOf(PRESETS["deepseek-v3"]), requests: 16, query: 1, keys: 4096, dtype: "bfloat16",
    rows: "dtype", ranks: 1, gpu: "h200", flops: 989, bandwidth: 4800, free: 70,
  };
}

// What the fields say, as a setting of cost.js.
function settingOf(state) {
  const known = GPUS.find((gpu) => gpu.name === state.gpu);
  const own = { name: "own", own: `${state.flops}:${state.bandwidth}`, flops: state.flops * 1e12, bandwidth: state.bandwidth * 1e9, itemsize: ITEMSIZE[state.dtype] };
  return { ...state, gpu: known ?? own };
}

export function mount(box) {
  const state = fresh(), fields = {}, out = h("div", { class: "answer" });
  const said = h("p", { class: "said", "aria-live": "polite" });
  const note = h("p", { class: "note" });

  function field(name, label, read, write) {
    const input = h("input", {
      type: "text", inputmode: "decimal", autocomplete: "off", "aria-describedby": `fault-${name}`,
      input: () => { write(input.value.trim() === "" ? (name === "Lq" ? null : NaN) : Number(input.value)); show(); },
    });
    const fault = h("small", { class: "fault", id: `fault-${name}` });
    fields[name] = { label, input, fault, fill: () => { input.value = Number.isNaN(read()) ? "" : read() ?? ""; } };
    return h("label", null, h("span", null, label), input, fault);
  }
  const plain = (name, label) => field(name, label, () => state[name], (value) => { state[name] = value; });
  const axis = ([name, label]) => field(name, label, () => state.config[name], (value) => {
    state.config = { ...state.config, [name]: value };
    state.model = null;
    model.querySelector("select").value = "";
  });
  function picked(name, label, options, after = () => {}) {
    const label_ = select(label, options, state[name] ?? "", (event) => { state[name] = event.target.value; after(); fill(); show(); });
    const fault = h("small", { class: "fault", id: `fault-${name}` });
    label_.append(fault);
    fields[name] = { label, input: label_.querySelector("select"), fault, fill: () => {} };
    return label_;
  }

  const model = picked("model", "model", [...Object.keys(PRESETS).map((name) => [name, name]), ["", TYPED]], () => {
    state.model = state.model || null;
    if (state.model) state.config = axesOf(PRESETS[state.model]);
  });
  const ceilings = h("div", { class: "fields" }, plain("flops", "its TFLOP/s"), plain("bandwidth", "its GB/s"));
  const half = () => { state.free = (GPUS.find((gpu) => gpu.name === state.gpu)?.memory ?? 2 * state.free) / 2; };
  const form = h("form", { class: "controls", submit: (event) => event.preventDefault() },
    h("fieldset", null, h("legend", null, "Model"), h("div", { class: "fields" }, model),
      h("details", null, h("summary", null, "dimensions"), h("div", { class: "fields" }, Object.entries(AXES).map(axis)))),
    h("fieldset", null, h("legend", null, "Batch"), h("div", { class: "fields" }, plain("requests", "requests"),
      plain("keys", "keys of each, new ones included"), plain("query", "new tokens of each"))),
    h("fieldset", null, h("legend", null, "Numbers"), h("div", { class: "fields" },
      picked("dtype", "weights, queries, outputs", DTYPES), picked("rows", "cache rows", ROWS))),
    h("fieldset", null, h("legend", null, "Machine"), h("div", { class: "fields" },
      picked("gpu", "GPU", [...GPUS.map(({ name }) => [name, name]), ["own", "ceilings of your own"]], half),
      plain("ranks", "GPUs that share the heads"), plain("free", "GB left for the cache on each")), ceilings));

  function fill() {
    for (const one of Object.values(fields)) one.fill();
  }

  function show() {
    const setting = settingOf(state), wrong = new Map(faults(setting, state.free * 1e9));
    ceilings.hidden = state.gpu !== "own";
    if (Object.keys(AXES).some((name) => wrong.has(name))) form.querySelector("details").open = true;
    for (const [name, one] of Object.entries(fields)) {
      one.fault.textContent = wrong.get(name) ?? "";
      one.input.setAttribute("aria-invalid", wrong.has(name));
    }
    const beyond = state.model ? PRESETS[state.model].beyond : [];
    note.textContent = beyond.length ? `Not counted: ${beyond.join("; ")}.` : "";
    if (wrong.size) {
      said.textContent = `Nothing is counted while a field is wrong: ${[...wrong].map(([name, text]) => `${fields[name].label} has to be ${text}`).join("; ")}.`;
      out.replaceChildren();
    } else answer(setting);
  }

  function answer(setting) {
    const record = costRecord(setting), held = fits(setting, state.free * 1e9);
    said.replaceChildren(...sentences(setting, record, held));
    out.replaceChildren(cacheTable(setting, held), costTable(setting, record), ...plots(setting, record), words(setting));
  }

  box.replaceChildren(form, note, said, out);
  fill();
  show();
}

const strong = (text, concept) => h("strong", { class: concept }, text);
const many = (n, what) => `${number(n, 9)} ${what}${n === 1 ? "" : "s"}`;

function sentences(setting, record, held) {
  const [mla] = held, even = record.break_even.roofline, row = (form) => record.rows.find((one) => one.form === form);
  const won = row(record.winner), lost = row(record.winner === "absorbed" ? "expanded" : "absorbed");
  const mha = held.find((one) => one.name === "mha");
  return [
    "A cached token takes ", strong(many(mla.layer, "byte"), "latent"), ` in a layer and ${many(mla.all, "byte")} in all; keys and values of all heads would take ${number(mha.times)} times that. `,
    `${many(setting.requests, "request")} of ${many(setting.keys, "key")} `, strong(mla.holds ? "fit" : "do not fit", mla.holds ? "per-head" : "error"),
    `: ${many(mla.requests, "request")} at most. `,
    "This batch is faster ", strong(record.winner, COLOURS[record.winner]), `: at least ${number(won.time_us)} µs a layer against ${number(lost.time_us)}. `,
    `With ${many(record.batch.context, "token")} cached before, expanding wins `, even === null ? `at no length up to ${LONGEST} new tokens.` : `from ${many(even, "new token")} on.`,
  ];
}

function bar(share, concept) {
  return h("span", { class: `bar ${concept}-fill`, style: `width:${Math.max(0.05, 3 * share).toFixed(3)}rem`, "aria-hidden": "true" });
}

function cacheTable(setting, held) {
  const most = Math.max(...held.map((one) => one.layer)), shared = setting.ranks > 1;
  const head = ["cache of", "", "B a token, 1 layer", `B a token, ${setting.config.layers} layers`, "times MLA", ...(shared ? [`on each of ${setting.ranks} GPUs`] : []), "tokens that fit", `requests of ${number(setting.keys, 9)}`];
  return table("The cache, and what fits", head, held.map((one) => [
    one.name, bar(one.layer / most, COLOURS[one.name] ?? "grey"), number(one.layer, 9), number(one.all, 12), one.times.toFixed(2),
    ...(shared ? [number(one.rank, 12)] : []), number(one.tokens, 12), h("span", { class: one.holds ? "cell-ok" : "error" }, `${number(one.requests, 12)}${one.holds ? "" : ", too few"}`),
  ]));
}

function costTable(setting, record) {
  const share = setting.ranks > 1 ? `, ${shareOf(setting.config, setting.ranks).N} of ${setting.config.N} heads` : "";
  const head = ["form", "GFLOP", "MB", "FLOP/B", "at least, µs", "bound by"];
  return table(`One layer on one ${setting.gpu.name}${share}`, head, record.rows.map((one) => [
    one.form, number(one.flops / 1e9, 4), number(one.bytes / 1e6, 4), number(one.intensity), number(one.time_us, 4), one.bound,
  ]));
}

// A figure that is drawn again when its width changes.
function figure(caption, draw) {
  const place = h("div", { class: "plot" });
  onWidth(place, (width) => place.replaceChildren(plot({ ...draw(width), width })));
  return h("figure", null, place, h("figcaption", null, caption));
}

function plots(setting, record) {
  return [
    figure(`Roofline of ${setting.gpu.name}: left of the corner memory sets the pace, right of it arithmetic. Each form stands at the rate that it can reach with this batch.`, () => roofline(setting, record)),
    figure(lengthCaption(setting, record), () => lengths(setting, record)),
  ];
}

function roofline({ gpu }, record) {
  const rows = record.rows.filter((one) => one.form !== "projections"), ridge = gpu.flops / gpu.bandwidth;
  const rate = (intensity) => Math.min(gpu.flops, intensity * gpu.bandwidth) / 1e12;
  const all = rows.map((one) => one.intensity), low = Math.min(0.5, ...all) / 2, high = Math.max(4 * ridge, 2 * Math.max(...all));
  return {
    label: `Roofline: ${rows.map((one) => `${one.form} ${number(one.intensity)} FLOP/B, ${one.bound} bound`).join("; ")}; the ceilings meet at ${number(ridge)}`,
    x: [low, high, "FLOP per byte", 10], y: [rate(low), (2 * gpu.flops) / 1e12, "TFLOP/s", 10],
    lines: [{ class: "grey", name: "what the machine can do", points: [low, ridge, high].map((i) => [i, rate(i)]) }],
    dots: rows.map((one) => ({ class: COLOURS[one.form] ?? "grey", name: one.form, at: [one.intensity, rate(one.intensity)] })),
  };
}

function lengthCaption(setting, record) {
  const even = record.break_even.roofline, flops = record.break_even.flops;
  const start = even === null ? `Expanding does not pay up to ${LONGEST} new tokens` : `Expanding pays from ${many(even, "new token")} a request on`;
  return `Time of both forms by new tokens of a request, with ${many(record.batch.context, "token")} cached before. ${start}; by FLOPs alone and over a long context ${flops === Infinity ? "never" : `from ${number(flops, 4)}`}.`;
}

function lengths(setting, record) {
  const c = shareOf(setting.config, setting.ranks), { bytes } = rowsOf(setting), itemsize = ITEMSIZE[setting.dtype];
  const queries = Array.from({ length: 49 }, (_, i) => Math.round(2 ** (i / 4)));
  const points = queries.map((q) => formsAt(c, setting.gpu, record.batch.context, setting.requests, q, itemsize, bytes));
  const times = points.flatMap((one) => [one.expanded, one.absorbed]).map((t) => t * 1e6), even = record.break_even.roofline;
  const curve = (form) => ({ class: COLOURS[form], name: form, points: points.map((one) => [one.query, one[form] * 1e6]) });
  const at = even === null ? [] : [formsAt(c, setting.gpu, record.batch.context, setting.requests, even, itemsize, bytes)];
  return {
    label: "Time of the expanded and the absorbed form by new tokens of a request",
    x: [1, LONGEST, "new tokens of a request", 2], y: [Math.min(...times) / 2, Math.max(...times) * 2, "µs, at least", 10],
    lines: [curve("expanded"), curve("absorbed")],
    dots: [
      ...["absorbed", "expanded"].map((form) => ({ class: COLOURS[form], name: form, at: [1, points[0][form] * 1e6] })),
      ...at.map((one) => ({ class: "query", name: `${even}`, at: [one.query, one.expanded * 1e6] })),
    ],
  };
}

function words(setting) {
  const line = command(setting);
  if (!line) return h("p", { class: "note" }, "The command counts rows of plain floats only; fp8 rows go through row_bytes of mla.cost.");
  const parts = [h("p", { class: "note" }, "The same from the command line: ", h("code", null, line.join(" ")))];
  if (!setting.model) parts.push(h("p", { class: "note" }, "with this as config.json: ", h("code", null, JSON.stringify(configJson(setting.config)))));
  return h("div", null, parts);
}
