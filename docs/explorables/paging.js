// The paging animator: buttons act on the world of pages.js, and every step is drawn with its metadata.
import { button, h, table } from "./dom.js";
import { PROMPTS, STORY, metadata, newWorld, step } from "./pages.js";

const PAGES = 8, SIZE = 4, PAUSE = 2500;

export function mount(box) {
  const begin = () => ({ world: newWorld(PAGES, SIZE), told: 0, own: false });
  let past = [begin()], timer = null; // every world so far, and how much of the story is told in it
  const now = () => past.at(-1);
  const said = h("p", { class: "said", "aria-live": "polite" }), grid = h("ol", { class: "pages", "aria-label": "pages of the pool" });
  const requests = h("div"), slots = h("div");
  const back = button("back", () => { stop(); past.pop(); show(); });
  const next = button("next", () => { stop(); tell(); });
  const play = button("play the story", () => (timer ? stop() : start()));
  const leavers = h("span");

  function act(action, told, own) {
    past.push({ world: step(now().world, action), told, own });
    show();
  }

  function tell() {
    const { told } = now();
    if (told < STORY.length) act(STORY[told], told + 1, false);
    if (told + 1 >= STORY.length) stop();
  }

  function start() {
    if (now().told === STORY.length) again();
    timer = setInterval(() => (box.isConnected ? tell() : stop()), PAUSE);
    play.textContent = "pause";
    tell();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "play the story";
  }

  function again() {
    past = [begin()];
    show();
  }

  // Whoever acts has left the story; going back leads into it again.
  const own = (action) => () => { stop(); act(action, STORY.length, true); };

  function show() {
    const { world: w, told, own: left } = now();
    said.textContent = `${told && !left ? `${told} of ${STORY.length}. ` : ""}${w.said}`;
    back.disabled = past.length === 1;
    next.disabled = told === STORY.length;
    grid.replaceChildren(...w.pages.map((_, i) => card(w, i)));
    const leave = (name) => button(`${name} leaves`, own({ kind: "leave", name }));
    const focused = leavers.contains(document.activeElement);
    leavers.replaceChildren(...w.requests.map(({ name }) => leave(name)));
    if (focused) (leavers.firstChild ?? next).focus();
    requests.replaceChildren(requestTable(w, point));
    slots.replaceChildren(...(w.step?.length ? [slotTable(w), arrayTable(w)] : []));
  }

  function point(table) {
    for (const [i, li] of [...grid.children].entries()) li.classList.toggle("pointed", table.includes(i));
  }

  box.replaceChildren(
    h("div", null, play, back, next, button("start again", () => { stop(); again(); })),
    h("fieldset", null, h("legend", null, "or do it yourself"),
      button("a prompt arrives", own({ kind: "arrive", prompt: PROMPTS.first })), button("one with the same beginning", own({ kind: "arrive", prompt: PROMPTS.sibling })),
      button("an unrelated one", own({ kind: "arrive", prompt: PROMPTS.stranger })), button("each writes a token", own({ kind: "decode" })), leavers),
    said, grid, legend(), requests, slots,
  );
  show();
}

function legend() {
  return h("p", { class: "keyline" }, h("span", null, "blue frame: held by one request"), h("span", null, "double green frame: shared"),
    h("span", null, "dashed: kept, nobody holds it"), h("span", null, "violet row: written in this step"), h("span", null, "number before a row: its slot"));
}

function holders(w, page) {
  return w.requests.filter((one) => one.table.includes(page));
}

// How many rows of a page somebody may read: those of its holders, or of the prefixes that it keeps.
function readable(w, page) {
  const kept = w.pages[page].keys.map((name) => ((name.split(" ").length - 1) % w.size) + 1);
  const held = holders(w, page).map((one) => one.tokens.length - one.table.indexOf(page) * w.size);
  return Math.min(w.size, Math.max(0, ...kept, ...held));
}

function card(w, page) {
  const names = holders(w, page).map((one) => one.name), kept = w.cached.includes(page), written = new Set((w.step ?? []).flatMap((one) => one.slots));
  const state = names.length > 1 ? "shared" : names.length ? "held" : kept ? "kept" : "free";
  const rows = w.pages[page].rows.map((word, i) => {
    const slot = page * w.size + i, there = word !== null && i < readable(w, page), fresh = there && written.has(slot);
    return h("div", { class: `row ${fresh ? "new" : there ? "full" : word !== null ? "stale" : ""}`, title: there || word === null ? null : "left over: nobody may read it" }, h("small", null, String(slot)), word ?? "");
  });
  const who = names.length ? names.join(", ") : kept ? "kept" : "free";
  return h("li", { class: state, "aria-label": `page ${page}: ${who}` }, h("div", { class: "page-name" }, h("span", null, `page ${page}`), h("small", null, who)), rows);
}

function requestTable(w, point) {
  if (!w.requests.length) return h("p", { class: "note" }, "No requests.");
  return table("Requests, and the pages that they point to", ["request", "tokens", "block table", "pages", "shared"], w.requests.map((one) => {
    const name = h("button", {
      type: "button", class: "md-button", "aria-label": `show the pages of ${one.name}`, click: () => point(one.table),
      pointerenter: () => point(one.table), pointerleave: () => point([]), focus: () => point(one.table), blur: () => point([]),
    }, one.name);
    const shared = one.table.filter((page) => holders(w, page).length > 1).length;
    return [name, String(one.tokens.length), h("code", null, `[${one.table.join(", ")}]`), String(one.table.length), String(shared)];
  }));
}

function slotTable(w) {
  const rows = w.step.flatMap((one) => one.slots.map((slot, i) => {
    const at = one.start + i, index = Math.floor(at / w.size);
    const how = slot < 0 ? "not written" : `${one.table[index]} · ${w.size} + ${at % w.size}`;
    return [one.name, String(at), `table[${index}] = ${one.table[index]}`, String(at % w.size), how, h("strong", { class: "query" }, String(slot).replace("-", "−"))];
  }));
  return table("Slot mapping of this step", ["request", "token", "page", "place", "page · size + place", "slot"], rows);
}

function arrayTable(w) {
  return table("What a tier is handed", ["array", "holds"], Object.entries(metadata(w.step)).map(([name, value]) => [h("code", null, name), h("code", null, JSON.stringify(value).replaceAll(",", ", ").replaceAll("-", "−"))]));
}
