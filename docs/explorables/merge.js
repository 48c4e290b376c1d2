// The merge playground: a split point through twelve keys, and what state.js makes of it.
import { button, choices, h, number, select, table } from "./dom.js";
import { draw, split } from "./state.js";

const KEYS = 12, WIDTH = 3;
const HANDED = [
  ["natural", "natural logarithm, as agreed"], ["second", "the second part to base 2"], ["both", "both to base 2"], ["none", "thrown away: average by number of keys"],
];
const KINDS = [["mixed", "mixed"], ["equal", "all equal"], ["peaked", "one far above the others"]];

const signed = (x) => (x === null ? "–" : Number.isFinite(x) ? x.toFixed(3).replace("-", "−") : number(x));
const outputs = (out) => h("span", { class: "out" }, out.map((x) => h("span", null, signed(x))));
// "keys 0 to 4" for 0, 5.
const range = (first, last) => (first === last ? "none" : last - first === 1 ? `key ${first}` : `keys ${first} to ${last - 1}`);

export function mount(box) {
  const state = { at: 5, handed: "natural", kind: "mixed", seed: 1 };
  let drawn;
  const columns = h("div", { class: "columns", "aria-hidden": "true", pointerdown: drag, pointermove: drag });
  const slider = h("input", { type: "range", min: 0, max: KEYS, step: 1, value: state.at, "aria-label": "keys in the first part", input: () => move(Number(slider.value)) });
  const said = h("p", { class: "said", "aria-live": "polite" }), states = h("div"), formula = h("p", { class: "note" });

  function drag(event) {
    if (!(event.buttons & 1)) return;
    const edge = columns.getBoundingClientRect();
    columns.setPointerCapture(event.pointerId);
    move(Math.max(0, Math.min(KEYS, Math.round(((event.clientX - edge.left) / edge.width) * KEYS))));
  }

  function move(at) {
    state.at = at;
    slider.value = at;
    show();
  }

  function renew() {
    drawn = draw(state.seed, KEYS, WIDTH, state.kind);
    show();
  }

  function show() {
    const found = split(drawn.scores, drawn.values, state.at, state.handed), { at, handed } = state;
    const most = Math.max(...drawn.scores), least = Math.min(...drawn.scores, most - 1);
    columns.replaceChildren(...drawn.scores.map((score, i) => h("div", {
      class: `key ${i < at ? "latent" : "query"}-fill`, style: `height:${(10 + (86 * (score - least)) / (most - least)).toFixed(1)}%`, title: `key ${i}: score ${signed(score)}`,
    })), h("div", { class: "cut", style: `left:${(100 * at) / KEYS}%` }));
    slider.setAttribute("aria-valuetext", `first part ${range(0, at)}, second part ${range(at, KEYS)}`);
    const wrong = found.off > 1e-9;
    const percent = (x) => `${(100 * x).toFixed(1)} %`;
    states.replaceChildren(table("States: what each part hands out, and what is made of it", ["state", "lse", "counts", "out"], [
      [[h("span", { class: "latent" }, "first part"), h("small", null, range(0, at))], signed(handed === "none" ? null : found.a.lse), percent(found.share[0]), outputs(found.a.out)],
      [[h("span", { class: "query" }, "second part"), h("small", null, range(at, KEYS))], signed(handed === "none" ? null : found.b.lse), percent(found.share[1]), outputs(found.b.out)],
      [h("span", { class: wrong ? "error" : "per-head" }, "merged"), signed(found.merged.lse), "", outputs(found.merged.out)],
      [h("span", { class: "per-head" }, "at once"), signed(found.whole.lse), "", outputs(found.whole.out)],
    ]));
    said.classList.toggle("wrong", wrong || lseOff(found));
    said.textContent = verdict(found, state);
    formula.textContent = lines(found, state);
  }

  box.replaceChildren(
    h("div", { class: "keys" }, columns, h("div", { class: "numbers", "aria-hidden": "true" }, keyNumbers()), slider),
    choices("Logarithm handed out by each part", "handed", HANDED, state.handed, (key) => { state.handed = key; show(); }),
    h("div", { class: "fields" }, select("scores", KINDS, state.kind, (event) => { state.kind = event.target.value; renew(); }),
      h("div", null, button("other keys", () => { state.seed++; renew(); }))),
    said, states, formula,
  );
  renew();
}

const keyNumbers = () => Array.from({ length: KEYS }, (_, i) => h("span", null, String(i)));
const lseOff = ({ merged, whole }) => merged.lse === null || Math.abs(merged.lse - whole.lse) > 1e-9 * Math.max(1, Math.abs(whole.lse));

function verdict(found, { at, handed }) {
  const off = `${(100 * found.off).toFixed(found.off < 0.01 ? 2 : 0)} %`, empty = at === 0 || at === KEYS;
  if (found.off <= 1e-9 && !lseOff(found)) {
    return `Merged is attention over all keys at once, to ${number(found.off, 2)} of its size.${empty ? " The part without keys has lse −∞ and counts nothing." : ""}`;
  }
  if (handed === "none") return found.off <= 1e-9 ? "Right by luck: here each part counts as much as its number of keys. There is no lse to go on with." : `Off by ${off} of its size. Without the logarithms nobody knows how much each part counts.`;
  const ratio = `The merged lse is ${number(found.merged.lse / found.whole.lse)} times the right one (1 / ln 2 = 1.443)`;
  if (empty) return `The output is right, because nothing had to be merged: a single split never shows the wrong base. ${ratio}.`;
  if (found.off <= 1e-9) return `The output is right by luck: both parts count the same in either base. The merged lse is ${signed(found.merged.lse)} and should be ${signed(found.whole.lse)}.`;
  return `Off by ${off} of its size: the parts count too much or too little. The merged lse is ${signed(found.merged.lse)} and should be ${signed(found.whole.lse)}. No number looks strange by itself.`;
}

function lines({ a, b, share }, { handed }) {
  if (handed === "none") return `out = ${share.map((x) => x.toFixed(3)).join(" × first + ")} × second`;
  const m = Math.max(a.lse, b.lse), w = (lse) => `e^(${signed(lse)} − ${m < 0 ? `(${signed(m)})` : signed(m)}) = ${Math.exp(lse - m).toFixed(3)}`;
  return `Weights: ${w(a.lse)} and ${w(b.lse)}; divided by their sum, ${share.map((x) => x.toFixed(3)).join(" and ")}.`;
}
