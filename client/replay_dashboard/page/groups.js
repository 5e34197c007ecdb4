// Groups: a list over all items of a table that filters and sorts, with histograms to click.
import { bar, histogram } from "./charts.js";
import { ask, duration, fill, h, number, percent, plural, promptParts, shortKey, visible } from "./dom.js";

const BLOCK = 100, LIVE_SECONDS = 2;
const COLUMNS = [
  ["reward_mean", "reward", "reward"], ["reward_std", "spread", "num"], ["", "prompt", "prompt"],
    ["length_mean", "length", "num"], ["logprob_mean", "log-prob", "num"],
  ["truncated_share", "ended by", "finish"], ["staleness", "stale", "num"], ["times_sampled", "used", "num"],
    ["priority", "priority", "num"], ["age", "age", "num"], ["odd", "notes", "notes"], ["", "key", "key"],
];
const HISTOGRAMS = { reward_mean: "mean reward", reward_std: "spread of rewards", length_mean: "mean length",
  logprob_mean: "mean log-prob", staleness: "staleness", times_sampled: "times used", priority: "priority" };
const fresh = () => ({ sort: "age", descending: "", prompt: "", text: "", flags: [], tags: [], bounds: {} });

let table = "", filter = fresh(), held = false, snapshot = null, blocks = new Map(), found = null, focused = 0, problem = "", asked = 0,
  list = null, timer = null, look = null, shown = 0, tall = 34;
const small = matchMedia("(max-width: 760px)");

export function open(main, [name], state) {
  if (name && name !== table) (table = name), (filter = fresh()), (held = false), (focused = 0);
  look = state.look;
  list = h("div", { class: "rows", tabindex: 0, role: "rowgroup", "aria-label": "Groups", onscroll: null });
  list.addEventListener("scroll", () => (draw(), load()), { passive: true });
  fill(main, h("div", { class: "groups" }, h("div", { class: "bar" }), h("aside", { class: "filters", "aria-label": "Filters" }),
    h("div", { class: "list", role: "table", "aria-label": "Groups of the table" })));
  main.querySelector(".list").append(h("div", { class: "head", role: "rowgroup" }), list);
  found = null;
  restart(main);
  return () => clearTimeout(timer);
}

export function update(main, state) {
  look = state.look;
  // The first table is often a queue, which is empty while the run is healthy: begin with the table that holds the most.
  if (!table && look.tables?.length) (table = look.tables.reduce((a, b) => (b.size > a.size ? b : a)).name), restart(main);
  const stale = look.lists?.[table]?.id !== shown || (found && found.read < found.total);
  if (!held && stale && Date.now() - asked > 1000 * LIVE_SECONDS) restart(main, false);
  controls(main);
}

// Asks anew. Without `clean` the rows stay until the answer is there.
function restart(main = document.getElementById("main"), clean = true) {
  if (!list?.isConnected) return;
  asked = Date.now();
  if (!held) snapshot = null;
  if (clean) (blocks = new Map()), (list.scrollTop = 0), (focused = 0);
  tall = small.matches ? 106 : 34;
  load(true);
  controls(main);
}

const wantedBlocks = () => {
  const first = Math.floor(list.scrollTop / tall / BLOCK), last = Math.floor((list.scrollTop + list.clientHeight) / tall / BLOCK);
  return Array.from({ length: Math.max(1, last - first + 1) }, (_, i) => first + i);
};
let loading = 0; // the number of the last load that began anew: the answers of earlier ones are left out
// Asks for the blocks of rows that are on the screen and not known. With `anew`, no block counts as known.
async function load(anew = false) {
  if (!table) return;
  const turn = anew ? ++loading : loading, known = anew ? new Map() : blocks;
  for (const block of wantedBlocks()) {
    if (known.has(block)) continue;
    known.set(block, null);
    const given = new URLSearchParams({ table, sort: filter.sort, descending: filter.descending, offset: block * BLOCK, limit: BLOCK });
    for (const name of ["prompt", "text"]) if (filter[name]) given.set(name, filter[name]);
    for (const flag of filter.flags) given.append("flag", flag);
    for (const tag of filter.tags) given.append("tag", tag);
    for (const [name, [low, high]] of Object.entries(filter.bounds)) given.append("bound", `${name}:${low}:${high}`);
    if (snapshot) given.set("snapshot", snapshot);
    try {
      const answer = await ask(`api/groups?${given}`);
      if (turn !== loading || !list.isConnected) return;
      problem = "";
      found = answer;
      if (held && snapshot && answer.snapshot !== snapshot) held = false; // the snapshot was held for too long
      if (answer.snapshot) snapshot = shown = answer.snapshot;
      known.set(block, answer.rows);
      if (known !== blocks) blocks = known;
    } catch (error) {
      problem = error.message;
      known.delete(block);
    }
    draw();
    controls();
  }
}

