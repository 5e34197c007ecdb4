// Charts: lines by uPlot; histograms and sparklines as small SVG.
import uPlot from "./uplot/uPlot.js";
import { columnsOf, csvButton } from "./csv.js";
import { h, number, plural, s } from "./dom.js";

const charts = new Map();
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const SERIES = ["series1", "series2", "series3", "series4", "series5", "series6"];
export const seriesClass = (index) => SERIES[index % SERIES.length];

// A line chart in `host`, made once by `key` and then given new data. `series`: [{label, index, fill, faint}]. With `log`
// the chart is of logarithms, and its labels are of numbers; values that are not above 0 are left out.
export function lines(host, key, data, { series, height = 120, time = false, sync = null, zero = true, log = false }) {
  let chart = charts.get(key);
  const kind = [log, ...series.map((each) => each.label)].join();
  if (chart && (chart.host !== host || chart.kind !== kind)) drop(key), (chart = null);
  if (!host.clientWidth) return;
  const [xs, ...columns] = data, last = time ? xs.at(-1) : 0, back = (y) => (log ? 10 ** y : y);
  const power = (y) => (y > 0 ? Math.log10(y) : y === undefined ? y : null);
  const drawn = [time ? xs.map((t) => t - last) : xs, ...columns.map((ys) => (log ? ys.map(power) : ys))];
  if (chart) {
    chart.now.at = last;
    if (chart.width !== host.clientWidth) chart.plot.setSize({ width: (chart.width = host.clientWidth), height });
    chart.plot.setData(drawn);
    return;
  }
  const axis = { stroke: colour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false } };
  const now = { at: last };
  const tip = h("div", { class: "tip", hidden: true });
  const options = {
    width: host.clientWidth, height,
    legend: { show: false }, padding: [8, 16, 0, 0],
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, ...(sync ? { sync: { key: sync } } : {}) },
    scales: { x: { time: false }, y: { range: (_, low, high) => span(low, high, zero && !log) } },
    axes: [{ ...axis, size: 24, space: time ? 64 : 44, incrs: time ? SECONDS : STEPS, values: (_, ticks) => labels(ticks, time ? ago : number) },
      { ...axis, size: 50, space: 28, values: (_, ticks) => labels(ticks.map(back), number) }],
    series: [{}, ...series.map((each, index) => ({
      label: each.label, stroke: colour(seriesClass(each.index ?? index)) + (each.faint ? "55" : ""), width: each.faint ? 1 : 1.6,
      spanGaps: false, points: { show: false }, fill: each.fill ? `${colour(seriesClass(each.index ?? index))}22` : undefined,
    }))],
    hooks: {
      setCursor: [(plot) => {
        const at = plot.cursor.idx;
        tip.hidden = at === null || at === undefined;
        if (tip.hidden) return;
        const x = plot.data[0][at];
        tip.textContent = [time ? clock(x + now.at) : number(x),
          ...series.map((each, i) => (each.faint ? "" : `${each.label} ${said(plot.data[i + 1][at], back)}`))].filter(Boolean).join("   ");
      }],
    },
  };
  host.replaceChildren();
  const plot = new uPlot(options, drawn, host);
  host.append(tip);
  charts.set(key, { plot, host, now, kind, width: host.clientWidth });
}
const SECONDS = [5, 10, 30, 60, 120, 300, 600, 1200, 3600, 7200, 21600];
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
// The labels of an axis. They get more digits, up to ten, until all labels differ.
export function labels(ticks, say) {
  for (let digits = 3; ; digits++) {
    const texts = ticks.map((tick) => say(tick, digits));
    if (digits > 9 || new Set(texts).size === texts.length) return texts;
  }
}
const said = (y, back) => (y === null || y === undefined ? "–" : number(back(y)));
export const ago = (t, digits) => (t > -1 ? "now" : t > -90 ? `−${Math.round(-t)} s` : `−${+(-t / 60).toFixed(digits - 2)} min`);
const clock = (t) => new Date(1000 * t).toLocaleTimeString("en", { hourCycle: "h23" });
// The range of an axis of y: from `low` to `high` with some room, from 0 on if `zero` and no value is below it.
function span(low, high, zero) {
  if (low === null || low === undefined) return [0, 1];
  if (zero && low >= 0) low = 0;
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - room, high + room];
}
export function drop(key) {
  charts.get(key)?.plot.destroy();
  charts.delete(key);
}
export const dropAll = () => [...charts.keys()].forEach(drop);

