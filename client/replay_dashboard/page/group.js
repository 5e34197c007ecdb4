// One group: the prompt once, its rollouts side by side, and the sequences of each beside each other.
import { ask, bytes, duration, fill, h, number, plural, show, visible } from "./dom.js";
import { findTag, neighbours } from "./groups.js";
import { legend, shadesOf, signed, spreadOf, strip, tokens, turns } from "./tokens.js";

const AT_ONCE = 16;
const ORDERS = { reward: (a, b) => b.reward - a.reward || a.index - b.index, advantage: (a, b) => b.advantage - a.advantage,
  length: (a, b) => b.tokens - a.tokens, "log-prob": (a, b) => (a.mean_logprob ?? 0) - (b.mean_logprob ?? 0),
  number: (a, b) => a.index - b.index };
let key = "", item = null, shade = "log-prob", order = "reward", compare = [null, null], many = AT_ONCE, address = "", problem = "",
  here = null, gone = false;

export function open(main, [wanted], state) {
  if (wanted !== key) (item = null), (compare = [null, null]), (many = AT_ONCE), (problem = ""), (gone = false);
  key = wanted;
  here = main;
  address = state.look?.address ?? "";
  draw();
  if (!item) load();
  return () => (here = null);
}
export function update(main, state) {
  address = state.look.address;
}
async function load() {
  const asked = key;
  try {
    const answer = await ask(`api/groups/${key}`);
    if (asked === key) (item = answer), (problem = "");
  } catch (error) {
    problem = error.message;
  }
  draw();
}

function draw() {
  if (!here) return;
  const [before, after] = neighbours(key);
  const step = (to, label) => (to ? h("a", { class: "button", href: `#/group/${to}` }, label) : null);
  const head = h("div", { class: "bar" }, h("a", { class: "button", href: "#/groups" }, "← List"), step(before, "↑ Previous"),
    step(after, "↓ Next"), h("h1", null, "Group ", h("code", null, key)));
  if (!item) return fill(here, h("div", { class: "group" }, head,
    h("p", { class: problem ? "failure" : "quiet" }, problem || "Asking the server …")));
  const group = item.group;
  fill(here, h("div", { class: "group" }, head, about(), group ? [promptOf(group), tools(group), difference(group), completions(group)]
    : damaged(), h("div", { class: "inspector", "aria-live": "off" }, "Point at a token to see what is known of it.")));
}

function about() {
  const group = item.group, tables = Object.entries(item.tables);
  const rows = [["in", tables.map(([name,
    held]) => `${name} (priority ${number(held.priority)}${held.effective_priority !== null && held.effective_priority !== held.priority ? `, now ${number(held.effective_priority)}` : ""}, used ${held.times_sampled}×)`).join(", ") || "no table any more: it was consumed, evicted or dropped"],
    ["age", duration(item.age)], ["policy version", group?.policy_version_end ? `${group.policy_version} to ${group.policy_version_end}`
      : item.policy_version], ["staleness", item.staleness], ["size", bytes(item.bytes)],
    ...Object.entries(item.tags).map(([name, value]) => [`tag ${name}`, h("button", { type: "button", class: "chip",
      title: "Groups with this tag", onclick: () => findTag(tables.map(([each]) => each), `${name}=${value}`) }, visible(value).slice(0, 300))])];
  if (group) {
    const rewards = group.rewards, mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    rows.unshift(["prompt", group.prompt_id || "without a name"],
      ["reward", `${number(mean)} mean of ${rewards.length}, ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}`]);
    for (const [name, value] of [...Object.entries(group.sampling), ...Object.entries(group.meta)]) rows.push([name,
      typeof value === "object" ? JSON.stringify(value) : value]);
  }
  return h("section", { class: "card about", "aria-label": "Facts" },
    h("dl", { class: "facts" }, rows.map(([label, value]) => h("div", null, h("dt", null, visible(label).slice(0, 60)),
    h("dd", null, value instanceof Node ? value : visible(value).slice(0, 300))))),
    group?.extras.length > 0 && h("details", null, h("summary", null, plural(group.extras.length, "extra array")),
      h("dl", { class: "facts" }, group.extras.map((each) => h("div", null, h("dt", null, visible(each.name).slice(0, 60)),
      h("dd", null, `${each.dtype} [${each.shape.join(", ")}], ${bytes(each.bytes)}${each.axis === "group" ? "" : ` axis ${each.axis}:`} ${each.head.map((x) => number(x)).join(" ")}${each.shape.length && each.shape[0] > 8 ? " …" : ""}`))))));
}

