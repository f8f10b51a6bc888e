// One request. Enters: its record, explanation and prompt tokens. Leaves: where its time, tokens and money went. Always
// true: text is there only where it was captured, otherwise sizes; fields that this page doesn't know are shown as they
// came.

import { read, Refused } from "./api.js";
import { byId, element, facts, folded, gauge, line, money, number, part, plain, table, took, words } from "./dom.js";
import { courseOf } from "./route.js";
import { tokenField } from "./tokens.js";
import { ENDED, key, stack, stepChart, stepsOf, waterfall } from "./waterfall.js";

const POLL_MS = 1000;
const MAX_STEPS = 600;
let shown = "";
let chosen = "";

export async function showRequest(id) {
  if (id !== chosen) {
    chosen = id;
    shown = "";
    byId("record").hidden = true;
    byId("detail-title").textContent = id;
    byId("facts").textContent = "loading …";
    byId("error").hidden = true;
  }
  let record;
  try {
    record = await read(`/inspect/requests/${encodeURIComponent(id)}`);
  } catch (error) {
    if (!(error instanceof Refused) || error.wantsKey) throw error;
    if (chosen === id) byId("facts").textContent = error.message;
    return null;
  }
  const text = JSON.stringify(record);
  if (chosen === id && text !== shown) {
    shown = text;
    const [explained, prompt] = await Promise.all([also(id, "explain"), also(id, "tokens")]);
    if (chosen === id) draw(record, explained, prompt);
  }
  return ENDED.has(record.state) && (record.ledger || record.error) ? null : POLL_MS;
}

async function also(id, what) {
  try {
    return await read(`/inspect/requests/${encodeURIComponent(id)}/${what}`);
  } catch (error) {
    if (error instanceof Refused) return null;
    throw error;
  }
}

export function summed(record) {
  const received = new Date(record.received_at * 1000).toLocaleString();
  return [record.model, record.engine && `on ${record.engine}`, record.state, record.finish_reason, record.principal?.name && `by ${record.principal.name}`, received].filter(Boolean).join(" · ");
}

function draw(record, explained, prompt) {
  byId("detail-title").textContent = record.request_id;
  byId("facts").textContent = summed(record);
  byId("error").hidden = !record.error;
  byId("error").textContent = record.error ? `${record.error.code}: ${record.error.message}` : "";
  byId("record").hidden = false;
  byId("record").replaceChildren(
    part("Where the time went", waterfall(record)),
    ...routeOf(record),
    ...(explained ? [part("Why", ...explanation(explained))] : []),
    part("Prompt", ...promptOf(record, prompt)),
    part("Answer", ...answerOf(record, prompt)),
    part("Steps of the loop", stepChart(record), ...draftsOf(record), stepList(record)),
    part("Held back, and stopped", ...heldOf(record)),
    part("Limits", limitsOf(record.limits ?? [])),
    part("Money", ...moneyOf(record, explained)),
    part("Cells", facts(Object.entries(record.cells ?? {}).map(([name, value]) => [name, plain(value)]), "pairs")),
    part("Sampling", samplingOf(record)),
    part("Everything that happened", eventsOf(record)),
  );
}

function routeOf(record) {
  const said = courseOf(record);
  return said.length ? [part("Route", ...said)] : [];
}

// ---- why

export function explanation(explained) {
  const causes = explained.causes.filter((cause) => cause.ms > 0);
  const said = [table("Causes", ["cause", "", ">ms", ">share"], causes.map((cause) => {
    const meter = gauge(cause.share, 1, words(cause.name));
    const row = line(element("span", cause.text), meter, cause.ms.toFixed(1), `${(cause.share * 100).toFixed(1)} %`);
    row.cells[2].className = row.cells[3].className = "n";
    if (cause.name === explained.largest) row.className = "largest";
    return row;
  }))];
  if (explained.cache) said.push(element("p", explained.cache));
  if (explained.changes.length) {
    said.push(table("What would have changed it, estimated", ["change (estimated)", ">saves", ">saves", "what it rests on"], explained.changes.map((change) => {
      const row = line(words(change.name), took(change.saved_ms), money(change.saved_microusd), element("span", change.basis, "soft"));
      row.cells[1].className = row.cells[2].className = "n";
      return row;
    })));
  }
  return said;
}

// ---- prompt and answer

