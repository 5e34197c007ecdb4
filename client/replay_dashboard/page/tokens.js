// Tokens: the text of a sequence in turns, each token coloured by what is known of it.
import { fill, h, number, percent, plural, s, visible } from "./dom.js";

export const STEPS = 8, ADVANTAGE = "token advantage";
const ROLES = ["assistant", "tool", "user", "system", "prompt"];

export const shadesOf = (group) => ["log-prob", ...(group.masked ? ["mask"] : []),
  ...group.per_token.flatMap((name) => (name === "token_advantages" ? [ADVANTAGE] : /log_?prob/.test(name) ? [`ratio to ${name}`] : [name])),
  "nothing"];
const arrayOf = (shade) => (shade === ADVANTAGE ? "token_advantages" : shade === "log-prob" ? "logprob" : shade);
export const signed = (x) => `${x > 0 ? "+" : ""}${number(x)}`;

// The least and the greatest value of a shade over all sequences, so that equal colours are equal values.
export function spreadOf(group, shade) {
  let [low, high] = [Infinity, -Infinity];
  for (const { window } of group.completions) for (const x of window.arrays[arrayOf(shade)] ?? []) {
    if (x !== null && x < low) low = Number(x);
    if (x !== null && x > high) high = Number(x);
  }
  if (low > high) return [0, 1];
  return shade === ADVANTAGE ? [-Math.max(-low, high, 1e-9), Math.max(-low, high, 1e-9)] : [low, high];
}

export function legend(shade) {
  const swatch = (kind) => h("i", { class: kind });
  if (shade === "nothing") return null;
  if (shade === "mask") return h("span", { class: "scale", role: "img", "aria-label": "trained on, and not trained on" },
    swatch("on"), "trained on", swatch("off"), "not trained on");
  const around = shade.startsWith("ratio") || shade === ADVANTAGE;
  const [low, high] = shade === "log-prob" ? ["likely", "unlikely"] : shade === ADVANTAGE ? ["discouraged", "encouraged"]
    : around ? ["less likely now", "more likely now"] : ["low", "high"];
  return h("span", { class: "scale", "aria-label": `from ${low} to ${high}`, role: "img" }, low,
    Array.from({ length: STEPS }, (_, i) => swatch(`${around ? "r" : "q"}${i}`)), high);
}

// The class of a token's colour: q0 to q7 from low to high, r0 to r7 around the middle.
function colourOf(arrays, i, { shade, spread }) {
  const bin = (x) => Math.min(STEPS - 1, Math.max(0, Math.floor(x * STEPS)));
  if (shade === "nothing") return "";
  if (shade === "mask") return arrays.mask?.[i] === false ? "" : "on";
  if (shade.startsWith("ratio to ")) {
    const now = arrays[shade.slice(9)]?.[i], then = arrays.logprob?.[i];
    return now === null || then === null || now === undefined ? "unknown" : `r${bin(0.5 + (now - then) / 1.4)}`;
  }
  const value = arrays[arrayOf(shade)]?.[i];
  if (value === null || value === undefined) return "unknown";
  if (shade === "log-prob") return `q${bin(Math.sqrt(Math.max(0, -value) / 8))}`;
  return `${shade === ADVANTAGE ? "r" : "q"}${bin((Number(value) - spread[0]) / (spread[1] - spread[0] || 1))}`;
}
// What is not trained on has no colour of its own: log-probability and advantage of it change nothing.
function classOf(arrays, i, look) {
  if (arrays.mask?.[i] === false) return "t off";
  return `t ${look.marked ? "" : colourOf(arrays, i, look)}`;
}

// `look`: {shade, spread}, or {marked: the indices of tokens that differ}; none for a prompt.
export function tokens(window, row, look = null, start = 0, stop = window.ids.length) {
  const { ids, text, arrays } = window;
  const inspected = (event) => inspect(event, window, row); // a finger taps where a mouse moves
  return h("span", { class: "tokens", onpointermove: inspected, onclick: inspected },
    ids.slice(start, stop).map((id, at) => {
      const i = start + at;
      return h("span", { class: `${look ? classOf(arrays, i, look) : "t"}${look?.marked?.has(i) ? " differs" : ""}${text ? "" : " id"}`,
        "data-i": i }, text ? visible(text[i]) : id);
    }));
}