const damaged = () => h("section", { class: "card", "aria-label": "Payload" },
  h("h2", null, item.problem.startsWith("not a rollout group") ? "Raw bytes, not a group" : "A damaged group"),
  h("p", { class: "failure" }, visible(item.problem)), h("pre", { tabindex: 0 }, item.head.join("\n")));

const promptOf = (group) => h("section", { class: "card prompt", "aria-label": "Prompt" },
  h("h2", null, "Prompt", h("small", null, plural(group.prompt.total, "token"))),
  h("div", { class: "text", tabindex: 0 }, tokens(group.prompt, -1)), rest(group.prompt, -1));

// ------------------------------------------------------------------------------------------------ tools

function select(label, options, value, use) {
  return h("label", null, label, h("select", { onchange: (event) => (use(event.target.value), draw()) },
    options.map((each) => h("option", { value: each, selected: String(each) === String(value) }, visible(each)))));
}
function tools(group) {
  if (!shadesOf(group).includes(shade)) shade = "log-prob";
  const numbers = ["–", ...group.completions.map((each) => each.index)];
  return h("div", { class: "tools" },
    select("Colour", shadesOf(group), shade, (value) => (shade = value)), legend(shade),
    select("Order", Object.keys(ORDERS), order, (value) => (order = value)),
    select("Compare", numbers, compare[0] ?? "–", (value) => (compare[0] = value === "–" ? null : +value)),
      select("with", numbers, compare[1] ?? "–", (value) => (compare[1] = value === "–" ? null : +value)),
    h("span", { class: "push" }), h("button", { type: "button", onclick: copyJson }, "Copy as JSON"),
      h("button", { type: "button", onclick: copyPython }, "Copy as Python"),
      h("a", { class: "button", href: `api/groups/${key}?whole=1`, download: `group-${key}.json` }, "Download"));
}
async function clip(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    show(h("p", null, `${what} is in the clipboard.`));
  } catch { // only loopback and encrypted pages may
    show(h("p", null, "This browser does not allow it here. Copy it yourself:"),
      h("textarea", { readonly: true, rows: 12, "aria-label": what }, text));
  }
}
const copyJson = () => ask(`api/groups/${key}?whole=1`).then((whole) => clip(JSON.stringify(whole, null, 1), "The group as JSON"),
  (error) => show(h("p", { class: "failure" }, error.message)));
const copyPython = () => clip(`from replay_client import ReplayClient\n\nwith ReplayClient.from_env(address=${JSON.stringify(address)}) as client:\n    [item] = client.get([${key}])\n    group = item.group\n`, "Python that loads the group");

// ------------------------------------------------------------------------------------------------ completions

// The rollouts with what the orders look at. A group without several sequences has one sequence in each.
function rolloutsOf(group) {
  const found = new Map();
  for (const each of group.completions) {
    if (!found.has(each.rollout)) found.set(each.rollout, { index: each.rollout, reward: each.reward, advantage: each.advantage, tokens: 0,
      mean_logprob: each.mean_logprob, finish_reason: each.finish_reason, sequences: [] });
    const rollout = found.get(each.rollout);
    rollout.sequences.push(each);
    rollout.tokens += each.tokens;
    rollout.mean_logprob = rollout.sequences.reduce((sum, part) => sum + (part.mean_logprob ?? 0) * part.tokens, 0) / (rollout.tokens || 1);
  }
  return [...found.values()];
}
const standing = (rollout, group) => {
  const most = Math.max(...group.rewards), least = Math.min(...group.rewards);
  return most > least ? (rollout.reward === most ? "best" : rollout.reward === least ? "worst" : "") : "";
};
const scored = ({ reward, advantage }) => [h("b", null, `reward ${number(reward)}`),
  h("small", { class: advantage < 0 ? "minus" : "plus" }, `advantage ${signed(advantage)}`)];

