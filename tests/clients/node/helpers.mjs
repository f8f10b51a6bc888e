// The Node client's helpers against a running hitsend: node helpers.mjs URL MODEL EMBEDDING_MODEL. Exits 1 at the first
// thing that is off: parse with zod, stream events, tools and runTools, responses, embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, embeddingModel] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "not-needed", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const asked = { model, messages, max_completion_tokens: 100, temperature: 0 };
const Weather = z.object({ sky: z.enum(["clear", "cloudy", "rain"]), windy: z.boolean() });

const parsed = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Weather, "weather") });
assert.ok(Weather.safeParse(parsed.choices[0].message.parsed).success);

const stream = client.chat.completions.stream({ ...asked, response_format: zodResponseFormat(Weather, "weather") });
let text = "";
stream.on("content.delta", ({ delta }) => (text += delta));
const final = await stream.finalChatCompletion();
assert.equal(text, final.choices[0].message.content);
assert.deepEqual(final.choices[0].message.parsed, parsed.choices[0].message.parsed);

const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Lima"] }, celsius: { type: "boolean" } },
  required: ["city", "celsius"],
  additionalProperties: false,
};
for (const streamed of [false, true]) {
  const given = [];
  const run = (found) => {
    given.push(found);
    return "clear, no wind";
  };
  const tool = { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: run } };
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const runner = client.chat.completions.runTools({ ...asked, tools: [tool], tool_choice, stream: streamed });
  await runner.done();
  assert.equal(given.length, 1);
  assert.deepEqual(Object.keys(given[0]).sort(), ["celsius", "city"]);
  assert.equal(runner.messages.at(-1).role, "tool");
}

const input = "What is the weather in Paris?";
const wanted = { model, input, max_output_tokens: 24, temperature: 0 };
const whole = await client.responses.create(wanted);
let said = "";
let last = null;
for await (const event of await client.responses.create({ ...wanted, stream: true })) {
  if (event.type === "response.output_text.delta") said += event.delta;
  last = event;
}
assert.equal(said, whole.output_text);
assert.equal(last.type, `response.${whole.status}`);
assert.deepEqual(last.response.usage, whole.usage);
const helped = await client.responses.stream(wanted).finalResponse();
assert.equal(helped.output_text, whole.output_text);
const format = { format: zodTextFormat(Weather, "weather") };
const formed = await client.responses.parse({ ...wanted, max_output_tokens: 100, text: format });
assert.ok(Weather.safeParse(formed.output_parsed).success);
const more = await client.responses.create({ ...wanted, previous_response_id: whole.id, input: "And in Lima?" });
assert.ok(more.usage.input_tokens > whole.usage.input_tokens);

const texts = ["The cat sits outside", "A feline is outdoors"];
const made = await client.embeddings.create({ model: embeddingModel, input: texts });
const floats = await client.embeddings.create({ model: embeddingModel, input: texts, encoding_format: "float" });
assert.deepEqual(made.data.map((one) => one.embedding), floats.data.map((one) => one.embedding));
const short = await client.embeddings.create({ model: embeddingModel, input: texts[0], dimensions: 64 });
assert.equal(short.data[0].embedding.length, 64);
console.log("node helpers: all good");
