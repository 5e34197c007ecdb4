// The page: views by the address, the server's news, theme and keys.
import { dropAll } from "./charts.js";
import { dialog, duration, fill, h, show, visible } from "./dom.js";
import * as group from "./group.js";
import * as groups from "./groups.js";
import * as overview from "./overview.js";
import * as prompts from "./prompts.js";
import * as training from "./training.js";

const VIEWS = { overview, groups, training, prompts, group };
const LISTED = ["overview", "groups", "training", "prompts"];
const KEYS = [
  ["1 2 3 4", "overview, groups, training, prompts"], ["/", "search"], ["j k", "next and previous group"], ["Enter", "open the group"],
  ["Esc", "back to the list"], ["h", "hold the list, or let it go on"], ["t", "light or dark"], ["?", "this help"],
];
const main = document.getElementById("main"), banner = document.getElementById("banner"), told = document.getElementById("told");
// What the views share: `look` is the newest of the server, `history` its last minutes.
const state = { look: null, history: [], lost: null };
let view = null, stream = null, ended = null;

// Opens the view that the address names. The function that `open` returns is called when the view is left.
function route() {
  const [, name = "", ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (location.hash === "#main") return;
  const wanted = VIEWS[name] ?? overview;
  ended?.();
  dropAll();
  main.replaceChildren();
  fill(told);
  view = wanted;
  const active = wanted === group ? "groups" : LISTED.find((each) => VIEWS[each] === wanted);
  fill(document.querySelector("nav"),
    LISTED.map((each) => h("a", { href: `#/${each}`, "aria-current": each === active ? "page" : null },
    each[0].toUpperCase() + each.slice(1))));
  document.title = `${active} · replay`;
  ended = wanted.open(main, rest, state) ?? null;
  if (state.look) view.update?.(main, state);
}

// Shows the verdict at the top of the page, and a banner if the server or the dashboard's process does not answer.
function tell() {
  const { look, lost } = state, verdict = look?.verdict;
  const level = lost ? "failure" : verdict?.level ?? "unknown";
  document.documentElement.dataset.level = level;
  fill(document.querySelector(".state"),
    h("a", { class: `pill ${level}`, href: "#/overview", title: verdict?.detail }, h("i", { "aria-hidden": "true" }),
      h("span", null, lost ? "Page lost" : verdict ? visible(verdict.short) : "Connecting")),
    look && h("span", { class: "address" }, look.address));
  const gone = lost ? `The dashboard's process has not answered for ${duration((Date.now() - lost) / 1000)}. This page shows old numbers.`
    : look?.problem ? `The server has not answered for ${duration(look.time - look.problem_since)}. This page shows old numbers, and goes on by itself when the server answers.` : "";
  fill(banner, gone && h("p", { class: "failure" }, gone));
}

// Receives the events of the server. If the stream ends for good, asks for a token or tries again after two seconds.
function follow() {
  stream?.close();
  stream = new EventSource("api/live");
  stream.addEventListener("history", (event) => (state.history = JSON.parse(event.data)));
  stream.addEventListener("look", (event) => {
    state.look = JSON.parse(event.data);
    state.lost = null;
    const last = state.history[state.history.length - 1];
    if (!last || last.t < state.look.point.t) state.history.push(state.look.point);
    if (state.history.length > 600) state.history.shift();
    tell();
    view?.update?.(main, state);
  });
  stream.onerror = async () => {
    state.lost ??= Date.now();
    tell();
    if (stream.readyState !== EventSource.CLOSED) return;
    const answer = await fetch("api/prompts?limit=0").catch(() => null);
    if (answer?.status === 401) askForToken();
    else setTimeout(follow, 2000);
  };
}
setInterval(() => state.lost && tell(), 1000);

async function login(token) {
  const answer = await fetch("api/login", { method: "POST", body: JSON.stringify({ token }) });
  if (!answer.ok) throw new Error((await answer.json()).problem);
}
function askForToken(problem = "") {
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    login(field.value.trim()).then(() => location.reload(), (error) => askForToken(error.message));
  };
  dialog.replaceChildren(h("form", { onsubmit: submit }, h("h2", null, "A token is needed"),
    h("p", null, problem || "`replay dashboard` printed it when it started."),
    h("label", { for: "token" }, "Token"), field, h("button", { type: "submit" }, "Enter")));
  if (!dialog.open) dialog.showModal();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("replay-theme", theme); } catch { /* private mode */ }
  route();
}
const theme = () => document.documentElement.dataset.theme;
const help = () => show(h("h2", null, "Keys"), h("dl", { class: "keys" },
  KEYS.map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, what)])));
document.getElementById("theme").onclick = () => setTheme(theme() === "dark" ? "light" : "dark");
document.getElementById("keys").onclick = help;
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.nodeName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = "1234".indexOf(event.key);
  if (number >= 0) location.hash = `#/${LISTED[number]}`;
  else if (event.key === "t") setTheme(theme() === "dark" ? "light" : "dark");
  else if (event.key === "?") help();
  else if (event.key === "/") (event.preventDefault(), main.querySelector("input[type=search]")?.focus());
  else view?.key?.(event);
});
// A finger cannot point: a tap, or a click, tells what stands behind an element, or all of what is cut off.
addEventListener("click", ({ target }) => {
  const words = wordsOf(target);
  fill(told, words && h("p", null, words));
});
function wordsOf(target) {
  if (target.closest("a, button, input, select, label, summary, dialog, .row, .pick, .tokens")) return "";
  for (let each = target; each; each = each.parentElement) {
    const { textOverflow, webkitLineClamp } = getComputedStyle(each), named = [...each.children].find((child) => child.nodeName === "title");
    const cut = textOverflow === "ellipsis" && each.scrollWidth > each.clientWidth + 1 || webkitLineClamp > 0 && each.scrollHeight > each.clientHeight + 1;
    if (each.title || named || cut) return each.title || named?.textContent || each.innerText;
  }
  return "";
}
addEventListener("hashchange", route);
addEventListener("unauthorized", () => askForToken());
addEventListener("resize", () => state.look && view?.update?.(main, state));
// Browsers allow six connections to a host: a hidden tab gives its own to the others.
document.addEventListener("visibilitychange", () => (document.hidden ? stream?.close() : follow()));

let stored = null;
try { stored = localStorage.getItem("replay-theme"); } catch { /* private mode */ }
document.documentElement.dataset.theme = stored ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  history.replaceState(null, "", "#/overview");
  await login(given[1]).catch((error) => askForToken(error.message));
}
route();
tell();
follow();
