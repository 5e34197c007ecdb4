// Overview: whether it learns; the picture of the run, alive; each table; what `replay doctor` would say.
import { bar, drop, histogram, lines, sparkline } from "./charts.js";
import { columnsOf, csvButton } from "./csv.js";
import { bytes, duration, fill, h, number, percent, plural, rate, s, visible, why } from "./dom.js";

const LEAVING = [
  ["consumed", "used up", ""], ["evicted", "evicted", ""], ["evicted_unsampled", "of these never used", "bad"],
    ["stale", "dropped stale", "warn"],
  ["stale_refused", "refused stale", "warn"], ["deleted", "deleted", ""], ["duplicates", "sent twice", ""],
    ["forward_refused", "not forwarded", "warn"],
];
// Clients with a row.
const SHOWN = 20;
// Seconds from which on a wait is long, as the server says: three usual steps.
let long = 20;
// The answers that are shown, and since when: a person wants to read them.
let answers = null, shownAt = 0;
const ANSWER_SECONDS = 10;

export function open(main) {
  fill(main, h("div", { class: "overview" }, h("p", { class: "quiet" }, "Waiting for the server …")));
  return () => drop("overview");
}

export function update(main, { look, history }) {
  const host = main.firstElementChild;
  if (!look.server) return fill(host, verdictOf(look));
  long = look.server.long_wait;
  fill(host, verdictOf(look), learning(look), picture(look, history), h("div", { class: "cards" },
    look.tables.map((table) => tableCard(table, look, history)), serverCard(look),
      look.problem ? null : doctorCard(look), // the verdict above says that the server does not answer
      look.shards?.length ? shardsCard(look) : null, look.admission && permitsCard(look),
      sessionsCard(look), look.clients.length ? clientsCard(look) : null));
  for (const table of look.tables) chartOf(host, table, history);
}

function verdictOf({ verdict }) {
  return h("section", { class: `verdict ${verdict.level}`, "aria-label": "Health" },
    h("h1", null, h("i", { "aria-hidden": "true" }), visible(verdict.headline)),
    verdict.detail && h("p", null, visible(verdict.detail)),
    verdict.remedy && h("p", { class: "remedy" }, h("b", null, "What to do: "), verdict.remedy));
}

// ------------------------------------------------------------------------------------------------ the picture

// The mean rates in and out of a table over the last ten looks.
function ratesOf(history, name) {
  const recent = history.slice(-10).map((point) => point.tables[name]).filter((each) => each && each[0] !== null);
  const mean = (column) => (recent.length ? recent.reduce((sum, each) => sum + each[column], 0) / recent.length : null);
  return [mean(0), mean(1)];
}

// The arrow into a table, or out of it: its rate `flow`, and the requests `wait` that wait to `verb`.
function edge(label, flow, wait, verb, kind = "") {
  const blocked = wait?.count > 0 && wait.seconds >= 1, stuck = blocked && wait.seconds >= long;
  const pace = flow > 0 ? (flow > 50 ? "fast" : flow > 5 ? "steady" : "slow") : "still";
  return h("div", { class: `edge ${kind} ${stuck ? "blocked" : blocked ? "waits" : pace}` },
    h("span", { class: "flow" }, h("b", null, rate(flow)), `/s ${label}`),
    h("span", { class: "line", "aria-hidden": "true" }, s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none" },
      s("path", { d: "M0 5H100" }))),
    blocked && h("span", { class: "wait" }, `${wait.count} ${wait.count === 1 ? "waits" : "wait"} to ${verb}, ${duration(wait.seconds)}`));
}