// Draws the rows that are on the screen, and five above and below them. The others only take room.
function draw() {
  if (!list?.isConnected || !found) return;
  const first = Math.max(0, Math.floor(list.scrollTop / tall) - 5),
    last = Math.min(found.matching, Math.ceil((list.scrollTop + list.clientHeight) / tall) + 5);
  const rows = [];
  for (let i = first; i < last; i++) rows.push(rowOf(blocks.get(Math.floor(i / BLOCK))?.[i % BLOCK], i));
  if (!found.matching) rows.push(h("div", { class: "row none blank", role: "row" }, h("span", { role: "cell" },
    found.total ? "No group matches the filters." : `${visible(table)} holds no group now. A queue is empty whenever the trainer is the faster side.`)));
  const inner = h("div", { class: "space", role: "presentation" }, rows);
  inner.style.height = `${found.matching * tall}px`;
  if (list.firstElementChild) fill(list.firstElementChild, ...rows), (list.firstElementChild.style.height = inner.style.height);
  else list.replaceChildren(inner);
  [...list.firstElementChild.children].forEach((row, i) => (row.style.transform = `translateY(${(first + i) * tall}px)`));
  list.parentElement.setAttribute("aria-rowcount", found.matching + 1);
}

function rowOf(row, index) {
  const props = { class: `row${index === focused ? " focused" : ""}`, role: "row", "aria-rowindex": index + 2 };
  if (!row) return h("div", { ...props, class: `${props.class} blank` }, h("span", { role: "cell" }, "…"));
  const cell = (kind, ...content) => h("span", { role: "cell", class: kind }, ...content);
  const num = (label, text) => h("span", { role: "cell", class: "num", "data-label": label }, text);
  const whole = row.read && row.reward_mean !== null;
  return h("div", { ...props, onclick: (event) => event.target.closest("a, button") || (location.hash = `#/group/${row.key}`) },
    cell("reward", whole && bar(row.reward_mean / Math.max(1, row.reward_max)), whole ? number(row.reward_mean, 3) : "–"),
    num("spread", whole ? `±${number(row.reward_std, 2)}` : "–"),
    cell("prompt", ...(row.read ? promptParts(row.prompt_id ?? "", row.prompt ?? "") : ["not read yet"])),
    num("length", whole ? number(row.length_mean, 3) : "–"), num("log-prob", number(row.logprob_mean, 3)),
    cell("finish", visible((row.finish ?? []).join(", ")), row.truncated_share > 0 && row.truncated_share < 1
      ? ` ${percent(row.truncated_share)} cut` : ""),
    num("stale", number(row.staleness)), num("used", `${number(row.times_sampled)}×`), num("priority", number(row.priority, 3)),
      num("age", duration(row.age)),
    cell("notes", (row.notes ?? []).map((note) => h("span", { class: `note ${note.replace(/\W/g, "-")}` }, note)),
      row.tags.map((tag) => h("button", { type: "button", class: "note tag", title: `Groups with ${visible(tag)}`,
        "aria-pressed": String(filter.tags.includes(tag)), onclick: () => toggleTag(tag) }, shortTag(tag)))),
    cell("key", h("a", { href: `#/group/${row.key}`, title: row.key }, shortKey(row.key))));
}

