// Prompts: how often each is solved, over policy versions, as far as the page has read groups of it.
import { csvButton } from "./csv.js";
import { ask, fill, h, number, percent, plural, promptParts, s, visible, why } from "./dom.js";

const ORDERS = [["", "1", "last seen"], ["solved", "", "hardest"], ["solved", "1", "easiest"], ["change", "1", "most improved"],
  ["change", "", "most lost"], ["groups", "1", "most groups"], ["prompt", "", "name"]];
const BY_PRIORITY = ["priority", "1", "highest priority"];
const COLUMNS = 48;
let search = "", order = ORDERS[0], limit = 100, data = null, problem = "", here = null, timer = null, asked = 0, versions = [];

export function open(main, _, state) {
  here = main;
  data = null;
  versions = state.look?.versions ?? [];
  load();
  return () => (clearTimeout(timer), (here = null));
}
export function update(main, { look }) {
  versions = look.versions;
  Date.now() - asked > 3000 ? load() : draw();
}
async function load() {
  asked = Date.now();
  try {
    data = await ask(`api/prompts?${new URLSearchParams({ search, sort: order[0], descending: order[1], limit })}`);
    problem = "";
  } catch (error) {
    problem = error.message;
  }
  draw();
}
function draw() {
  if (!here) return;
  if (!data) return fill(here, h("p", { class: problem ? "failure" : "quiet" }, problem || "Asking …"));
  const [first, last] = data.versions, orders = data.tables.length ? [...ORDERS, BY_PRIORITY] : ORDERS;
  fill(here, h("div", { class: "prompts" }, h("h1", { class: "unseen" }, "Prompts"),
    h("div", { class: "bar" },
      h("label", null, "Prompt", h("input", { type: "search", value: search, placeholder: "name or text",
        oninput: (event) => ((search = event.target.value), clearTimeout(timer), (timer = setTimeout(load, 250))) })),
      h("label", null, "Order", h("select", { onchange: (event) => ((order = orders[+event.target.value]), load()) },
        orders.map((each, i) => h("option", { value: i, selected: each === order }, each[2])))),
      h("span", { class: "count", role: "status" }, `${data.matching.toLocaleString("en")} of ${plural(data.total, "prompt")}`)),
    h("section", { class: "card", "aria-label": "All prompts" }, picture(),
      data.tables.map((table) => h("p", null, h("b", null, table.name), " ", table.loaded ? `${table.loaded} loaded, ` : "", `${table.waiting.toLocaleString("en")} there now`)),
      why(h("p", { class: "quiet" }, `Solved: a reward of at least ${number(data.solved_reward)}. Groups that left before the page read them are missing here, most often those without variance. fresh/reward_mean in Training counts them all.`))),
    h("div", { class: "strips", role: "table", "aria-label": "Prompts" },
      h("div", { class: "strip head", role: "row" }, ["prompt", "solved", "change", "groups",
        `versions ${first} to ${last}`].map((name) => h("span", { role: "columnheader" }, name))),
      data.rows.map((row) => h("div", { class: "strip", role: "row" },
        h("span", { role: "cell" }, promptParts(row.prompt, row.text)),
        h("span", { role: "cell" }, row.groups ? percent(row.solved) : "–"), h("span",
          { role: "cell", class: row.change > 0.02 ? "plus" : row.change < -0.02 ? "minus" : "" },
          row.versions.length < 2 ? "–" : `${row.change > 0 ? "+" : ""}${(100 * row.change).toFixed(0)}`),
        h("span", { role: "cell", title: row.held ? `priority ${number(row.held.priority)}, drawn ${plural(row.held.drawn, "time")}` : "" },
          row.held?.drawn ? `${row.groups} of ${row.held.drawn}` : row.groups), h("span", { role: "cell", class: "heat" },
          h("span", { role: "img", "aria-label": `Solve rate by version: ${row.versions.map(([version, rate]) => `${version}: ${percent(rate)}`).slice(-12).join(", ")}` }, heat(row.versions, first, last)))))),
    data.rows.length < data.matching && h("button", { type: "button", class: "more", onclick: () => ((limit += 200), load()) },
      "Show more")));
}
// A column for each version: the shares of its groups by how many of their answers solved the prompt, all of them above.
function picture() {
  if (!versions.length) return h("p", { class: "quiet" }, "No groups read yet.");
  const share = (each, rate) => each.rates[rate] / each.groups, { version, solved } = versions.at(-1);
  const column = (each, i) => {
    let top = 100;
    return s("g", null, s("title", null, `version ${each.version}: ${percent(each.solved)} of answers solve; of ${plural(each.groups, "group")} ${
      percent(share(each, 7))} are solved by all answers, ${percent(share(each, 0))} by none`),
      each.rates.map((_, rate) => s("rect", { class: `s${rate}`, x: i, y: (top -= 100 * share(each, rate)).toFixed(2), width: 1,
        height: (100 * share(each, rate)).toFixed(2) })));
  };
  return h("figure", { class: "rates" }, h("figcaption", null, h("b", null, `${percent(solved)} solved`), ` at version ${version}`,
    h("span", { class: "scale" }, "by no answer", versions[0].rates.map((_, rate) => h("i", { class: `s${rate}` })), "by all"),
    csvButton("solve rates", () => [["version", "groups", "solved", ...versions[0].rates.map((_, rate) => `groups in eighth ${rate + 1} of answers`)],
      ...versions.map((each) => [each.version, each.groups, each.solved, ...each.rates])])),
    s("svg", { viewBox: `0 0 ${versions.length} 100`, preserveAspectRatio: "none", role: "img",
      "aria-label": `Solve rates of groups from version ${versions[0].version} to ${version}` }, versions.map(column)),
    h("div", { class: "ends" }, h("span", null, `version ${versions[0].version}`), h("span", null, version)));
}
// The solve rate of a prompt over the versions `first` to `last`, in at most COLUMNS cells.
// `seen`: [version, solve rate, groups] of each version.
function heat(seen, first, last) {
  const count = Math.min(COLUMNS, last - first + 1), cells = Array.from({ length: count }, () => [0, 0]);
  for (const [version, solved, groups] of seen) {
    const cell = cells[Math.min(count - 1, Math.floor(((version - first) / (last - first + 1)) * count))];
    if (cell) (cell[0] += solved * groups), (cell[1] += groups);
  }
  return cells.map(([solved, groups]) => h("i", { class: groups ? `s${Math.min(7, Math.floor((solved / groups) * 8))}` : "" }));
}