function promptOf(record, prompt) {
  const { usage } = record;
  const tokenized = record.events.find((event) => event.type === "tokenized");
  const rendered = record.events.find((event) => event.type === "rendered");
  const total = usage.prompt_tokens || (tokenized?.num_tokens ?? 0);
  const parts = [
    { value: usage.cached_tokens, name: "cached", text: `${number(usage.cached_tokens)} from the cache` },
    { value: total - usage.cached_tokens, name: "prefill_own", text: `${number(total - usage.cached_tokens)} computed` },
  ];
  const said = [element("p", `${number(total)} tokens${rendered ? `, ${number(rendered.num_chars)} characters` : ""}${tokenized ? `, ${number(tokenized.num_control_tokens)} control tokens` : ""}`), stack(parts, total), key(parts)];
  const spans = tokenized?.spans ?? [];
  if (prompt?.is_captured && prompt.prompt.length) {
    const opens = new Map(spans.map((span) => [span.start, span.role]));
    const tokens = prompt.prompt.map((token, index) => ({ text: token.text, id: token.id, isControl: token.is_control, isCached: index < usage.cached_tokens, opens: opens.get(index) }));
    said.push(tokenField("Tokens of the prompt", tokens));
  } else if (rendered?.text) said.push(element("pre", rendered.text));
  else said.push(element("p", "The text was not captured (record.text is off): sizes only.", "soft"));
  if (spans.length) said.push(folded("Messages", table("Messages", [">message", "role", ">from token", ">tokens"], spans.map((span) => line(span.message, span.role, span.start, span.end - span.start)))));
  return said;
}

function answerOf(record, spelled) {
  const { usage } = record;
  const parts = [
    { value: usage.reasoning_tokens, name: "render", text: `${number(usage.reasoning_tokens)} thoughts` },
    { value: usage.completion_tokens - usage.reasoning_tokens, name: "decode_own", text: `${number(usage.completion_tokens - usage.reasoning_tokens)} answer` },
  ];
  const said = [element("p", `${number(usage.completion_tokens)} tokens`), stack(parts, usage.completion_tokens), key(parts)];
  const choices = new Set(["output_text", "output_reasoning", "output_tokens", "output_tool_calls"].flatMap((name) => Object.keys(record[name] ?? {})));
  if (!choices.size && usage.completion_tokens) said.push(element("p", "The text was not captured (record.text is off): sizes only.", "soft"));
  for (const choice of choices) {
    if (choices.size > 1) said.push(element("h4", `Choice ${Number(choice) + 1}`));
    const scored = record.output_tokens?.[choice];
    const plainOnes = spelled?.answers?.[choice]; // nobody asked for probabilities: by id
    if (scored?.length) said.push(tokenField("Tokens of the answer", scored.map((each) => ({ text: each.token, logprob: each.logprob, top: each.top }))));
    else if (plainOnes?.length) said.push(tokenField("Tokens of the answer", plainOnes.map((each) => ({ text: each.text, id: each.id, isControl: each.is_control }))));
    if (record.output_reasoning?.[choice]) said.push(folded("Thoughts", element("pre", record.output_reasoning[choice])));
    if (record.output_text?.[choice]) said.push(scored?.length || plainOnes?.length ? folded("As text", element("pre", record.output_text[choice])) : element("pre", record.output_text[choice]));
    for (const each of record.output_tool_calls?.[choice] ?? []) said.push(element("code", `${each.name}(${each.arguments})`, "call"));
  }
  return said;
}

// ---- steps, what was held back, limits

const KNOWN_OF_STEP = new Set(["type", "at_ms", "started_ms", "step", "prefill_tokens", "decode_tokens", "batch_prefill_tokens", "batch_decode_tokens", "batch_sequences"]);

function draftsOf({ drafts }) {
  if (!drafts || typeof drafts !== "object") return [];
  return [facts(Object.entries(drafts).map(([name, value]) => [`drafts: ${words(name)}`, plain(value)]), "pairs")];
}

function stepList(record) {
  const steps = stepsOf(record).slice(0, MAX_STEPS);
  if (!steps.length) return element("span");
  const rows = steps.map((step) => {
    const more = Object.entries(step).filter(([name, value]) => !KNOWN_OF_STEP.has(name) && value !== null && value?.length !== 0);
    return line(step.step, step.started_ms, step.at_ms - step.started_ms, step.prefill_tokens, step.decode_tokens, step.batch_prefill_tokens + step.batch_decode_tokens, step.batch_sequences, more.map(([name, value]) => `${words(name)} ${plain(value)}`).join(", "));
  });
  return folded("Each step", table("Steps", [">step", ">from ms", ">ms", ">own prefill", ">own decode", ">batch tokens", ">sequences", "more"], rows));
}

