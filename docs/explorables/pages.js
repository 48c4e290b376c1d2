// A pool of pages with shared prefixes, small enough to look at: the rules of mla/serving/pool.py, tokens as words.
// A world is never changed: `step` returns the next one.
// { size, pages: [{ holders, rows, keys }], free, cached, requests: [{ name, tokens, prompt, table }], step, said }

export function newWorld(pages, size) {
  return {
    size, free: [], cached: [], created: 0, requests: [], step: null, said: "Nobody is here. Every page is free.", next: 0,
    pages: Array.from({ length: pages }, () => ({ holders: 0, rows: Array(size).fill(null), keys: [] })),
  };
}

const key = (tokens, n) => tokens.slice(0, n).join(" ");

class OutOfPages extends Error {}

function allocate(w) {
  let page;
  if (w.free.length) page = w.free.pop();
  else if (w.created < w.pages.length) page = w.created++;
  else if (w.cached.length) {
    page = w.cached.shift();
    w.pages[page].keys = [];
    w.evicted.push(page);
  } else throw new OutOfPages();
  w.pages[page].holders = 1;
  w.pages[page].rows.fill(null);
  return page;
}

function release(w, table) {
  for (const page of [...table].reverse()) {
    if (--w.pages[page].holders === 0) (w.pages[page].keys.length ? w.cached : w.free).push(page);
  }
}

function find(w, tokens, n) {
  const name = key(tokens, n);
  return w.pages.findIndex((page) => page.keys.includes(name));
}

// The pages of the longest prefix that is kept, and its length: full pages, then a beginning of one more.
function match(w, prompt) {
  const table = [];
  let hit = 0, page;
  while (hit + w.size <= prompt.length && (page = find(w, prompt, hit + w.size)) >= 0) {
    table.push(page);
    hit += w.size;
  }
  for (let n = Math.min(hit + w.size - 1, prompt.length); n > hit; n--) {
    if ((page = find(w, prompt, n)) >= 0) return { table: [...table, page], hit: n };
  }
  return { table, hit };
}

// The page in which its holder may write `position`: itself, or a copy where it has another holder or a longer prefix.
function writable(w, page, position) {
  const own = w.pages[page];
  if (own.holders === 1 && own.keys.every((name) => name.split(" ").length <= position)) return page;
  const rows = [...own.rows];
  if (own.holders > 1 && !w.free.length && w.created === w.pages.length && !w.cached.length) throw new OutOfPages();
  release(w, [page]);
  const copy = allocate(w);
  w.pages[copy].rows = rows.map((row, i) => (i < position % w.size ? row : null));
  if (copy !== page) w.copies.push([page, copy]);
  return copy;
}

// Write the request's tokens from `start` on; a prefix that ends with a page or with the prompt is kept for others.
function write(w, request, start) {
  for (let at = start; at < request.tokens.length; at++) {
    const index = Math.floor(at / w.size);
    if (index === request.table.length) request.table.push(allocate(w));
    else request.table[index] = writable(w, request.table[index], at);
    w.pages[request.table[index]].rows[at % w.size] = request.tokens[at];
  }
  for (let n = start + 1; n <= request.prompt; n++) {
    const page = w.pages[request.table[Math.floor((n - 1) / w.size)]];
    if ((n % w.size === 0 || n === request.prompt) && find(w, request.tokens, n) < 0) page.keys.push(key(request.tokens, n));
  }
}

function place(w, request, start, written) {
  const slots = [];
  for (let at = start; at < request.tokens.length; at++) {
    slots.push(written ? request.table[Math.floor(at / w.size)] * w.size + (at % w.size) : -1);
  }
  return { name: request.name, start, query_len: slots.length, seq_len: request.tokens.length, table: [...request.table], slots };
}

