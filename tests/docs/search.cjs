// Types queries into the search of a built site: node search.cjs SITE QUERY...
// It runs the theme's own worker, as the browser does, and prints as JSON the pages that it finds, best first, by query.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const [worker] = fs.readdirSync(workers).filter((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const SETUP = 0;
const QUERY = 2;

let listen;
let answer;
globalThis.self = globalThis;
globalThis.addEventListener = (kind, listener) => {
  if (kind === "message") listen = listener;
};
globalThis.postMessage = (message) => answer(message);
vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"));

function send(message) {
  return new Promise((resolve) => {
    answer = resolve;
    listen({ data: message });
  });
}

async function main() {
  await send({ type: SETUP, data: { config: index.config, docs: index.docs, options: { suggest: true } } });
  const found = {};
  for (const query of queries) {
    const { data } = await send({ type: QUERY, data: query });
    found[query] = data.items.map(([first]) => first.location.split("#")[0].replace(/\/$/, ""));
  }
  console.log(JSON.stringify(found));
}

main();