function heldOf(record) {
  const held = record.events.filter((event) => event.type === "held");
  const stops = record.events.filter((event) => event.type === "stop_matched");
  const said = [];
  if (held.length) {
    const why = { partial_utf8: "a character wasn't whole yet", partial_stop: "it might have become a stop string" };
    said.push(table("Text held back", [">ms", ">choice", ">bytes", "why"], held.map((event) => line(event.at_ms, event.choice, event.num_bytes, why[event.reason] ?? words(event.reason)))));
  }
  for (const event of stops) said.push(element("p", `Choice ${event.choice + 1}: ${JSON.stringify(event.stop)} completed after ${number(event.num_tokens)} tokens; it and what followed were withheld.`));
  if (!said.length) said.push(element("p", "Nothing was held back; no stop string was met.", "soft"));
  return said;
}

function limitsOf(limits) {
  if (!limits.length) return element("p", "None was checked.", "soft");
  return table("Limits", ["limit", "", ">used", ">limit"], limits.map(({ name, level, value, limit }) => {
    const title = level ? `${words(name)} of ${level}` : words(name);
    const row = line(element("span", title), gauge(value, limit, title), value, limit);
    if (value > limit) row.className = "bad";
    return row;
  }));
}

// ---- money

function moneyOf(record, explained) {
  const reserved = record.events.find((event) => event.type === "reserved");
  const settled = record.events.find((event) => event.type === "settled");
  const said = [];
  if (reserved) {
    const parts = [
      { value: record.cost_microusd, name: "decode_own", text: `${money(record.cost_microusd)} settled` },
      { value: Math.max(0, reserved.held_microusd - record.cost_microusd), name: "empty", text: `${money(Math.max(0, reserved.held_microusd - record.cost_microusd))} given back` },
    ];
    said.push(element("p", `Held ${money(reserved.held_microusd)} for ${number(reserved.input_tokens)} tokens in and at most ${number(reserved.output_tokens)} out, at price ${reserved.price_id}.`));
    said.push(element("p", settled ? `Settled once, because ${words(settled.reason)}: ${number(settled.prompt_tokens)} in, ${number(settled.completion_tokens)} out.` : "Not settled yet."));
    if (settled && reserved.held_microusd > 0) said.push(stack(parts, reserved.held_microusd), key(parts));
  } else said.push(element("p", "No hold was taken.", "soft"));
  if (explained?.cost.length) {
    const rows = explained.cost.map((each) => line(words(each.kind), each.num_tokens, money(each.microusd)));
    rows.push(line(element("strong", "bill"), "", money(record.cost_microusd)));
    for (const row of rows) row.cells[2].className = "n";
    said.push(table("Bill", ["kind of token", ">tokens", ">cost"], rows));
  }
  if (record.ledger) said.push(folded("Ledger row", facts(Object.entries(record.ledger).map(([name, value]) => [words(name), plain(value)]), "grid")));
  return said;
}

function samplingOf(record) {
  const sources = record.sampling_sources ?? {};
  const pairs = Object.entries(record.sampling ?? {}).map(([name, value]) => [words(name), sources[name] ? `${plain(value)} (${sources[name]})` : plain(value)]);
  return facts(pairs, "grid");
}

// ---- everything

function eventsOf(record) {
  const groups = [];
  for (const event of record.events) {
    if (event.type === "step" && groups.at(-1)?.[0].type === "step") groups.at(-1).push(event);
    else groups.push([event]);
  }
  const rows = groups.map((group) => {
    if (group.length > 1) return line(group[0].at_ms, "step", `${number(group.length)} steps, to ${took(group.at(-1).at_ms)}`);
    const { type, at_ms: at, ...rest } = group[0];
    const what = Object.entries(rest).filter(([, value]) => value !== null).map(([name, value]) => `${words(name)} ${cut(plain(value))}`);
    return line(at, words(type), element("span", what.join(", "), "soft"));
  });
  return table("Events", [">ms", "event", "what"], rows);
}

const cut = (text) => (text.length > 300 ? `${text.slice(0, 300)} …` : text);