function since(tables, verb) {
  const least = Math.min(...tables.map((each) => each[verb].age));
  return least < 3 ? `${verb} just now` : `${verb} ${duration(least)} ago`;
}
// Generators, tables and trainer with the rates between them. A table without direct inserts has no arrow into it.
function picture({ tables, policy, server, admission, clients, overdue }, history) {
  const names = (role) => clients.filter((each) => each.role.includes(role) && !each.ended).slice(0, 4)
    .map((each) => h("small", { class: each.open ? null : "warn" }, visible(each.name), each.open ? "" : `, seen ${duration(each.age)} ago`));
  const gone = (role) => (overdue.some((each) => each.role === role) ? "gone" : "");
  const feeders = (name) => tables.filter((table) => table.config.forward_to === name);
  const rows = tables.map((table) => {
    const [into, out] = ratesOf(history, table.name), from = feeders(table.name);
    const forwarded = from.reduce((sum, each) => sum + each.forwarded, 0);
    const bound = capacity(table), share = Math.min(1, table.size / bound);
    const direct = !from.length || table.inserts > forwarded * 1.02 + 2 || table.inserting.count;
    return [
      direct ? edge("inserted", into, table.inserting, "insert", "in") : h("div", { class: "edge none" }),
      h("div", { class: `node table ${share > 0.98 && table.inserting.count ? "full" : ""}` },
        from.length ? h("span", { class: "forward" },
          `↳ ${rate(direct ? null : into)}/s from ${visible(from.map((each) => each.name).join(", "))}`) : null,
        h("a", { href: `#/groups/${encodeURIComponent(table.name)}` }, visible(table.name)),
        bar(share), h("small", null, `${table.size.toLocaleString("en")} of ${bound.toLocaleString("en")} · ${bytes(table.bytes)}`)),
      edge("sampled", out, table.sampling, "sample", "out"),
    ];
  });
  const acquiring = admission?.acquiring;
  return h("section", { class: "picture", "aria-label": "The run" },
    h("div", { class: `node end generators ${gone("generator")}` }, h("b", null, "generators"), names("generator"),
      h("small", null, since(tables, "inserted")), h("small", null, plural(server.insert_streams, "insert stream")),
        admission && h("small", null, `${plural(admission.running, "permit")} in use`),
      acquiring?.count > 0 && acquiring.seconds > 1 && h("span", { class: `wait ${acquiring.seconds >= long ? "long" : ""}` },
        `${acquiring.count} ${acquiring.count === 1 ? "waits" : "wait"} for permits, ${duration(acquiring.seconds)}`)),
    h("div", { class: "flows" }, rows),
    h("div", { class: `node end trainer ${gone("trainer")}` }, h("b", null, "trainer"), names("trainer"), h("small", null, since(tables, "sampled")),
      server.sample_streams > 0 && h("small", null, plural(server.sample_streams, "sample stream"))),
    h("div", { class: "back" }, h("span", null, "policy ", h("b", null, `version ${policy.version}`), `, ${duration(policy.age)} ago`,
      policy.interval > 0 && `; usually every ${duration(policy.interval)}`)));
}

const capacity = (table) => Math.min(table.config.max_size, table.config.rate_limiter.max_size ?? Infinity);

// ------------------------------------------------------------------------------------------------ a table

// The points of a chart of a table, as rows with times.
const pointsOf = (table, history, names, places) => columnsOf(["time", ...names], [history.map((point) => new Date(1000 * point.t).toISOString()),
  ...places.map((i) => history.map((point) => point.tables[table.name]?.[i] ?? null))]);
