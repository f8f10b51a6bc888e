// What runs right now. Enters: the stream of /inspect/live, for as long as this view is open and can be seen. Leaves:
// bars that grow.

import { call, events } from "./api.js";
import { byId, drawn, fill, line, number, plain, took, toRequest } from "./dom.js";
import { key, stack } from "./waterfall.js";

const KEPT = 240; // a minute of frames
const SMOOTHED = 8;
const WAITING = new Set(["waiting", "preempted"]);
let stream = null;
let rates = [];
let latest = []; // a step may take longer than a frame: what is shown is the mean of two seconds

export function stopLive() {
  stream?.abort();
  stream = null;
}

// Runs until it is stopped; throws when the server ends it or can't be reached.
export async function showLive(onFrame) {
  stopLive();
  const own = (stream = new AbortController());
  try {
    const response = await call("/inspect/live", { signal: own.signal });
    for await (const frame of events(response)) {
      if (frame.error) throw new Error(frame.error.message);
      onFrame();
      draw(frame);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return stream === own ? 1000 : null;
}

function draw(frame) {
  const { requests, state, step } = frame;
  const count = state ?? {};
  latest = [...latest, frame.output_tokens_per_s].slice(-SMOOTHED);
  const rateNow = latest.reduce((sum, each) => sum + each, 0) / latest.length;
  fill(byId("live-state"), [
    ["tokens/s", rateNow.toFixed(1)],
    ["prompt tokens/s", frame.prompt_tokens_per_s.toFixed(0)],
    ["running", plain(state ? count.running : frame.num_requests - frame.num_waiting)],
    ["queue", plain(state ? count.waiting : frame.num_waiting)],
    ...(state ? [["cells", `${number(count.cells_used)}/${number(count.cells_total)}`], ["holds", plain(count.holds_open)], ["model", plain(count.engine?.model)], ["engine", `pid ${plain(count.engine?.pid)}, ${plain(count.engine?.restarts)} restarts`]] : [["server", "not shown to this key's role"]]),
    ...(count.gateways?.length > 1 ? [["gateways", `${count.gateways.length}, asked is pid ${frame.pid}`]] : []),
  ]);
  rate(rateNow);
  batch(step);
  cells(requests, state);
  list(requests, step);
}

function rate(value) {
  rates = [...rates, value].slice(-KEPT);
  const most = Math.max(1, ...rates);
  const points = rates.map((each, at) => `${KEPT - rates.length + at},${39 - (each / most) * 37}`).join(" ");
  byId("live-rate").replaceChildren(drawn("polyline", { points, class: "line" }));
  byId("live-rate").setAttribute("aria-label", `Output tokens a second: now ${value.toFixed(1)}, at most ${most.toFixed(1)} in the last minute`);
}

const COLOURS = 8;
const colours = new Map(); // request id -> its colour, for as long as it is under way

function colour(id) {
  if (!colours.has(id)) {
    const used = new Set(colours.values());
    const free = [...Array(COLOURS).keys()].find((each) => !used.has(each));
    colours.set(id, free ?? colours.size % COLOURS);
  }
  return `who${colours.get(id)}`;
}

function batch(step) {
  if (!step) {
    byId("live-batch").replaceChildren();
    byId("live-step").textContent = "No step of a request that is under way.";
    return;
  }
  const total = step.batch_prefill_tokens + step.batch_decode_tokens;
  byId("live-step").textContent = `Step ${number(step.step)}: ${took(step.ms)}, ${number(step.batch_sequences)} sequences, ${number(step.batch_prefill_tokens)} prompt and ${number(step.batch_decode_tokens)} answer tokens`;
  byId("live-batch").setAttribute("aria-label", byId("live-step").textContent);
  byId("live-batch").replaceChildren(stack(step.members.map((each) => ({ value: each.prefill_tokens + each.decode_tokens, name: colour(each.request_id) })), total));
}

function cells(requests, state) {
  const parts = requests.map((each) => ({ value: each.prefilled_tokens + each.output_tokens, name: colour(each.request_id), text: `${each.request_id}: ${number(each.prefilled_tokens + each.output_tokens)}` })).filter((each) => each.value > 0);
  if (state?.cells_cached) parts.push({ value: state.cells_cached, name: "cached", text: `kept for prompts that may come again: ${number(state.cells_cached)}` });
  const total = Math.max(state?.cells_total ?? 0, parts.reduce((sum, each) => sum + each.value, 0), 1);
  byId("live-cells").replaceChildren(stack(parts, total), key(parts.slice(-12)));
  byId("live-cells").setAttribute("aria-label", `Cells used by ${parts.length} requests`);
  byId("live-cells-text").textContent = state ? `${number(state.cells_used)} of ${number(state.cells_total)} cells are used` : "";
}

const rows = new Map();

function list(requests, step) {
  const members = new Set(step?.members.map((each) => each.request_id));
  byId("live-requests").hidden = requests.length === 0;
  byId("live-none").hidden = requests.length > 0;
  const scale = Math.max(1, ...requests.map((each) => (each.prompt_tokens ?? 0) + (each.max_tokens ?? 0)));
  const body = byId("live-requests").tBodies[0];
  const present = new Set(requests.map((each) => each.request_id));
  for (const [id, row] of rows) {
    if (!present.has(id)) {
      row.remove();
      rows.delete(id);
      colours.delete(id);
    }
  }
  for (const each of requests) {
    let row = rows.get(each.request_id);
    if (!row) {
      row = line(toRequest(each.request_id), each.name, "", "", "", "");
      row.cells[3].className = "wide";
      row.cells[4].className = row.cells[5].className = "n";
      rows.set(each.request_id, row);
      body.append(row);
    }
    row.className = WAITING.has(each.state) ? "waits" : members.has(each.request_id) ? "inbatch" : "";
    row.cells[2].textContent = each.state;
    row.cells[3].replaceChildren(bar(each, scale));
    row.cells[4].textContent = `${number(Math.min(each.prefilled_tokens, each.prompt_tokens ?? 0))}/${plain(each.prompt_tokens)} + ${number(each.output_tokens)}/${plain(each.max_tokens)}`;
    row.cells[5].textContent = took(each.age_ms);
  }
}

function bar(each, scale) {
  const at = (tokens) => (Math.max(0, tokens) / scale) * 1000;
  const prompt = each.prompt_tokens ?? 0;
  const chart = drawn("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true", class: "bar" });
  chart.append(drawn("rect", { x: 0, y: 0, width: at(prompt + (each.max_tokens ?? 0)), height: 14, class: "empty" }));
  chart.append(drawn("rect", { x: 0, y: 0, width: at(Math.min(each.prefilled_tokens, prompt)), height: 14, class: "prefill_own" }));
  chart.append(drawn("rect", { x: at(prompt), y: 0, width: at(each.output_tokens), height: 14, class: "decode_own" }));
  return chart;
}
