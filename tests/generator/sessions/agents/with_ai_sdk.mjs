// The package `ai`: `generateText` with tools. Arguments: the folder of the environment, and the provider.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [folder, provider] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { generateText, stepCountIs, tool, jsonSchema } = require("ai");

const models = {
  openai: () => require("@ai-sdk/openai").openai("policy"),
  anthropic: () => require("@ai-sdk/anthropic").anthropic("policy"),
  "openai-compatible": () => {
    const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "policy", baseURL: process.env.OPENAI_BASE_URL })("policy");
  },
};
const numbers = jsonSchema({ type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } });
const tools = {
  add: tool({ description: "Adds two numbers.", inputSchema: numbers, execute: ({ a, b }) => String(a + b) }),
  multiply: tool({ description: "Multiplies two numbers.", inputSchema: numbers, execute: ({ a, b }) => String(a * b) }),
};
for await (const line of createInterface({ input: process.stdin })) {
  const row = JSON.parse(line);
  const model = models[provider]();
  const { text } = await generateText({ model, tools, system: "Compute.", prompt: row.prompt, stopWhen: stepCountIs(4) });
  console.log(JSON.stringify({ reward: text === row.answer ? 1 : 0 }));
}
