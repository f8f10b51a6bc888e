// The official Node client against a running hitsend: node chat.mjs URL MODEL. Exits 1 at the first thing that is off.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "not-needed", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const asked = { model, messages, max_completion_tokens: 12, temperature: 0 };

const models = [];
for await (const entry of client.models.list()) models.push(entry.id);
assert.deepEqual(models, [model]);

const whole = await client.chat.completions.create(asked);
assert.equal(whole.object, "chat.completion");
assert.equal(whole.choices[0].message.role, "assistant");
assert.ok(whole.usage.completion_tokens > 0);

let text = "";
let usage = null;
const reasons = [];
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    if (choice.finish_reason) reasons.push(choice.finish_reason);
  }
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage, whole.usage);
assert.equal(reasons.length, 1);

const helped = await client.chat.completions.stream({ ...asked, n: 2 }).finalChatCompletion();
assert.deepEqual(helped.choices.map((choice) => choice.message.content), [text, text]);

await assert.rejects(
  client.chat.completions.create({ ...asked, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(client.chat.completions.create({ ...asked, model: "nope" }), OpenAI.NotFoundError);

const left = await client.chat.completions.create({ ...asked, max_completion_tokens: 400, stream: true });
for await (const _ of left) break; // breaking out aborts the request
console.log("node client: all good");
