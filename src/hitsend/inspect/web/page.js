// The inspector's page: what is running now, the recent requests, and where one request's time and money went.
// Enters: JSON from /inspect/*. Leaves: a picture. Always true: every value becomes text through textContent, nothing is
// ever parsed as HTML, and a server that is gone is said so and looked for again.

const POLL_MS = 1000;
const LIST_LIMIT = 100;
const ENDED = new Set(["finished", "failed", "cancelled"]);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

let shownRecord = ""; // the JSON text on screen: what hasn't changed isn't drawn again
const rows = new Map(); // request id -> its line in the list

class Refused extends Error {
  constructor(path, status) {
    super(path);
    this.status = status;
  }
}

async function read(path) {
  const key = sessionStorage.getItem("hitsend-key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, cache: "no-store" });
  if (response.status === 401 || response.status === 403) throw new Refused(path, response.status);
  if (!response.ok) throw new Error(`${path} answered ${response.status}`);
  return response.json();
}

// what the server as a whole does is for readers and admins; a caller sees its own requests
async function readState() {
  try {
    return await read("/inspect/state");
  } catch (error) {
    if (error instanceof Refused && error.status === 403) return null;
    throw error;
  }
}

// ---- small builders

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function line(...cells) {
  const row = element("tr");
  for (const cell of cells) {
    if (cell instanceof Node) {
      const held = element("td", "", cell.dataset?.cell ?? "");
      held.append(cell);
      row.append(held);
    } else if (typeof cell === "number") row.append(element("td", number(cell), "n"));
    else row.append(element("td", cell ?? ""));
  }
  return row;
}

function facts(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }),
  );
}

const number = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 2 : 1));
const plain = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
const words = (name) => name.replaceAll("_", " ");

function money(microusd) {
  const whole = Math.trunc(Math.abs(microusd) / 1e6);
  return `${microusd < 0 ? "-" : ""}$${whole}.${String(Math.abs(microusd) % 1e6).padStart(6, "0")}`;
}

// ---- now

function showState(state) {
  if (state === null) return facts(byId("state"), [["server", "not shown to this key's role"]]);
  const engine = state.engine ?? {};
  facts(byId("state"), [
    ["running", plain(state.running)],
    ["waiting", plain(state.waiting)],
    ["cells", `${state.cells_used}/${state.cells_total}`],
    ["slots", plain(state.slots_used)],
    ["holds", plain(state.holds_open)],
    ["model", plain(engine.model)],
    ["engine", `pid ${plain(engine.pid)}, ${plain(engine.restarts)} restarts`],
  ]);
}

// ---- the list