function tableCard(table, look, history) {
  const { config } = table, list = look.lists[table.name];
  const facts = [config.rate_limiter.type.replaceAll("_", " "), `${config.sampler.type} sampling`,
    config.max_times_sampled ? `used ${config.max_times_sampled === 1 ? "once" : `at most ${plural(config.max_times_sampled, "time")}`}`
    : "used without limit",
    config.max_staleness !== null && `stale after ${config.max_staleness}`, config.forward_to && `feeds ${config.forward_to}`,
      config.rate_limiter.max_size === null && (config.when_full === "evict" ? `evicts by ${config.remover.type}`
      : `${config.when_full}s when full`)];
  const leaving = LEAVING.filter(([name]) => table[name] > 0);
  return h("section", { class: "card table", "aria-label": table.name },
    h("h2", null, h("a", { href: `#/groups/${encodeURIComponent(table.name)}` }, visible(table.name)),
      h("small", null, facts.filter(Boolean).join(" · "))),
    h("div", { class: "columns" },
      h("div", null,
        h("div", { class: "legend" }, h("span", { class: "series1" }, `in ${rate(table.inserts_per_second)}/s`),
          h("span", { class: "series2" }, `out ${rate(table.samples_per_second)}/s`), h("small", null, "mean of the last minute"),
          csvButton(`inserts and samples a second of ${table.name}`, () => pointsOf(table, history, ["in", "out"], [0, 1]))),
        h("div", { class: "chart", "data-keep": `rates-${table.name}`, role: "img",
          "aria-label": `Inserts and samples a second of ${table.name}` }),
        h("div", { class: "legend" }, h("span", { class: "series3" }, plural(table.size, "group")),
          csvButton(`size of ${table.name}`, () => pointsOf(table, history, ["groups"], [2])),
          table.reserved > 0 && h("small", null, `${table.reserved} handed out, not acknowledged`),
          table.incomplete_items > 0 && h("small", null, `waits for ${table.missing_columns.map((column) =>
            `${visible(column.name)}: ${plural(column.items, "group")}`).join(", ")}`),
          table.tags.filter(({ values }) => values.length > 0).map((tag) => h("small", null, groupsOf(tag))),
          table.values.length > 0 && h("small", null, `draws balanced over ${visible(config.balance?.tag ?? "")}: ${sharesOf(table.values)}`)),
        h("div", { class: "chart low", "data-keep": `size-${table.name}`, role: "img", "aria-label": `Size of ${table.name}` })),
      h("div", null,
        limiterOf(table), [["insert", table.inserting], ["sample", table.sampling]].map(([verb, wait]) =>
          h("div", null, waitOf(verb, wait, table[`${verb}_blocked_share`]))),
        h("dl", { class: "leaving" }, [["inserted", table.inserts, ""], ["sampled", table.samples, ""],
          ...leaving.map(([name, label, tone]) => [label, table[name], tone])].map(([label, count, tone]) =>
          h("div", { class: tone }, h("dt", null, label), h("dd", null, count.toLocaleString("en"))))))),
    h("div", { class: "histograms" }, [["staleness", "staleness (versions)"], ["priority", "priority"],
      ["reward_mean", "mean reward"]].map(([name, label]) =>
      list?.histograms[name] ? histogram({ edges: list.histograms[name].edges, all: list.histograms[name].all }, { label })
        : h("figure", { class: "histogram empty" }, h("figcaption", null, label),
        h("p", { class: "quiet" }, table.size ? "reading …" : "no groups")))),
    list && list.read < list.items && h("p", { class: "quiet" },
      `${list.read.toLocaleString("en")} of ${plural(list.items, "group")} read`));
}

const waitTone = ({ seconds }) => (seconds >= long ? "long" : seconds >= long / 4 ? "warm" : "");
// What waits, in words; a formula in brackets stands behind "why".
function waitOf(verb, wait, share = 0) {
  if (!wait.count) return share > 0.005 ? h("p", { class: "quiet" },
    `${verb === "insert" ? "Inserts" : "Samples"} waited ${percent(share)} of the last minute; none waits now.`) : null;
  return h("div", { class: `waiting ${waitTone(wait)}` }, h("b", null, `${wait.count} ${wait.count === 1 ? "waits" : "wait"} to ${verb}, for ${duration(wait.seconds)}: `),
    visible(wait.reason.replace(/ \(.*\)/, "")), why(h("p", null, visible(wait.reason))));
}

