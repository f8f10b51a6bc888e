// Try it: a chat through the real pipeline. Enters: what is typed, and the fields that /openapi.json tells. Leaves: the
// answer as it is streamed, its tokens coloured, its record's waterfall growing beside it.

import { call, events, read, Refused } from "./api.js";
import { byId, element, facts, holding, money, number, took, toRequest, words } from "./dom.js";
import { tokenField } from "./tokens.js";
import { ENDED, stepChart, waterfall } from "./waterfall.js";

const LOOK_MS = 300;
const LAST_LOOKS = 20;
// these have inputs of their own, or are this page's business
const OWN = new Set(["messages", "model", "stream", "stream_options", "tools", "chat_template_kwargs"]);
const FIRST = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "stop"];

let messages = [];
let running = null; // AbortController of the request under way
let shown = ""; // its id
let isReady = false;

export async function showTry() {
  if (isReady) return;
  const [models, document] = await Promise.all([read("/v1/models"), read("/openapi.json")]);
  byId("ask-model").replaceChildren(...models.data.map((model) => new Option(model.id)));
  byId("ask-fields").replaceChildren(...fields(document.components.schemas.ChatBody.properties));
  isReady = true;
}

// ---- the form

function fields(properties) {
  const names = Object.keys(properties).filter((name) => !OWN.has(name) && !/^(Refused|Accepted without)/.test(properties[name].description ?? ""));
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return names.map((name) => field(name, properties[name]));
}

function field(name, schema) {
  const kinds = (schema.anyOf ?? [schema]).filter((kind) => kind.type !== "null");
  const kind = kinds.length === 1 ? kinds[0] : {};
  const id = `ask-field-${name}`;
  const input = kind.type === "boolean" ? choice(["", "true", "false"]) : element("input");
  input.id = id;
  input.dataset.field = name;
  input.dataset.kind = kinds.length > 1 ? "mixed" : kind.type ?? "json";
  if (kind.type === "integer" || kind.type === "number") {
    input.inputMode = "decimal";
    input.placeholder = range(kind);
  } else if (input.nodeName === "INPUT" && kind.type !== "string") input.placeholder = kinds.length > 1 ? "text or JSON" : "JSON";
  if (name === "max_tokens") input.value = "256";
  const label = element("label", words(name));
  label.htmlFor = id;
  return holding("div", "", label, input);
}

function choice(values) {
  const made = element("select");
  made.append(...values.map((value) => new Option(value || "–", value)));
  return made;
}

function range(kind) {
  const low = kind.minimum ?? kind.exclusiveMinimum;
  const small = (value) => value !== undefined && Math.abs(value) < 2 ** 31 - 1;
  if (small(low) && small(kind.maximum)) return `${low} to ${kind.maximum}`;
  return small(low) ? `from ${low}` : "";
}

