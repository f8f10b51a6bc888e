// The list of requests: found, compared, and how long they took. Enters: a query, which stands in the address. Leaves: a
// table in pages, percentiles that lead to the requests behind them.

import { read, Refused } from "./api.js";
import { byId, element, holding, line, link, money, number, plain, table, timeOf, took, toRequest } from "./dom.js";

const FIELDS = ["name", "model", "finish_reason", "min_wall_ms", "min_cost_microusd"];
const PAGE = 50;
const POLL_MS = 2000;
const marked = new Set();
let query = "";
let next = null;
let isPaged = false;
let drawn = ""; // what is on screen: what hasn't changed isn't drawn again
let spreadDrawn = "";

export async function showRequests(text) {
  if (text !== query || !drawn) {
    query = text;
    isPaged = false;
    const asked = new URLSearchParams(query);
    for (const name of FIELDS) byId("search").elements[name].value = asked.get(name) ?? "";
  }
  if (isPaged) return POLL_MS;
  try {
    const spreading = read(`/inspect/percentiles?${query}`);
    spreading.catch(() => {}); // told below, when it is waited for
    const found = await read(`/inspect/requests?${new URLSearchParams([...new URLSearchParams(query), ["limit", PAGE]])}`);
    if (text !== query) return null; // another search was begun meanwhile
    const seen = JSON.stringify([query, found]);
    if (seen !== drawn) {
      drawn = seen;
      draw(found, false);
    }
    const percentiles = await spreading;
    const told = JSON.stringify([query, percentiles]);
    if (text === query && told !== spreadDrawn) {
      spreadDrawn = told;
      byId("percentiles").replaceChildren(...spread(percentiles));
    }
  } catch (error) {
    if (!(error instanceof Refused) || error.wantsKey) throw error;
    drawn = "refused";
    byId("search-said").textContent = error.message;
    return null;
  }
  return POLL_MS;
}

function draw(found, isMore) {
  const rows = found.requests.map(row);
  const body = byId("requests").tBodies[0];
  const focused = document.activeElement?.closest("#requests") ? document.activeElement.dataset.at : null;
  if (isMore) body.append(...rows);
  else body.replaceChildren(...rows);
  if (focused) body.querySelector(`[data-at="${CSS.escape(focused)}"]`)?.focus();
  next = found.next_before;
  byId("requests").hidden = body.rows.length === 0;
  byId("none").hidden = body.rows.length > 0;
  byId("more").hidden = next === null;
  byId("search-said").textContent = `${number(body.rows.length)} shown`;
  mark();
}

function row(request) {
  const box = element("input");
  box.type = "checkbox";
  box.checked = marked.has(request.request_id);
  box.dataset.at = `box ${request.request_id}`;
  box.setAttribute("aria-label", `compare ${request.request_id}`);
  box.addEventListener("change", () => {
    if (box.checked) marked.add(request.request_id);
    else marked.delete(request.request_id);
    mark();
  });
  const to = toRequest(request.request_id);
  to.dataset.at = `link ${request.request_id}`;
  const state = [request.state, request.error ?? (request.state === "finished" && request.finish_reason)].filter(Boolean).join(", ");
  const made = line(box, to, request.name, element("span", state, request.state === "failed" ? "bad" : ""), request.usage.prompt_tokens, request.usage.completion_tokens);
  for (const text of [request.ttft_ms?.toFixed(0) ?? "–", request.wall_ms.toFixed(0), money(request.cost_microusd)]) made.append(element("td", text, "n"));
  made.append(element("td", timeOf(request.received_at)));
  return made;
}

function mark() {
  byId("compare").disabled = marked.size !== 2;
  byId("compare").textContent = marked.size === 2 ? "Compare the two" : `Compare two (${marked.size} marked)`;
}

function spread({ num_requests: count, wall, ttft }) {
  if (!wall.length) return [element("p", "No request has ended yet.", "soft")];
  const shown = (each) => (each ? holding("td", "n", toRequest(each.request_id, took(each.ms))) : element("td", "–", "n"));
  const rows = [["wall time", wall], ["first token", ttft]].map(([name, of]) => line(name, ...wall.map((_, at) => shown(of[at]))));
  const slower = line("slower ones", ...wall.map((each) => {
    const asked = new URLSearchParams(query);
    asked.set("min_wall_ms", plain(each.ms));
    const to = link(`#/requests?${asked}`, "list");
    to.setAttribute("aria-label", `list requests of at least ${took(each.ms)}`);
    return holding("td", "n", to);
  }));
  return [table("Percentiles", ["", ...wall.map((each) => `>p${each.share}`)], [...rows, slower]), element("p", `of ${number(count)} requests; each figure leads to the request that took so long`, "soft")];
}

byId("search").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  const asked = new URLSearchParams();
  for (const name of FIELDS) {
    const value = byId("search").elements[name].value.trim();
    if (value) asked.set(name, value);
  }
  drawn = "";
  location.hash = `#/requests${asked.size ? `?${asked}` : ""}`;
});
byId("search").addEventListener("reset", () => {
  location.hash = "#/requests";
});
byId("compare").addEventListener("click", () => {
  const [first, second] = [...marked].map(encodeURIComponent);
  location.hash = `#/compare/${first}/${second}`;
});
byId("more").addEventListener("click", async () => {
  isPaged = true;
  const found = await read(`/inspect/requests?${new URLSearchParams([...new URLSearchParams(query), ["limit", PAGE], ["before", next]])}`);
  draw(found, true);
});