function completions(group) {
  const several = group.completions.some((each) => each.parts > 1), look = { shade, spread: spreadOf(group, shade) };
  let left = many;
  const cards = [...rolloutsOf(group)].sort(ORDERS[order]).map((rollout) => {
    const shown = rollout.sequences.slice(0, Math.max(0, left));
    left -= shown.length;
    if (!shown.length) return null;
    if (!several) return sequenceCard(shown[0], look, `card completion ${standing(rollout, group)}`,
      h("h2", null, `#${shown[0].index} `, scored(rollout)), rollout.finish_reason);
    return h("section", { class: `rollout ${standing(rollout, group)} ${shown.length > 1 ? "wide" : ""}`, "data-rollout": rollout.index,
      "aria-label": `Rollout ${rollout.index}` },
      h("h2", null, `Rollout ${rollout.index} `, scored(rollout), h("small", null, [plural(rollout.sequences.length, "sequence"),
        plural(rollout.tokens, "token"), rollout.finish_reason && `ended by ${visible(rollout.finish_reason)}`].filter(Boolean).join(" · "))),
      h("div", { class: "sequences" }, shown.map((each) => sequenceCard(each, look, "card completion",
        h("h3", null, `#${each.index} `, each.parts > 1 && h("small", null, `sequence ${each.part + 1} of ${each.parts}`))))));
  });
  const total = group.completions.length, kind = several ? "sequences" : "completions";
  return h("section", { class: "completions", "aria-label": several ? "Rollouts" : "Completions", tabindex: 0 }, cards,
    total > many && h("button", { type: "button", class: "more", onclick: () => ((many += AT_ONCE), draw()) },
      `Show ${Math.min(AT_ONCE, total - many)} more of ${total} ${kind}`));
}
function sequenceCard(each, look, kind, head, ended = "") {
  const facts = [plural(each.tokens, "token"), each.context_tokens > 0 && `${each.context_tokens} of context before them`,
    ended && `ended by ${visible(ended)}`,
    each.mean_logprob === null ? "log-probs unknown" : `mean log-prob ${number(each.mean_logprob)}`,
    each.mean_logprob !== null && each.unknown_logprobs > 0 && `${each.unknown_logprobs} unknown`,
    each.masked_tokens > 0 && `${each.masked_tokens} masked`];
  return h("article", { class: kind, "data-row": each.index, "aria-label": `Sequence ${each.index}` }, head,
    h("p", { class: "quiet" }, facts.filter(Boolean).join(" · ")), strip(each),
    h("div", { class: "text", tabindex: 0 }, each.window.total ? turns(each, look) : h("em", { class: "quiet" }, "empty")),
    rest(each.window, each.index));
}
function rest(window, row) {
  const left = window.total - window.ids.length;
  return left > 0 ? h("button", { type: "button", class: "more", onclick: () => more(window, row) },
    `Show the rest: ${plural(left, "token")}`) : null;
}
async function more(window, row) {
  try {
    const next = await ask(`api/groups/${key}/tokens?completion=${row}&start=${window.ids.length}&stop=${window.total}`);
    window.ids.push(...next.ids);
    if (window.text) window.text.push(...next.text);
    for (const [name, values] of Object.entries(next.arrays)) window.arrays[name].push(...values);
  } catch (error) {
    show(h("p", { class: "failure" }, error.message));
  }
  draw();
}

// ------------------------------------------------------------------------------------------------ differences

const LONGEST = 1200;
// The tokens of each side that are not in a longest common subsequence of what both begin with.
function differing(a, b) {
  let begin = 0;
  while (begin < a.length && begin < b.length && a[begin] === b[begin]) begin++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const x = a.slice(begin, a.length - end), y = b.slice(begin, b.length - end),
    only = [new Set(x.map((_, i) => begin + i)), new Set(y.map((_, j) => begin + j))];
  if (x.length > LONGEST || y.length > LONGEST) return only;
  const width = y.length + 1, table = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--) table[i * width + j] = x[i] === y[j]
    ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  for (let i = 0, j = 0; i < x.length && j < y.length; ) {
    if (x[i] === y[j]) only[0].delete(begin + i++), only[1].delete(begin + j++);
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
    else j++;
  }
  return only;
}
// Two completions beside each other, with the tokens marked that the other one does not have; null: none are chosen.
function difference(group) {
  if (compare.includes(null) || compare[0] === compare[1]) return null;
  const both = compare.map((index) => group.completions.find((each) => each.index === index));
  if (!both.every(Boolean)) return null;
  const only = differing(both[0].window.ids, both[1].window.ids), cut = both.some((each) => each.window.ids.length < each.window.total);
  return h("section", { class: "difference", "aria-label": "Differences" }, both.map((each, side) => h("article", { class: "card" },
    h("h2", null, `#${each.index} `, h("b", null, `reward ${number(each.reward)}`),
      h("small", null, `${plural(only[side].size, "token")} that #${both[1 - side].index} does not have${cut ? ", of those shown" : ""}`)),
      h("div", { class: `text side${side}`, tabindex: 0 }, tokens(each.window, each.index, { marked: only[side] })))));
}

export function keyPressed(event) {
  const [before, after] = neighbours(key);
  if (event.key === "Escape") location.hash = "#/groups";
  if (event.key === "j" && after) location.hash = `#/group/${after}`;
  if (event.key === "k" && before) location.hash = `#/group/${before}`;
}
export { keyPressed as key };