// Bars of {edges, all, matching}. `pick(low, high)` is called with the bounds of a bar that is clicked.
export function histogram({ edges, all, matching }, { label, chosen = null, pick = null, width = 200, height = 44 }) {
  const most = Math.max(1, ...all), step = width / all.length;
  const tall = (count) => (count ? Math.max(2, (height * Math.sqrt(count)) / Math.sqrt(most)) : 0);
  const bars = all.map((count, i) => {
    const low = edges[i], high = edges[i + 1], within = chosen && low >= chosen[0] - 1e-9 && high <= chosen[1] + 1e-9;
    const bar = (n, kind) => s("rect", { class: kind, x: (i * step + 0.5).toFixed(1), width: Math.max(1, step - 1).toFixed(1),
      y: (height - tall(n)).toFixed(1), height: tall(n).toFixed(1) });
    return s("g", { class: `bin${within ? " chosen" : ""}${pick ? " pick" : ""}`,
      onclick: pick && ((event) => pick(low, high, event.shiftKey)) },
      s("rect", { class: "hit", x: i * step, y: 0, width: step, height }),
      bar(count, "all"), matching ? bar(matching[i], "part") : null,
      s("title", null, `${number(low)} to ${number(high)}: ${count}`));
  });
  const whole = edges.length === all.length + 1 && edges.every((edge) => Math.abs(edge % 1) === 0.5);
  const ends = whole ? [edges[0] + 0.5, edges[edges.length - 1] - 0.5] : [edges[0], edges[edges.length - 1]];
  return h("figure", { class: "histogram" },
    h("figcaption", null, label, csvButton(label, () => [["from", "to", "groups", matching && "matching"],
      ...all.map((count, i) => [edges[i], edges[i + 1], count, matching && matching[i]])].map((row) => (matching ? row : row.slice(0, 3))))),
    s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${label}: ${plural(all.reduce((a, b) => a + b, 0), "group")} from ${number(ends[0])} to ${number(ends[1])}` }, bars),
    h("div", { class: "ends" }, h("span", null, number(ends[0])), h("span", null, ends[1] === ends[0] ? "" : number(ends[1]))));
}

// A bar that is `share` full.
export const bar = (share) => s("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
  s("rect", { class: "track", width: 100, height: 6 }), s("rect",
    { class: "level", width: (100 * Math.min(1, Math.max(0, share || 0))).toFixed(1), height: 6 }));

// A small line without axes, with its last value in words.
export function sparkline(values, { label, width = 150, height = 32, text = number, tone = "" }) {
  const known = values.map((value, i) => [i, value]).filter(([, value]) => value !== null && value !== undefined);
  const ys = known.map(([, value]) => value), low = Math.min(...ys, 0), high = Math.max(...ys, low + 1e-9);
  const points = known.map(([i, value]) => `${((i / Math.max(1, values.length - 1)) * width).toFixed(1)},${(height - 2 - ((value - low) / (high - low)) * (height - 4)).toFixed(1)}`);
  return h("div", { class: `spark ${tone}` },
    h("span", { class: "label" }, label), h("b", null, text(ys[ys.length - 1])),
    csvButton(label, () => columnsOf(["number", label], [values.map((_, i) => i + 1), values])),
    s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${label}, now ${text(ys[ys.length - 1])}` },
      s("polyline", { points: points.join(" ") })));
}
