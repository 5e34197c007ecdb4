// Training: the curves of metrics.jsonl, several runs over each other, while they grow.
import { drop, lines, seriesClass } from "./charts.js";
import { columnsOf, csvButton } from "./csv.js";
import uPlot from "./uplot/uPlot.js";
import { ask, fill, h, plural, visible } from "./dom.js";

const FIRST = ["fresh/reward_mean", "fresh/zero_variance_fraction", "train/entropy", "correction/kl", "correction/ess",
  "fresh/completion_length_mean", "train/grad_norm", "train/tokens_per_second", "time/step"];
const SMOOTHING = { none: 0, light: 0.6, strong: 0.9, "very strong": 0.98 };
const SECTIONS = { fresh: "What was generated now", replay: "What was put in its place", train: "The update",
  correction: "How far off-policy", time: "Where the time goes", eval: "Evaluation" };
let chosen = new Set(), data = null, problem = "", version = -1, asking = false, here = null, watcher = null, visibleCharts = new Set();
let onlyDifferent = true, search = "", smoothing = "none", log = false;

export function open(main) {
  here = main;
  data = null;
  version = -1;
  visibleCharts = new Set();
  watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? visibleCharts.add(target) : visibleCharts.delete(target);
    paint();
  }, { rootMargin: "200px" });
  load();
  return () => (watcher.disconnect(), (here = null));
}
export function update(main, { look }) {
  if (look.runs_version !== version) load();
}
async function load() {
  if (asking) return;
  asking = true;
  try {
    data = await ask(`api/training?${new URLSearchParams([...chosen].map((name) => ["run", name]))}`);
    version = data.version;
    if (!chosen.size) data.curves.forEach((curve) => chosen.add(curve.run));
    problem = "";
  } catch (error) {
    problem = error.message;
  }
  asking = false;
  draw();
}

function draw() {
  if (!here) return;
  if (!data) return fill(here, h("p", { class: problem ? "failure" : "quiet" }, problem || "Reading …"));
  if (!data.runs.length) return fill(here, h("div", { class: "training" }, h("h1", null, "Training"),
    h("p", { class: "quiet" }, data.folder ? `No metrics.jsonl below ${data.folder} yet.`
    : "Start the page with --runs FOLDER to see the metrics of a trainer.")));
  const names = [...new Set(data.curves.flatMap((curve) => Object.keys(curve.columns)))].filter((name) => name.includes("/")),
    sections = [...new Set(names.map((name) => name.split("/")[0]))];
  const order = Object.keys(SECTIONS), place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  sections.sort((a, b) => place(a) - place(b));
  const wanted = names.filter((name) => `${name} ${data.meanings[name] ?? ""}`.toLowerCase().includes(search)).sort();
  fill(here, h("div", { class: "training" }, h("h1", null, "Training"),
    h("div", { class: "runs", role: "group", "aria-label": "Runs" }, data.runs.map((run) => {
      const index = data.curves.findIndex((curve) => curve.run === run.name);
      return h("label", { class: index >= 0 ? `on ${seriesClass(index)}` : "" },
        h("input", { type: "checkbox", checked: chosen.has(run.name),
        onchange: (event) => (event.target.checked ? chosen.add(run.name) : chosen.size > 1 && chosen.delete(run.name), load()) }),
        visible(run.name), h("small", null, plural(run.steps, "step") + (run.damaged ? `, ${plural(run.damaged, "damaged line")}` : "")));
    })),
    h("div", { class: "bar" },
      h("label", null, "Find", h("input", { type: "search", value: search, placeholder: "name or meaning",
        oninput: ({ target }) => ((search = target.value.toLowerCase()), draw()) })),
      h("label", null, "Smoothing", h("select", { onchange: ({ target }) => ((smoothing = target.value), draw()) },
        Object.keys(SMOOTHING).map((each) => h("option", { value: each, selected: each === smoothing }, each)))),
      h("label", null, h("input", { type: "checkbox", checked: log, onchange: ({ target }) => ((log = target.checked), draw()) }), "Log scale"),
      search && h("span", { class: "count", role: "status" }, plural(wanted.length, "metric"))),
    search ? section("Found", wanted, "found") : [section("At a glance", FIRST.filter((name) => names.includes(name)), "first"),
      sections.map((each) => folded(each, names.filter((name) => name.startsWith(`${each}/`) && !FIRST.includes(name)).sort()))],
    configuration()));
  here.querySelectorAll(".chart").forEach((chart) => watcher.observe(chart));
  paint();
}
// The settings of the chosen runs, a column for each. Of several runs, those that differ, or all.
function configuration() {
  const all = data.configurations, known = [...new Set(all.flatMap((each) => Object.keys(each)))].sort();
  if (!known.length) return null;
  const told = all.filter((each) => Object.keys(each).length), several = told.length > 1; // the settings of an older run may be unknown
  const differs = (name) => told.some((each) => each[name] !== told[0][name]);
  const names = several && onlyDifferent ? known.filter(differs) : known, cells = (name) => all.map((each) => each[name] ?? "–");
  const rows = () => [["setting", ...data.curves.map((curve) => curve.run)], ...names.map((name) => [name, ...cells(name)])];
  return h("section", { class: "card configuration", "aria-label": "Configuration" },
    h("h2", null, "Configuration", h("small", null, several ? `${plural(known.filter(differs).length, "difference")} of ${plural(known.length, "setting")}`
      : `${plural(known.length, "setting")}; choose another run to see what differs`), csvButton("the configuration", rows)),
    several && h("label", null, h("input", { type: "checkbox", checked: onlyDifferent,
      onchange: ({ target }) => ((onlyDifferent = target.checked), draw()) }), "Only what differs"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings of the runs" }, h("table", null,
      h("thead", null, h("tr", null, ["setting", ...data.curves.map((curve) => visible(curve.run))].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, names.map((name) => h("tr", { class: several && differs(name) ? "differs" : null }, h("th", { scope: "row" }, visible(name)),
        cells(name).map((value) => h("td", null, visible(value)))))))));
}
const section = (title, names, prefix) => h("section", { "aria-label": title }, h("h2", null, title), curves(names, prefix));
const folded = (prefix, names) => names.length > 0 && h("details", null, h("summary", null, h("h2", null, SECTIONS[prefix] ?? prefix,
  h("small", null, `${prefix}/`, " ", plural(names.length, "metric")))), curves(names, prefix));
