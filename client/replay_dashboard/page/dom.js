// Makes and updates elements. Text goes in as text: nothing in the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "oninput", "onchange", "onkeydown", "onsubmit", "onpointermove"];

function build(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
export const h = (tag, props, ...children) => build(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => build(document.createElementNS(SVG, tag), props, children);

// Makes `from` like `to`, and keeps every node that can stay: focus, scroll positions and charts survive. What lies
// below an element with data-keep belongs to a chart.
export function morph(from, to) {
  if (from.nodeName !== to.nodeName || from.dataset?.keep !== to.dataset?.keep) return from.replaceWith(to);
  if (from.nodeType === Node.TEXT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  const ours = (name) => name !== "style" && !(name === "open" && from.nodeName === "DETAILS"); // a person unfolds it
  for (const { name } of [...from.attributes]) if (!to.hasAttribute(name) && ours(name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value && ours(name)) from.setAttribute(name, value);
  for (const name of HANDLERS) from[name] = to[name];
  if (from.nodeName === "INPUT" && document.activeElement !== from) from.value = to.value;
  if (to.dataset.keep || from.nodeName === "SELECT" && document.activeElement === from) return;
  const old = [...from.childNodes], fresh = [...to.childNodes];
  fresh.forEach((child, i) => (i < old.length ? morph(old[i], child) : from.append(child)));
  old.slice(fresh.length).forEach((child) => child.remove());
}
export function fill(host, ...children) {
  const shell = host.cloneNode(false);
  shell.append(...children.flat(Infinity).filter(Boolean));
  morph(host, shell);
}

// Hostile text may hold characters that hide, reorder or erase what is around them: they are shown by their number.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
export const visible = (text) =>
  String(text).replace(UNSEEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

export const number = (x, digits = 3) => {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return x.toLocaleString("en");
  const size = Math.abs(x);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return x.toExponential(Math.max(0, digits - 2));
  if (size < 0.01) return x.toPrecision(digits - 1);
  return x.toFixed(Math.max(0, digits - 1 - Math.max(0, Math.floor(Math.log10(size || 1)))));
};
export const rate = (x) => (x === null || x === undefined ? "–" : x >= 100 ? x.toFixed(0) : x.toFixed(1));
export const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(0)} %`);
export const bytes = (n) => {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    // Rounded before the comparison: 999,960 bytes are 1.0 MB, not 1000 kB.
    const shown = unit === "B" || n >= 99.95 ? Math.round(n).toFixed(0) : n.toFixed(1);
    if (Number(shown) < 1000) return `${shown} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
};
export const duration = (seconds) => {
  // Rounded before each comparison, because 9.96 s are 10 s, and 59.7 s are a minute.
  if (Number(seconds.toFixed(1)) < 10) return `${seconds.toFixed(1)} s`;
  const t = Math.round(seconds);
  return t < 60 ? `${t} s` : t < 3600 ? `${Math.floor(t / 60)} min ${t % 60} s`
    : t < 86400 ? `${Math.floor(t / 3600)} h ${Math.floor((t % 3600) / 60)} min`
      : `${Math.floor(t / 86400)} d ${Math.floor((t % 86400) / 3600)} h`;
};
export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
export const shortKey = (key) => (key.length > 8 ? `…${key.slice(-6)}` : key);

// What few people ask for: a formula, or the reason of a wait.
export const why = (...content) => h("details", { class: "why" }, h("summary", null, "why"), ...content);

// The name of a prompt, and its text. A hash says nothing to a reader: then the text comes first.
const HASH = /^[0-9a-f]{16,}$/i;
export function promptParts(name, text) {
  return HASH.test(name) && text ? [h("b", null, visible(text)), h("small", { title: name }, `${name.slice(0, 8)}…`)]
    : [h("b", null, visible(name).slice(0, 80)), h("small", null, visible(text))];
}

export async function ask(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  if (response.status === 401) dispatchEvent(new Event("unauthorized"));
  const found = await response.json().catch(() => ({ problem: `status ${response.status}` }));
  if (!response.ok) throw new Error(found.problem);
  return found;
}

export const dialog = document.getElementById("dialog");
export function show(...content) {
  dialog.replaceChildren(...content, h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  if (!dialog.open) dialog.showModal();
}