// Throws what is wrong with a field, by name.
function asked() {
  const body = { model: byId("ask-model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const input of byId("ask-fields").querySelectorAll("[data-field]")) {
    if (input.value.trim() !== "") body[input.dataset.field] = valueOf(input);
  }
  const thinking = byId("ask-thinking").value;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (byId("ask-tools").value.trim()) body.tools = parsed(byId("ask-tools").value, "tools");
  if (byId("ask-colour").checked) {
    body.logprobs ??= true;
    if (body.logprobs) body.top_logprobs ??= 5;
  }
  const system = byId("ask-system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  return body;
}

function valueOf(input) {
  const text = input.value.trim();
  const { kind, field: name } = input.dataset;
  if (kind === "string") return text;
  if (kind === "mixed") {
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
  return parsed(text, name);
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Refused(400, `${words(name)}: this is no JSON`, name);
  }
}

// ---- one request

async function send() {
  const text = byId("ask-text").value.trim();
  if (!text || running) return;
  fault(null);
  messages.push({ role: "user", content: text });
  const answers = new Answers(byId("talk"), text);
  running = new AbortController();
  buttons();
  const id = `try-${[...crypto.getRandomValues(new Uint8Array(10))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  shown = id;
  try {
    const body = JSON.stringify(asked());
    const headers = { "content-type": "application/json", "x-request-id": id };
    const response = await call("/v1/chat/completions", { method: "POST", body, headers, signal: running.signal });
    const following = follow(id); // the engine has taken it, so there is a record to look at
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Refused(response.status, chunk.error.message, chunk.error.param);
      answers.add(chunk);
    }
    byId("ask-text").value = "";
    messages.push(answers.message());
    await following;
  } catch (error) {
    if (error.name !== "AbortError") fault(error);
    answers.end(error.name === "AbortError" ? "stopped" : "failed");
    messages.pop();
  } finally {
    running = null;
    buttons();
  }
}

function fault(error) {
  const place = byId("ask-error");
  place.hidden = error === null;
  place.textContent = error ? (error.param ? `${error.param}: ${error.message}` : error.message) : "";
  for (const input of byId("ask").querySelectorAll("[data-field]")) input.removeAttribute("aria-invalid");
  const wrong = error?.param && byId(`ask-field-${error.param}`);
  if (wrong) {
    wrong.setAttribute("aria-invalid", "true");
    byId("ask-options").open = true;
  }
}

function buttons() {
  byId("ask-send").disabled = running !== null;
  byId("ask-stop").disabled = running === null;
}

// The turns on screen, and what was collected of the choices.
class Answers {
  constructor(talk, question) {
    this.talk = talk;
    this.choices = new Map();
    talk.append(turn("user", question));
    this.waiting = turn("assistant", "…");
    talk.append(this.waiting);
    this.scroll();
  }

  add(chunk) {
    for (const { index, delta, logprobs, finish_reason: reason } of chunk.choices) {
      const kept = this.choice(index);
      kept.thought.add(delta.reasoning_content ?? "");
      kept.text.add(delta.content ?? "");
      for (const piece of delta.tool_calls ?? []) kept.call(piece);
      kept.tokens.push(...(logprobs?.content ?? []));
      if (reason) this.finish(kept, reason);
    }
    if (chunk.hitsend) this.last?.append(element("span", ` · ${took(chunk.hitsend.timings.wall_ms)} · ${money(chunk.hitsend.cost_microusd)}`));
    this.scroll();
  }

  choice(index) {
    if (!this.choices.has(index)) {
      this.waiting.remove();
      const place = turn("assistant", "", index ? `assistant, choice ${index + 1}` : "assistant");
      this.talk.append(place);
      this.choices.set(index, new Choice(place));
    }
    return this.choices.get(index);
  }

  finish(kept, reason) {
    if (kept.tokens.length && !kept.calls.size) {
      const tokens = kept.tokens.map((each) => ({ text: each.token, logprob: each.logprob, top: each.top_logprobs }));
      kept.place.append(tokenField("Tokens of the answer", tokens));
      kept.text.hide();
      kept.thought.hide();
    }
    this.last = element("p", reason, "soft ended");
    kept.place.append(this.last);
  }

  end(how) {
    this.waiting.remove();
    this.talk.append(element("p", how, "soft ended"));
  }

  message() {
    const first = this.choices.get(0);
    const made = { role: "assistant", content: first?.text.value ?? "" };
    if (first?.calls.size) {
      made.tool_calls = [...first.calls.values()].map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    return made;
  }

  scroll() {
    this.talk.scrollTop = this.talk.scrollHeight;
  }
}

class Growing {
  constructor(place, className) {
    this.value = "";
    this.node = element("p", "", className);
    this.node.hidden = true;
    place.append(this.node);
  }

  add(text) {
    if (!text) return;
    this.value += text;
    this.node.hidden = false;
    this.node.append(document.createTextNode(text));
  }

  hide() {
    this.node.hidden = true;
  }
}

class Choice {
  constructor(place) {
    this.place = place;
    this.tokens = [];
    this.calls = new Map();
    this.thought = new Growing(place, "thought");
    this.text = new Growing(place, "said");
  }

  call(piece) {
    if (!this.calls.has(piece.index)) {
      const node = element("code", "", "call");
      this.place.append(node);
      this.calls.set(piece.index, { id: piece.id, name: "", arguments: "", node });
    }
    const kept = this.calls.get(piece.index);
    kept.name += piece.function?.name ?? "";
    kept.arguments += piece.function?.arguments ?? "";
    kept.node.textContent = `${kept.name}(${kept.arguments})`;
  }
}

function turn(role, text, name = role) {
  const made = holding("div", `turn ${role}`, element("strong", name));
  if (text) made.append(element("p", text, "said"));
  return made;
}

// ---- its record beside it

async function follow(id) {
  let looks = 0;
  while (shown === id && looks < LAST_LOOKS) {
    try {
      const record = await read(`/inspect/requests/${encodeURIComponent(id)}`);
      if (shown !== id) return;
      beside(record);
      if (ENDED.has(record.state)) {
        looks += 1;
        if (record.ledger || record.error) return;
      }
    } catch (error) {
      if (!(error instanceof Refused)) return;
      looks += 1;
    }
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
}

function beside(record) {
  const { usage } = record;
  const known = record.events.find((event) => event.type === "tokenized");
  const decoded = record.events.reduce((sum, event) => sum + (event.decode_tokens ?? 0), 0);
  const first = record.events.find((event) => event.type === "first_token");
  const place = byId("try-waterfall");
  place.className = "";
  place.replaceChildren(
    waterfall(record),
    stepChart(record),
    facts([
      ["state", [record.state, record.finish_reason].filter(Boolean).join(", ")],
      ["prompt", `${number(usage.prompt_tokens || (known?.num_tokens ?? 0))} tokens, ${number(usage.cached_tokens)} cached`],
      ["answer", `${number(usage.completion_tokens || decoded)} tokens`],
      ["first token", took(first?.at_ms)],
      ["cost", money(record.cost_microusd)],
    ], "pairs"),
    holding("p", "", toRequest(record.request_id, "Everything about this request")),
  );
}

byId("ask").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  send();
});
byId("ask-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("ask-stop").addEventListener("click", () => running?.abort());
byId("ask-new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  byId("talk").replaceChildren();
  fault(null);
});