// The share of the draws that the balance gives to each value of a tag, in words. Values without items are left out.
function sharesOf(values) {
  const total = values.reduce((sum, value) => sum + (value.items ? value.weight : 0), 0) || 1, most = 12;
  const named = values.filter((value) => value.items).sort((a, b) => b.weight - a.weight);
  return named.slice(0, most).map((value) => `${visible(value.name || "without the tag").slice(0, 60)} ${percent(value.weight / total)} (${
    plural(value.items, "group")})`).join(", ") + (named.length > most ? ` and ${named.length - most} more` : "");
}
// What became of the groups of each value of a tag.
function groupsOf({ name, values }) {
  const most = 6, named = [...values].sort((a, b) => b.generated - a.generated);
  return `by ${visible(name)}: ${named.slice(0, most).map((value) => `${visible(value.name).slice(0, 60)} ${value.generated} generated, ${
    value.stale} lost as stale, ${value.sampled} sampled`).join("; ")}` + (named.length > most ? ` and ${named.length - most} more` : "");
}
// Where the limiter stands: sampling needs difference - n >= min_diff, inserting difference + n * spi <= max_diff.
function limiterOf({ limiter, size, incomplete_items, inserting, sampling }) {
  if (limiter.max_diff === null && limiter.min_diff === null) {
    const ready = size - incomplete_items, enough = ready >= limiter.min_size, what = incomplete_items ? "size without those that wait" : "size";
    return h("div", { class: "limiter" }, h("b", null, "Limiter "), enough ? "open" : "samples wait for groups",
      why(h("p", null, enough ? `open: ${what} ${ready} ≥ min_size ${limiter.min_size}; inserts never wait for it.`
      : `samples wait: ${what} ${ready} < min_size ${limiter.min_size}`)));
  }
  const { min_diff: low, max_diff: high, difference } = limiter, at = Math.min(1, Math.max(0, (difference - low) / (high - low)));
  const x = 8 + 184 * at, stuck = (at > 0.98 && inserting.seconds > long / 4) || (at < 0.02 && sampling.seconds > long / 4);
  return h("figure", { class: "limiter" }, h("figcaption", null, h("b", null, "Limiter "), at > 0.98 ? "inserts wait here" : at < 0.02
    ? "samples wait here" : "open"),
    s("svg", { viewBox: "0 0 200 22", role: "img",
      "aria-label": `inserts times ${limiter.samples_per_insert} less samples is ${number(difference)}; samples wait below ${number(low)}, inserts above ${number(high)}` },
      s("rect", { class: "track", x: 8, y: 8, width: 184, height: 6, rx: 3 }),
        s("rect", { class: "edge-low", x: 2, y: 4, width: 3, height: 14, rx: 1 }),
        s("rect", { class: "edge-high", x: 195, y: 4, width: 3, height: 14, rx: 1 }),
      s("circle", { class: stuck ? "point end" : "point", cx: x.toFixed(1), cy: 11, r: 6 })),
    h("div", { class: "ends" }, h("span", null, "samples wait"), h("span", null, "inserts wait")),
    why(h("p", null, `inserts × ${number(limiter.samples_per_insert)} − samples = ${number(difference)}; samples wait below ${number(low)}, inserts above ${number(high)}`)));
}

// Draws the charts of a table: its rates in and out, and its size.
function chartOf(host, table, history) {
  const at = (keep) => host.querySelector(`[data-keep="${CSS.escape(keep)}"]`);
  const times = history.map((point) => point.t), column = (i) => history.map((point) => point.tables[table.name]?.[i] ?? null);
  const rates = at(`rates-${table.name}`), size = at(`size-${table.name}`);
  if (rates) lines(rates, `rates-${table.name}`, [times, column(0), column(1)],
    { series: [{ label: "in" }, { label: "out" }], height: 130, time: true, sync: "overview" });
  if (size) lines(size, `size-${table.name}`, [times, column(2)],
    { series: [{ label: "groups", index: 2, fill: true }], height: 84, time: true, sync: "overview" });
}

// ------------------------------------------------------------------------------------------------ the rest

