// Elements without a framework: tag, attributes, children. An attribute that is a function listens to that event.

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return make(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// A table in a box that scrolls by itself; a cell is text, an element, or a list of them.
export function table(caption, head, rows) {
  const row = (cells, tag) => h("tr", null, cells.map((cell, i) => h(i ? tag : "th", { scope: tag === "th" ? "col" : i ? null : "row" }, cell)));
  return h("div", { class: "records", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "cells" }, h("caption", null, caption), h("thead", null, row(head, "th")),
      h("tbody", null, rows.map((cells) => row(cells, "td")))));
}

export function select(label, options, value, change) {
  return h("label", null, h("span", null, label),
    h("select", { change, "aria-label": label }, options.map(([name, text]) => h("option", { value: name, selected: name === value }, text))));
}

export function choices(legend, name, options, value, change) {
  return h("fieldset", { class: "choices" }, h("legend", null, legend), options.map(([key, text]) => (
    h("label", null, h("input", { type: "radio", name, value: key, checked: key === value, change: () => change(key) }), text)
  )));
}

export function button(text, click) {
  return h("button", { type: "button", class: "md-button", click }, text);
}

// Draw again whenever the width changes; stops by itself when the element is gone.
export function onWidth(element, draw) {
  let last = 0;
  const watch = new ResizeObserver(() => {
    if (!element.isConnected) watch.disconnect();
    else if (element.clientWidth !== last) draw((last = element.clientWidth));
  });
  watch.observe(element);
}

export function number(x, digits = 3) {
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  const [size, rounded] = [Math.abs(x), x.toPrecision(digits)];
  const text = size >= 10 ** digits || Number.isInteger(x) ? Math.round(x).toLocaleString("en") : size && size < 1e-3 ? x.toExponential(1) : String(Number(rounded));
  return text.replace("-", "−");
}