// ------------------------------------------------------------------------------------------------ controls

function change(changes) {
  Object.assign(filter, changes);
  restart();
}
function sortBy(sort) {
  change({ sort, descending: filter.sort === sort ? (filter.descending ? "" : "1") : sort === "age" ? "" : "1" });
}
// Filters by the bar of a histogram that is clicked. With `extend` (Shift) the range grows; a second click ends the
// filter.
const pick = (name) => (low, high, extend) => {
  const now = filter.bounds[name], bounds = { ...filter.bounds };
  if (now && !extend && now[0] === low && now[1] === high) delete bounds[name];
  else bounds[name] = now && extend ? [Math.min(now[0], low), Math.max(now[1], high)] : [low, high];
  change({ bounds });
};
const later = (changes) => (clearTimeout(timer), (timer = setTimeout(() => change(changes), 250)));

// A group has one value of each tag, so another value of the same tag takes the place of the first.
const nameOf = (tag) => tag.slice(0, tag.indexOf("="));
const valueOf = (tag) => tag.slice(nameOf(tag).length + 1);
// In a row there is little room: a word says by itself what it is, and a number does not.
const shortTag = (tag) => visible(/^-?\d*$/.test(valueOf(tag)) ? tag : valueOf(tag)).slice(0, 60);
function toggleTag(tag) {
  const others = filter.tags.filter((each) => nameOf(each) !== nameOf(tag));
  change({ tags: filter.tags.includes(tag) ? others : [...others, tag] });
}
// Shows the groups with this tag, in the first of `tables` or, if it is in none, in the table of the list.
export function findTag(tables, tag) {
  if (tables.length && !tables.includes(table)) table = tables[0];
  filter = { ...fresh(), tags: [tag] };
  location.hash = table ? `#/groups/${encodeURIComponent(table)}` : "#/groups";
}
function tagChips() {
  const listed = found?.tags ?? [], known = new Set(listed.flatMap(({ values }) => values.map(([value]) => value)));
  const strange = filter.tags.filter((tag) => !known.has(tag)).map((tag) => [tag, null]);
  const chip = ([tag, count]) => {
    const on = filter.tags.includes(tag);
    return h("button", { type: "button", class: on ? "chip on" : "chip", "aria-pressed": String(on), title: visible(tag),
      onclick: () => toggleTag(tag) }, visible(valueOf(tag)).slice(0, 60), count === null ? null : h("small", null, count.toLocaleString("en")));
  };
  const row = (label, chips, others) => h("div", { class: "chips", role: "group", "aria-label": `Tag ${label}` },
    h("h2", null, "Tag ", h("b", null, label)), chips.map(chip), others > 0 && h("small", null, `and ${plural(others, "further value")}`));
  return [...strange.map((each) => row(visible(nameOf(each[0])), [each], 0)),
    ...listed.map(({ name, values, others }) => row(visible(name), values, others))];
}