// The trainer's curves or, without them, means over the groups that the page read.
function learning({ versions, signals, policy, curves, learning: said, answers: newest }) {
  const read = Date.now() - shownAt > 1000 * ANSWER_SECONDS && !document.querySelector(".answers:hover");
  if (!answers || read) [answers, shownAt] = [newest, Date.now()];
  const known = (name) => curves[name]?.some((value) => value !== null);
  const spark = (name, label, of = null, text = number) => (known(name) ? sparkline(curves[name], { label, text })
    : of && sparkline(versions.map(of), { label: `${label}, as read`, text }));
  return h("section", { class: `card learning ${said.level}`, "aria-label": "Learning" },
    h("h2", null, "Is it learning?", h("small", null, `version ${policy.version}, set ${duration(policy.age)} ago`)),
    h("p", { class: "trend" }, visible(said.sentence)),
    signals.length > 0 && h("ul", { class: "signals" }, signals.map((each) => h("li", { class: each.level === "ok" && "fine" }, each.message))),
    h("div", { class: "sparks" }, spark("reward", "fresh reward", (each) => each.reward),
      spark("entropy", "entropy (nats)", (each) => each.logprob && -each.logprob), spark("kl", "kl (nats)"),
      spark("length", "completion (tokens)", (each) => each.length), spark("tokens_per_second", "tokens a second"),
      spark("no_variance", "without variance", (each) => each.no_variance, percent), spark("ess", "sample size (ess)")),
    answers && h("div", { class: "answers" }, ["best", "worst"].map((name) => answerOf(name, answers))),
    why(h("p", null, "The trend compares the mean reward of the first ten steps with that of the last ten; it is flat if they differ by less than the noise explains."),
      h("p", null, "Curves are of the trainer's newest metrics.jsonl (--runs). ", h("i", null, "As read"),
      ": of the groups that this page has read", versions.length > 0 && `, of versions ${versions[0].version} to ${versions.at(-1).version}`,
      "; surprise, the mean negative log-probability, stands for entropy."),
      policy.weights && h("p", null, "Weights: ", h("code", null, visible(policy.weights)))));
}
const answerOf = (name, { version, [name]: { key, prompt, reward, tokens, text } }) => h("article", { class: name, "aria-label": `The ${name} answer` },
  h("h3", null, `The ${name} answer `, h("a", { href: `#/group/${key}` }, `reward ${number(reward)}`),
    h("small", null, ` ${plural(tokens, "token")}, of version ${version}, the newest`)),
  h("p", { class: "quiet cut" }, visible(prompt)), h("div", { class: "text", tabindex: 0 }, visible(text)));

function permitsCard({ admission }) {
  const { fresh_groups_per_step: step, max_staleness: stale, accepted, running, capacity, acquiring, expired, partial_groups: partial } = admission;
  return h("section", { class: "card permits", "aria-label": "Permits" },
    h("h2", null, "Permits", h("small", null, `${plural(step, "group")} a step, at most ${plural(stale, "version")} ahead`)),
    facts([["available now", capacity], ["running", running],
      ...(admission.permit_tables.length ? [["of these partial groups", partial]] : []), ["groups accepted", accepted],
      ["expired unused", expired, expired > 0]]),
    waitOf("get permits", acquiring));
}

function serverCard({ server, address }) {
  const bound = server.max_bytes ? ` of ${bytes(server.max_bytes)}` : ", without a bound";
  return h("section", { class: "card server", "aria-label": "Server" }, h("h2", null, "Server", h("small", null, address)),
    facts([["up", duration(server.uptime)], ["groups", server.items.toLocaleString("en")], ["payloads", `${bytes(server.bytes)}${bound}`],
      ["process", server.resident_bytes && bytes(server.resident_bytes)],
      ["memory left", server.memory_available && bytes(server.memory_available)], ["storage", server.storage],
        ["on disk", server.disk_bytes && bytes(server.disk_bytes)], ["disk left", server.disk_available && bytes(server.disk_available)],
      ["damaged", server.damaged, true], ["streams", `${server.insert_streams} in, ${server.sample_streams} out`],
        ["version", server.version]].filter(([, value]) => value)));
}

function shardsCard({ shards, tables, admission }) {
  const sizeIn = (shard, name) => shard.tables.find((each) => each.name === name)?.size.toLocaleString("en") ?? "–";
  const row = (shard) => h("tr", { class: shard.up ? null : "gone" }, h("th", { scope: "row" }, visible(shard.name)), shard.up
    ? [h("td", null, shard.version), ...tables.map((table) => h("td", null, sizeIn(shard, table.name))),
      h("td", null, shard.waiting), admission && h("td", null, shard.capacity ?? "–")]
    : h("td", { colspan: tables.length + (admission ? 3 : 2) }, "does not answer"));
  return h("section", { class: "card shards", "aria-label": "Shards" },
    h("h2", null, "Shards", h("small", null, "each server of several; the other cards show them as one")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows of the shards" }, h("table", null,
      h("thead", null, h("tr", null, ["shard", "version", ...tables.map((table) => visible(table.name)), "waiting",
        admission && "permits"].filter(Boolean).map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, shards.map(row)))));
}

