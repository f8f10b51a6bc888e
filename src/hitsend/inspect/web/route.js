// The way of one request through a route. Enters: a record. Leaves: which engines were considered, which were asked, what
// came of each, and what it cost whom; and the server that was left for a faster one. Always true: no text of it is markup.

import { element, line, money, number, plain, table, toRequest, took } from "./dom.js";

export function courseOf(record) {
  const asked = record.events.filter((event) => event.type === "routed" && event.route);
  const left = record.events.filter((event) => event.type === "hedged").map(leftOf);
  if (!asked.length) return left;
  const said = [element("p", `${asked[0].route}: ${asked[0].reason}`)];
  const considered = asked[0].candidates ?? [];
  if (considered.length) said.push(table("Engines considered", ["engine", "model", "could it", ">at most", ">first token", ">failed of late"], considered.map(candidate)));
  said.push(table("Engines asked", [">try", "engine", "what came of it", ">after", ">cost", ">billed"], asked.flatMap((event, index) => triesOf(record, event, asked[index + 1]))));
  for (const event of record.events.filter((one) => one.type === "shadowed")) {
    const copy = element("p", event.request_id ? `A copy went to ${event.model}: ` : `No copy went to ${event.model}: too many ran.`);
    if (event.request_id) copy.append(toRequest(event.request_id));
    said.push(copy);
  }
  return [...said, ...left];
}

function leftOf(event) {
  const said = element("p", `The server asked ${event.was_first ? "first" : "second"} was left after ${took(event.at_ms - event.started_ms)}: `);
  said.append(toRequest(event.request_id));
  return said;
}

function candidate({ name, model, is_ready: isReady, unable, cost_microusd: cost, ttft_ms: ttft, num_observed: num, error_share: share }) {
  const state = unable ? `no: ${unable}` : isReady ? "yes" : "left alone after failures";
  const failed = num ? `${((share ?? 0) * 100).toFixed(1)} % of ${number(num)}` : "–";
  const row = line(name, model, element("span", state), money(Math.round(cost)), took(ttft), failed);
  for (const cell of [3, 4, 5]) row.cells[cell].className = "n";
  if (unable || !isReady) row.className = "soft";
  return row;
}

// What happened between this engine's turn and the next one's.
function triesOf(record, turn, next) {
  const from = record.events.indexOf(turn);
  const own = record.events.slice(from + 1, next ? record.events.indexOf(next) : undefined);
  const sent = own.filter((event) => event.type === "sent").length;
  const refused = own.filter((event) => event.type === "answered" && event.reason !== "ok").map((event) => `${event.status ?? "no answer"} ${event.reason}${event.will_retry ? ", asked again" : ""}`);
  const gone = own.find((event) => event.type === "abandoned");
  const rows = own.filter((event) => event.type === "judged").map((event) => {
    const verdict = Object.entries(event.verdicts).map(([rule, words]) => `${rule} ${words}`).join("; ");
    const sure = event.mean_logprob === null ? "" : ` (mean log-probability ${event.mean_logprob.toFixed(3)})`;
    return numbered("", "judge", `draft ${event.accepted ? "accepted" : "rejected"}${sure}: ${verdict}`, event.at_ms, event.judge_microusd, 0);
  });
  const cost = gone ? gone.cost_microusd : record.ledger?.cost_microusd ?? record.cost_microusd;
  const ending = gone ? `given up, ${gone.code}: ${gone.message}` : record.error ? `${record.error.code}: ${record.error.message}` : record.state === "finished" ? "answered" : plain(record.state);
  const words = [...(sent > 1 ? [`sent ${number(sent)} times`] : []), ...refused, ending].join("; ");
  return [...rows, numbered(String(turn.attempt), `${turn.model} on ${turn.engine}`, words, gone ? gone.at_ms : record.wall_ms, cost, gone ? gone.billed_microusd : cost)];
}

function numbered(attempt, engine, what, after, cost, billed) {
  const row = line(attempt, engine, element("span", what), took(after), money(cost), money(billed));
  for (const cell of [0, 3, 4, 5]) row.cells[cell].className = "n";
  return row;
}