// Draws all but the rows: tables, filters, histograms and the heads of the columns.
function controls(main = document.getElementById("main")) {
  if (!main.querySelector(".groups")) return;
  const tables = look?.tables ?? [], active = filter.prompt || filter.text || filter.flags.length || filter.tags.length || Object.keys(filter.bounds).length;
  fill(main.querySelector(".bar"), h("h1", { class: "unseen" }, "Groups"),
    h("div", { class: "tabs", role: "group", "aria-label": "Table" },
      tables.map((each) => h("a", { href: `#/groups/${encodeURIComponent(each.name)}`,
      "aria-current": each.name === table ? "true" : null }, visible(each.name), h("small", null, each.size.toLocaleString("en"))))),
    h("button", { type: "button", class: held ? "hold on" : "hold", "aria-pressed": String(held), title: "h", onclick: hold },
      held ? "Held" : "Live"),
    small.matches && h("label", null, "Order", h("select", { onchange: ({ target }) => sortBy(target.value) }, // the heads have no room
      COLUMNS.filter(([sort]) => sort).map(([sort, label]) => h("option", { value: sort, selected: sort === filter.sort }, label)))),
    h("span", { class: "count", role: "status" }, problem ? h("b", { class: "failure" }, problem) : !found ? "listing …"
      : `${found.matching.toLocaleString("en")} of ${plural(found.total, "group")}` + (found.read < found.total
      ? `, ${found.read.toLocaleString("en")} read` : "")),
    active ? h("button", { type: "button", class: "quiet",
      onclick: () => ((filter = { ...fresh(), sort: filter.sort, descending: filter.descending }), restart(main)) }, "Clear filters")
      : null);
  const flags = Object.entries(found?.flags ?? {}), histograms = found?.histograms ?? {};
  const chip = ([name, count]) => {
    const on = filter.flags.includes(name),
      toggle = () => change({ flags: on ? filter.flags.filter((each) => each !== name) : [...filter.flags, name] });
    return h("button", { type: "button", class: on ? "chip on" : "chip", "aria-pressed": String(on), onclick: toggle },
      visible(name.replace(/^ended by /, "")), h("small", null, count));
  };
  const chips = (label, ended) => {
    const some = flags.filter(([name]) => name.startsWith("ended by ") === ended);
    return some.length > 0 && h("div", { class: "chips", role: "group", "aria-label": label }, h("h2", null, label), some.map(chip));
  };
  const text = look?.tokenizer ? "search in prompts and completions" : "needs a tokenizer (--tokenizer)";
  fill(main.querySelector(".filters"),
    h("label", null, "Text", h("input", { type: "search", placeholder: text, value: filter.text,
      oninput: (event) => later({ text: event.target.value }) })),
    h("label", null, "Prompt", h("input", { type: "search", placeholder: "name or begin of the prompt, or a tag: environment=math", value: filter.prompt,
      oninput: (event) => later({ prompt: event.target.value }) })),
    tagChips(), chips("Notes", false), chips("Ended by", true),
    h("div", { class: "histograms" },
      Object.entries(HISTOGRAMS).filter(([name]) => histograms[name]).map(([name, label]) => histogram(histograms[name],
      { label: filter.bounds[name] ? `${label}: ${number(filter.bounds[name][0])} to ${number(filter.bounds[name][1])}` : label,
      chosen: filter.bounds[name], pick: pick(name) }))),
    h("p", { class: "quiet" }, "Click a bar to filter; with Shift the range grows."));
  fill(main.querySelector(".head"), h("div", { class: "row", role: "row", "aria-rowindex": 1 }, COLUMNS.map(([sort, label, kind]) => {
    const sorted = sort && filter.sort === sort;
    return h("span", { role: "columnheader", class: kind, "aria-sort": sorted ? (filter.descending ? "descending" : "ascending") : null },
      sort ? h("button", { type: "button", onclick: () => sortBy(sort) }, label,
        sorted ? (filter.descending ? " ↓" : " ↑") : "") : label);
  })));
}
function hold() {
  held = !held;
  held ? controls() : restart(undefined, false);
}

export function key(event) {
  if (event.key === "h") hold();
  if (!found || !["j", "k", "Enter"].includes(event.key) || (event.key === "Enter" && /^(A|BUTTON)$/.test(event.target.nodeName))) return;
  const row = blocks.get(Math.floor(focused / BLOCK))?.[focused % BLOCK];
  if (event.key === "Enter") return row && (location.hash = `#/group/${row.key}`);
  focused = Math.min(found.matching - 1, Math.max(0, focused + (event.key === "j" ? 1 : -1)));
  const top = focused * tall;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + tall > list.scrollTop + list.clientHeight) list.scrollTop = top + tall - list.clientHeight;
  draw();
}

// The keys before and after one in the list as it was shown last.
export function neighbours(key) {
  const keys = [...blocks.entries()].sort(([a], [b]) => a - b).flatMap(([, rows]) => (rows ?? []).map((row) => row.key)),
    at = keys.indexOf(key);
  return at < 0 ? [null, null] : [keys[at - 1] ?? null, keys[at + 1] ?? null];
}