function clientsCard({ clients }) {
  const state = (each) => (each.ended ? "ended" : each.open ? plural(each.open, "open call") : "not connected");
  const row = (each) => h("tr", { class: each.open || each.ended ? null : "gone" }, h("th", { scope: "row" }, visible(each.name)),
    h("td", null, each.role), h("td", null, `${duration(each.age)} ago`), h("td", null, state(each)));
  return h("section", { class: "card clients wide", "aria-label": "Clients" },
    h("h2", null, "Clients", h("small", null, "who inserts, samples or publishes, and the last sign of life")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows of the clients" }, h("table", null,
      h("thead", null, h("tr", null, ["client", "does", "last seen", "now"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, clients.slice(0, SHOWN).map(row)))),
    clients.length > SHOWN && h("p", { class: "quiet" }, `and ${plural(clients.length - SHOWN, "more client")}, seen longer ago`));
}

// Of generators whose rollouts are played by agents: for whom the sessions wait, and what was refused.
// A client may describe values of any type.
function sessionsOf({ settings }) {
  try {
    const found = JSON.parse(settings.sessions), refused = Object.entries(found.refused ?? {});
    if (!Number.isFinite(found.open)) return null;
    return { ...found, silent: Number.isFinite(found.silent) ? found.silent : 0, refused: refused.filter(([, n]) => Number.isFinite(n)),
      reason: typeof found.reason === "string" ? found.reason : "" };
  } catch {
    return null;
  }
}
function sessionsCard({ clients }) {
  const told = clients.filter((each) => !each.ended).map((each) => ({ ...each, sessions: sessionsOf(each) })).filter((each) => each.sessions);
  if (!told.length) return null;
  const count = (each, name) => h("td", null, Number.isFinite(each.sessions[name]) ? each.sessions[name].toLocaleString("en") : "–");
  const refused = ({ refused }) => refused.map(([status, n]) => `${n} × ${status}`).join(", ") || "none";
  const row = (each) => h("tr", { class: each.open ? null : "gone" }, h("th", { scope: "row" }, visible(each.name)),
    ["open", "nobody", "policy", "agent"].map((name) => count(each, name)),
    h("td", null, each.sessions.silent > 0 ? duration(each.sessions.silent) : "–"),
    h("td", { class: each.sessions.refused.length ? "warn" : null, title: each.sessions.reason && visible(each.sessions.reason) }, visible(refused(each.sessions))));
  const heads = ["generator", "open", "no agent yet", "wait for the policy", "wait for the agent", "longest silence", "refused (10 min)"];
  return h("section", { class: "card sessions wide", "aria-label": "Sessions of agents" },
    h("h2", null, "Sessions of agents", h("small", null, "rollouts that agents play, as the generators tell it")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows of the generators" }, h("table", null,
      h("thead", null, h("tr", null, heads.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, told.slice(0, SHOWN).map(row)))));
}

const facts = (rows) => h("dl", { class: "facts" },
  rows.map(([label, value, bad]) => h("div", { class: bad ? "warn" : null }, h("dt", null, label), h("dd", null, value))));

function doctorCard({ findings, admission }) {
  const order = ["failure", "warning", "ok"], sorted = [...findings].sort((a, b) => order.indexOf(a.level) - order.indexOf(b.level));
  return h("section", { class: `card doctor ${admission ? "" : "wide"}`, "aria-label": "Doctor" },
    h("h2", null, "Doctor", h("small", null, "as `replay doctor` says it")),
    h("ul", null, sorted.map((each) => h("li", { class: each.level }, h("b", null, h("i", { "aria-hidden": "true" }), visible(each.check)),
      h("span", null, visible(each.message), each.remedy && h("em", null, each.remedy)), h("span", { class: "unseen" }, each.level)))));
}