function showList(requests) {
  const body = byId("requests").tBodies[0];
  byId("requests").hidden = requests.length === 0;
  byId("none").hidden = requests.length > 0;
  const present = new Set(requests.map((request) => request.request_id));
  for (const [id, row] of rows) {
    if (!present.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  requests.forEach((request, place) => {
    const row = rows.get(request.request_id) ?? newRow(request.request_id);
    const values = [
      null,
      [request.state, request.error ?? (request.state === "finished" && request.finish_reason)].filter(Boolean).join(", "),
      plain(request.usage.prompt_tokens),
      plain(request.usage.completion_tokens),
      request.wall_ms.toFixed(0),
      money(request.cost_microusd),
    ];
    values.forEach((value, column) => {
      if (value !== null && row.cells[column].textContent !== value) row.cells[column].textContent = value;
    });
    row.cells[1].className = request.state === "failed" ? "bad" : "";
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  markChosen();
}

function newRow(id) {
  const row = element("tr");
  const link = element("a", id);
  link.href = `#${encodeURIComponent(id)}`;
  link.title = id;
  const head = element("td");
  head.append(link);
  row.append(head, element("td"));
  for (let column = 0; column < 4; column += 1) row.append(element("td", "", "n"));
  rows.set(id, row);
  return row;
}

const chosen = () => {
  const id = decodeURIComponent(location.hash.slice(1));
  return id === "detail" ? "" : id;
};

function markChosen() {
  for (const [id, row] of rows) {
    row.classList.toggle("chosen", id === chosen());
    const link = row.querySelector("a");
    if (id === chosen()) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// ---- one request

function showRecord(record) {
  const text = JSON.stringify(record);
  if (text === shownRecord) return;
  shownRecord = text;
  byId("detail-title").textContent = record.request_id;
  const received = new Date(record.received_at * 1000).toLocaleString();
  const known = [record.model, record.engine && `on ${record.engine}`, record.state, record.finish_reason, received];
  byId("facts").textContent = known.filter(Boolean).join(" · ");
  byId("error").hidden = !record.error;
  byId("error").textContent = record.error ? `${record.error.code}: ${record.error.message}` : "";
  byId("record").hidden = false;
  showSegments(record);
  showSteps(record);
  showMoney(record);
  showLimits(record.limits ?? []);
  const sources = record.sampling_sources ?? {};
  const sampling = Object.entries(record.sampling ?? {});
  facts(byId("sampling"), sampling.map(([name, value]) => [words(name), sources[name] ? `${plain(value)} (${sources[name]})` : plain(value)]));
  facts(byId("ledger"), Object.entries(record.ledger ?? { row: "none: no hold was taken, or not settled yet" }).map(([name, value]) => [words(name), plain(value)]));
  byId("events").tBodies[0].replaceChildren(...grouped(record.events).map((group) => (group.length > 1 ? stepsLine(group) : eventLine(group[0]))));
}

function showSegments(record) {
  const wall = record.wall_ms;
  let begun = 0;
  const lines = [];
  for (const { name, ms } of record.segments) {
    if (ms > 0) {
      const track = element("div", "", "track");
      const chart = drawn("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true" });
      const width = Math.max(2, (ms / wall) * 1000);
      chart.append(drawn("rect", { x: Math.min((begun / wall) * 1000, 998), y: 2, width, height: 12, class: name }));
      track.append(chart);
      lines.push(line(words(name), track, element("span", `${ms.toFixed(1)} ms`), element("span", `${((ms / wall) * 100).toFixed(1)} %`)));
    }
    begun += ms;
  }
  lines.push(line("wall", "", element("strong", `${wall.toFixed(1)} ms`), ""));
  for (const row of lines) {
    row.cells[2].className = "n";
    row.cells[3].className = "n";
  }
  byId("segments").tBodies[0].replaceChildren(...lines);
}

function showSteps(record) {
  const steps = record.events.filter((event) => event.type === "step");
  const most = Math.max(1, ...steps.map((step) => step.batch_prefill_tokens + step.batch_decode_tokens));
  const chart = byId("steps");
  chart.replaceChildren();
  for (const step of steps) {
    const x = (step.started_ms / record.wall_ms) * 1000;
    const width = Math.max(1, ((step.at_ms - step.started_ms) / record.wall_ms) * 1000 - 0.5);
    const batch = step.batch_prefill_tokens + step.batch_decode_tokens;
    const mine = step.prefill_tokens + step.decode_tokens;
    const name = step.prefill_tokens > 0 ? "prefill" : "decode";
    for (const [tokens, kind] of [[batch, `${name}_shared`], [mine, `${name}_own`]]) {
      const height = Math.max(2, (tokens / most) * 58);
      chart.append(drawn("rect", { x, y: 60 - height, width, height, class: kind }));
    }
  }
  const dropped = record.steps_dropped ? `, ${record.steps_dropped} more not kept` : "";
  byId("steps-text").textContent = steps.length
    ? `${steps.length} steps${dropped}; height: tokens in the batch (at most ${most}), dark: this request's own`
    : "none";
}

function showMoney(record) {
  const first = record.events.find((event) => event.type === "first_token");
  const { usage, cells } = record;
  facts(byId("money"), [
    ["in", `${usage.prompt_tokens} tokens (${usage.cached_tokens} cached)`],
    ["out", `${usage.completion_tokens} tokens`],
    ["cost", money(record.cost_microusd)],
    ["first token", first ? `${first.at_ms.toFixed(1)} ms` : "–"],
    ["cells before", plain(cells.before)],
    ["cells held", plain(cells.held)],
    ["cells after", plain(cells.after)],
  ]);
}

function showLimits(limits) {
  const lines = limits.map(({ name, level, value, limit }) => {
    const meter = element("meter");
    meter.max = Math.max(limit, 1);
    meter.value = value;
    meter.setAttribute("aria-label", name);
    return line(level ? `${words(name)} of ${level}` : words(name), meter, element("span", `${value}/${limit}`));
  });
  byId("limits").tBodies[0].replaceChildren(...lines);
}

// Neighbouring steps go together: an answer of 500 tokens has 500 of them.
function grouped(events) {
  const groups = [];
  for (const event of events) {
    const last = groups.at(-1);
    if (event.type === "step" && last?.[0].type === "step") last.push(event);
    else groups.push([event]);
  }
  return groups;
}

function stepsLine(steps) {
  const all = element("details");
  all.append(element("summary", `${steps.length} steps, to ${steps.at(-1).at_ms.toFixed(1)} ms`));
  const list = element("ol");
  for (const step of steps) {
    const own = `${step.prefill_tokens} prefill + ${step.decode_tokens} decode`;
    const batch = `${step.batch_prefill_tokens} + ${step.batch_decode_tokens} in a batch of ${step.batch_sequences}`;
    list.append(element("li", `step ${step.step}: ${step.started_ms.toFixed(1)} to ${step.at_ms.toFixed(1)} ms, ${own} of ${batch}`));
  }
  all.append(list);
  const row = line(steps[0].started_ms.toFixed(1), "step", all);
  row.cells[0].className = "n";
  return row;
}

function eventLine(event) {
  const { type, at_ms: at, ...rest } = event;
  const what = Object.entries(rest)
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${words(name)} ${plain(value)}`)
    .join(", ");
  const row = line(at.toFixed(1), words(type), what);
  row.cells[0].className = "n";
  return row;
}

async function refreshRecord({ isNew = false } = {}) {
  const id = chosen();
  if (!id) return;
  if (!isNew && shownRecord) {
    const known = JSON.parse(shownRecord);
    if (known.request_id === id && ENDED.has(known.state) && known.ledger) return;
  }
  try {
    const record = await read(`/inspect/requests/${encodeURIComponent(id)}`);
    if (chosen() === id) showRecord(record);
  } catch (error) {
    if (error instanceof Refused) throw error;
    byId("detail-title").textContent = id;
    byId("facts").textContent = error.message;
    byId("record").hidden = true;
    shownRecord = "";
  }
}

// ---- keeping up

async function tick() {
  if (document.visibilityState === "visible") {
    try {
      const [state, list] = await Promise.all([readState(), read(`/inspect/requests?limit=${LIST_LIMIT}`)]);
      showState(state);
      showList(list.requests);
      await refreshRecord();
      byId("key-form").hidden = true;
      say("live");
    } catch (error) {
      byId("key-form").hidden = !(error instanceof Refused);
      say(error instanceof Refused ? "an API key is needed" : "no answer from the server; trying again");
    }
  }
  setTimeout(tick, POLL_MS);
}

function say(text) {
  if (byId("status").textContent !== text) byId("status").textContent = text;
}

window.addEventListener("hashchange", () => {
  markChosen();
  refreshRecord({ isNew: true }).catch(() => say("an API key is needed"));
});
byId("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  sessionStorage.setItem("hitsend-key", byId("key").value);
  byId("key").value = "";
});
tick();
