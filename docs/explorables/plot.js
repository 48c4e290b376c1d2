// Logarithmic plots in SVG, in the colours of the palette through classes of explorables.css.
import { s } from "./dom.js";

// A scale from [low, high], both above 0, to pixels; and the powers of 10 (or 2) inside.
export function logScale(low, high, from, to) {
  return (x) => from + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
}

export function powers(low, high, base) {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => base ** (first + i));
}

// { label, width, x: [low, high, title, base], y: the same, lines: [{ class, points, name }], dots: [{ class, at, name }] }
export function plot({ label, width, x, y, lines, dots = [] }) {
  const height = Math.min(340, Math.max(260, width * 0.55)), [left, right, top, bottom] = [52, width - 12, 14, height - 40];
  const px = logScale(x[0], x[1], left, right), py = logScale(y[0], y[1], bottom, top);
  const text = (at, words, attributes) => s("text", { x: at[0], y: at[1], ...attributes }, words);
  const every = Math.ceil(powers(x[0], x[1], x[3]).length / (width / 48));
  const short = (v) => (v >= 1e6 ? `${v / 1e6}M` : v >= 1e3 && v % 1000 === 0 ? `${v / 1e3}k` : v >= 1024 && v % 1024 === 0 ? `${v / 1024}k` : String(Number(v.toPrecision(3))));
  const grid = [
    ...powers(x[0], x[1], x[3]).filter((_, i) => i % every === 0).flatMap((v) => [
      s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: bottom }), text([px(v), bottom + 15], short(v), { "text-anchor": "middle" })]),
    ...powers(y[0], y[1], y[3]).flatMap((v) => [
      s("line", { class: "grid", x1: left, x2: right, y1: py(v), y2: py(v) }), text([left - 6, py(v) + 4], short(v), { "text-anchor": "end" })]),
    text([(left + right) / 2, height - 6], x[2], { "text-anchor": "middle" }),
    text([0, 0], y[2], { "text-anchor": "middle", transform: `translate(11 ${(top + bottom) / 2}) rotate(-90)` }),
  ];
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join("");
  const drawn = lines.map((line) => s("path", { class: `line ${line.class}`, d: path(line.points) }, s("title", null, line.name)));
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    grid, drawn, places(dots, px, py, right).map(({ dot, at, words }) => s("g", { class: dot.class },
      s("circle", { cx: px(dot.at[0]), cy: py(dot.at[1]), r: 5 }, s("title", null, dot.name)),
      text(at, dot.name, { "text-anchor": words, class: "name" }))));
}

// Names beside their dots, moved down where one would lie over another or over a dot.
function places(dots, px, py, right) {
  const taken = dots.map((dot) => [px(dot.at[0]) - 5, py(dot.at[1]) + 4, 10]);
  return dots.map((dot) => {
    const [cx, cy] = [px(dot.at[0]), py(dot.at[1])], wide = 7 * dot.name.length, flip = cx + wide + 10 > right;
    let y = cy + 18;
    const box = () => [flip ? cx - 8 - wide : cx + 8, y];
    while (taken.some(([a, b, w]) => Math.abs(b - y) < 14 && a < box()[0] + wide && box()[0] < a + w)) y += 14;
    taken.push([...box(), wide]);
    return { dot, at: [flip ? cx - 8 : cx + 8, y], words: flip ? "end" : "start" };
  });
}