function arrive(w, prompt) {
  const { table, hit } = match(w, prompt), name = String.fromCharCode(65 + (w.next++ % 26));
  for (const page of table) {
    w.pages[page].holders++;
    w.cached = w.cached.filter((other) => other !== page);
  }
  const request = { name, tokens: [...prompt], prompt: prompt.length, table: [...table] };
  w.requests.push(request);
  if (hit < prompt.length) write(w, request, hit);
  w.step = [place(w, request, Math.min(hit, prompt.length - 1), hit < prompt.length)];
  const begin = `${name} arrives with ${prompt.length} tokens. `;
  if (hit === prompt.length) return `${begin}All of them are in the cache. It computes the last one again, to have something to continue from, and writes nothing: slot −1.`;
  return begin + (hit ? `The first ${hit} are in the cache: it points to those pages and computes the other ${prompt.length - hit}.` : "Nothing of it is in the cache: all are computed and written.");
}

const WORDS = ["so", "we", "see", "that", "a", "row", "is", "one", "token"];

function decode(w) {
  w.step = [];
  const waits = [];
  for (const [i, request] of w.requests.entries()) {
    const before = JSON.stringify(w);
    request.tokens.push(WORDS[(request.tokens.length + request.name.charCodeAt(0)) % WORDS.length]);
    try {
      write(w, request, request.tokens.length - 1);
      w.step.push(place(w, request, request.tokens.length - 1, true));
    } catch (error) {
      if (!(error instanceof OutOfPages)) throw error;
      Object.assign(w, JSON.parse(before));
      waits.push(w.requests[i].name);
    }
  }
  const copied = w.copies.map(([from, to]) => ` Page ${from} is shared, so it is copied to page ${to} before it is written.`).join("");
  const late = waits.length ? ` No page is left for ${waits.join(", ")}: waiting.` : "";
  const names = w.step.map((one) => one.name), who = waits.length ? names.join(" and ") : "Each request";
  return names.length ? `${who} ${waits.length && names.length > 1 ? "write" : "writes"} one token.${copied}${late}` : late.trim();
}

function leave(w, name) {
  const request = w.requests.find((one) => one.name === name);
  w.requests = w.requests.filter((one) => one !== request);
  release(w, request.table);
  w.step = [];
  const kept = new Set(request.table.filter((page) => w.cached.includes(page))).size;
  return `${name} leaves.` + (kept ? ` Pages whose beginning others may ask for are kept until the room is needed: ${kept}.` : "");
}

// An action is { kind: "arrive", prompt: [words] }, { kind: "decode" } or { kind: "leave", name }.
export function step(world, action) {
  const w = JSON.parse(JSON.stringify({ ...world, evicted: [], copies: [] }));
  try {
    if (action.kind === "arrive") w.said = arrive(w, action.prompt);
    else if (action.kind === "decode") w.said = decode(w);
    else w.said = leave(w, action.name);
  } catch (error) {
    if (!(error instanceof OutOfPages)) throw error;
    return { ...world, step: [], evicted: [], copies: [], said: "Not enough pages are free, and every other page is held: the request has to wait." };
  }
  if (w.evicted.length) w.said += ` Given up to make room, since nobody held it: what was kept in page ${w.evicted.join(" and page ")}.`;
  return w;
}

// The metadata of the step, as a tier gets it.
export function metadata(step) {
  const ends = [0];
  for (const one of step) ends.push(ends.at(-1) + one.query_len);
  return {
    query_start_loc: ends,
    seq_lens: step.map((one) => one.seq_len),
    block_table: step.map((one) => one.table),
    slot_mapping: step.flatMap((one) => one.slots),
  };
}

const words = (text) => text.split(" ");
export const SYSTEM = words("you are a kind and careful helper .");
export const PROMPTS = {
  first: [...SYSTEM, ...words("what is")],
  sibling: [...SYSTEM, ...words("why pages ?")],
  stranger: words("count the bytes of a row"),
};
export const STORY = [
  { kind: "arrive", prompt: PROMPTS.first },
  { kind: "decode" },
  { kind: "arrive", prompt: PROMPTS.sibling },
  { kind: "decode" },
  { kind: "arrive", prompt: PROMPTS.first },
  { kind: "decode" },
  { kind: "leave", name: "A" },
  { kind: "arrive", prompt: PROMPTS.stranger },
  { kind: "decode" },
  { kind: "leave", name: "B" },
  { kind: "arrive", prompt: words("one more long prompt that needs room for all its tokens today") },
  { kind: "decode" },
  { kind: "leave", name: "D" },
  { kind: "decode" },
];