// Shows all that is known of the token under the pointer.
function inspect(event, window, row) {
  const i = event.target.dataset?.i, panel = document.querySelector(".inspector");
  if (i === undefined || !panel) return;
  const at = (name) => window.arrays[name]?.[i], logprob = at("logprob"), turn = window.turns?.find((each) => i < each.stop);
  const rest = Object.keys(window.arrays).filter((name) => !["logprob", "mask"].includes(name)).map((name) =>
    `${name} ${number(Number(at(name)))}${/log_?prob/.test(name) && logprob !== null ? ` (ratio ${number(Math.exp(at(name) - logprob))})` : ""}`);
  const parts = [row < 0 ? "prompt" : `#${row}`, turn?.role && visible(turn.role), `token ${i}`, `id ${window.ids[i]}`,
    window.text ? JSON.stringify(visible(window.text[i])) : null,
    logprob === undefined ? null : logprob === null ? "log-prob unknown" : `log-prob ${number(logprob)} (${percent(Math.exp(logprob))})`,
    ...rest, at("mask") === false ? "not trained on" : null];
  fill(panel, parts.filter(Boolean).join("   "));
}

// ------------------------------------------------------------------------------------------------ turns

const kindOf = ({ role, trained }) => `${role === null ? (trained ? "assistant" : "given") : ROLES.includes(role) ? role : "other"}${trained ? "" : " untrained"}`;
const trainedWords = ({ start, stop, trained }) => (stop === start ? "" : trained === stop - start ? "trained on"
  : trained ? `${trained.toLocaleString("en")} of them trained on` : "not trained on");

// A line over a sequence: its turns in their proportions.
export function strip(sequence) {
  const { turns, window: { total } } = sequence;
  if (turns.length < 2 || !total) return null;
  const trained = turns.reduce((sum, each) => sum + each.trained, 0);
  return s("svg", { class: "strip-of-turns", viewBox: `0 0 ${total} 1`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${plural(sequence.turn_count, "part")}, ${trained} of ${total} tokens trained on` },
    turns.map((each) => s("rect", { class: kindOf(each), x: each.start, y: 0, width: each.stop - each.start, height: 1 })));
}

// The text of a sequence, turn by turn as far as it is loaded.
export function turns(sequence, look) {
  const { window } = sequence, loaded = window.ids.length, parts = window.turns = [...sequence.turns];
  const listed = parts.length ? parts[parts.length - 1].stop : 0, hidden = sequence.turn_count - parts.length;
  if (!parts.length) return tokens(window, sequence.index, look);
  if (listed < loaded) parts.push({ role: `${plural(hidden, "further part")}`, start: listed, stop: window.total, trained: null });
  return parts.filter((each) => each.start < loaded || each.start === each.stop && each.start <= loaded).map((each) => {
    const stop = Math.min(each.stop, loaded), known = [], advantages = [];
    for (let i = each.start; i < stop; i++) {
      if (window.arrays.mask?.[i] === false) continue;
      if (window.arrays.logprob[i] !== null) known.push(window.arrays.logprob[i]);
      if (window.arrays.token_advantages) advantages.push(window.arrays.token_advantages[i]);
    }
    const [least, most] = advantages.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
    const role = each.role ?? (each.stop <= sequence.context_tokens ? "own context" : null);
    const said = [plural(each.stop - each.start, "token"), each.trained === null ? "" : trainedWords(each),
      known.length > 0 && `log-prob ${number(known.reduce((a, b) => a + b, 0) / known.length)}`,
      advantages.length > 0 && `advantage ${least === most ? signed(least) : `${signed(least)} to ${signed(most)}`}`];
    return h("div", { class: `turn ${kindOf(each)}` },
      h("div", { class: "who" }, role === null ? null : h("b", null, visible(role)), said.filter(Boolean).join(" · ")),
      each.stop > each.start ? tokens(window, sequence.index, look, each.start, stop) : null);
  });
}
