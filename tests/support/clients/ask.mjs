// Asks servers through Node's clients, and prints what each client makes of the answers. Input and output as of ask.py; `saw` is
// the class of the client's error, with what the client decides by it: whether it retries (ai), or that the context is full (pi).
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

// The packages are not beside this file: their folder is the first argument.
const from = createRequire(pathToFileURL(`${process.argv[2]}/package.json`));
const load = async (name) => import(pathToFileURL(from.resolve(name)).href);
const packaged = async (name) => {
  const described = JSON.parse(readFileSync(`${process.argv[2]}/node_modules/${name}/package.json`));
  const main = described.exports?.["."]?.import ?? described.exports?.["."]?.default ?? described.module ?? described.main;
  return import(pathToFileURL(`${process.argv[2]}/node_modules/${name}/${main}`).href);
};

const { default: OpenAI } = await load("openai");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const ai = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const pi = await packaged("@mariozechner/pi-ai");

const messages = (one) => [{ role: "user", content: one.prompt }];
const read = async (answer, one) => {
  if (one.stream) for await (const _ of answer);
};

const ask = async (model, one) => {
  const asked = { model, prompt: one.prompt, maxOutputTokens: 4, maxRetries: 0 };
  if (!one.stream) return ai.generateText(asked);
  let failed;
  const { fullStream } = ai.streamText({ ...asked, onError: ({ error }) => (failed ??= error) });
  for await (const part of fullStream) if (part.type === "error") failed ??= part.error;
  if (failed) throw failed;
};

const piAsks = async (api, base, one) => {
  const model = {
    id: one.model, name: one.model, api, provider: "vllm", baseUrl: base, reasoning: false, input: ["text"],
    cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 }, contextWindow: 100_000, maxTokens: 16,
  };
  const context = { messages: [{ role: "user", content: one.prompt, timestamp: 0 }] };
  const answer = await pi.complete(model, context, { apiKey: one.key, maxTokens: 4, maxRetries: 0 });
  if (pi.isContextOverflow(answer, 100_000)) return "overflow";
  return answer.stopReason === "error" ? "error" : "answer";
};

const clients = {
  "openai node": async (one) =>
    read(
      await new OpenAI({ baseURL: `${one.url}/v1`, apiKey: one.key, maxRetries: 0 }).chat.completions.create({
        model: one.model, messages: messages(one), max_tokens: 4, stream: one.stream,
      }),
      one,
    ),
  "anthropic node": async (one) =>
    read(
      await new Anthropic({ baseURL: one.url, apiKey: one.key, maxRetries: 0 }).messages.create({
        model: one.model, messages: messages(one), max_tokens: 4, stream: one.stream,
      }),
      one,
    ),
  "ai openai-compatible": (one) =>
    ask(createOpenAICompatible({ name: "vllm", baseURL: `${one.url}/v1`, apiKey: one.key })(one.model), one),
  "ai anthropic": (one) => ask(createAnthropic({ baseURL: `${one.url}/v1`, apiKey: one.key })(one.model), one),
  "pi openai-completions": (one) => piAsks("openai-completions", `${one.url}/v1`, one),
  "pi anthropic-messages": (one) => piAsks("anthropic-messages", one.url, one),
};

const saw = async (client, one) => {
  try {
    const said = await client(one);
    return typeof said === "string" ? said : "answer";
  } catch (error) {
    const retried = error.isRetryable === undefined ? "" : error.isRetryable ? ", retried" : ", final";
    return `${error.constructor.name}${retried}`;
  }
};

const found = [];
for (const one of JSON.parse(readFileSync(0)))
  for (const [client, asks] of Object.entries(clients)) found.push({ client, case: one.case, saw: await saw(asks, one) });
console.log(JSON.stringify(found));