const curves = (names, prefix) => h("div", { class: "curves" }, names.map((name) => h("article", { class: "card curve" },
  h("div", { class: "title" }, h("h3", null, name), csvButton(name, () => numbersOf(name))),
  h("p", { class: "quiet", title: data.meanings[name] }, data.meanings[name] ?? "docs/metrics.md does not say what this is."),
  h("div", { class: "chart", "data-keep": `${prefix}:${name}`, role: "img", "aria-label": `Curve of ${name}` }))));
// What a chart shows of a metric, without smoothing: the steps, and a column for each run.
function numbersOf(name) {
  const shown = data.curves.filter((curve) => curve.columns[name]);
  return columnsOf(["step", ...shown.map((curve) => curve.run)], uPlot.join(shown.map((curve) => [curve.steps, curve.columns[name]])));
}
// An exponential mean, whose beginning counts no value before the first.
function smooth(ys) {
  const keep = SMOOTHING[smoothing];
  let sum = 0, weight = 0;
  return ys.map((y) => {
    if (y === null || y === undefined) return y;
    [sum, weight] = [keep * sum + (1 - keep) * y, keep * weight + 1 - keep];
    return sum / weight;
  });
}

// Draws the charts that are on the screen. With smoothing, the values as they are stand faintly behind.
function paint() {
  if (!data || !here) return;
  for (const chart of visibleCharts) {
    if (!chart.isConnected) {
      visibleCharts.delete(chart);
      continue;
    }
    const key = chart.dataset.keep, name = key.slice(key.indexOf(":") + 1),
      shown = data.curves.map((curve, index) => ({ curve, index })).filter(({ curve }) => curve.columns[name]);
    if (!shown.length) drop(key);
    else lines(chart, key, uPlot.join([...shown.map(({ curve }) => [curve.steps, smooth(curve.columns[name])]),
      ...(smoothing === "none" ? [] : shown.map(({ curve }) => [curve.steps, curve.columns[name]]))]),
      { series: [...shown.map(({ curve, index }) => ({ label: curve.run, index })),
        ...(smoothing === "none" ? [] : shown.map(({ curve, index }) => ({ label: `${curve.run} as it is`, index, faint: true })))],
        height: 130, sync: "training", zero: false, log });
  }
}
