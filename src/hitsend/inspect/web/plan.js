// The planner. Enters: fields, which stand in the address after #, and perhaps what files hold, which doesn't. Leaves:
// the text and the document that `hitsend plan` gives to the same fields. Always true: the fields are the server's own list
// of them; a question that is replaced by another one is called off.

import { call, read, Refused } from "./api.js";
import { byId, element, holding, link, plain, took, words } from "./dom.js";

// What most people fill in; everything else is folded away.
const FIRST = {
  memory: ["model", "gpu", "tp", "weights", "kv-dtype", "max-model-len", "engine"],
  speed: ["model", "gpu", "tp", "weights", "engine", "batch", "input", "output"],
  compare: ["model", "gpu", "batch", "input", "output", "slo-ttft", "slo-tpot"],
  cost: ["price", "requests", "input", "output", "reasoning", "cached-share", "days"],
  fleet: ["peak-rps", "slo-ttft", "slo-tpot", "model", "gpu", "tp", "weights", "input", "output"],
  "rent-or-buy": ["dedicated-cost", "price", "requests", "input", "output", "tokens-per-s"],
  train: ["params", "model", "method", "optimizer", "zero", "gpus", "gpu", "tokens", "seq", "batch"],
};
const EXAMPLES = {
  memory: "model=Qwen3.8-27B&gpu=H200&kv-dtype=fp8&max-model-len=32768",
  speed: "model=Llama-3.1-70B&gpu=H200&tp=2&weights=fp8&batch=16&input=1024&output=1024",
  compare: "model=Qwen3.8-27B&gpu=H100,L40S&slo-ttft=1s&slo-tpot=40ms&batch=32",
  cost: "price=workers-ai:qwen3.8-27b,0.45/3.20&requests=30000&input=1200&output=400&reasoning=800",
  fleet: "peak-rps=40&slo-ttft=1s&slo-tpot=40ms&model=Qwen3.8-27B&gpu=H100&weights=fp8",
  "rent-or-buy": "dedicated-cost=5460&price=0.45/3.20",
  train: "params=7.5B&gpus=8&zero=2&tokens=150B&gpu=H100",
};
const LISTS = { model: "models", gpu: "gpus", price: "prices" };

let known = null;
let drawn = null; // the plan whose form is there
let shown = null; // the question that the form and what is below it are about
let asking = null;

export async function showPlan(name, query) {
  known ??= await read("/inspect/plan");
  const plan = name in known.plans ? name : Object.keys(known.plans)[0];
  if (drawn !== plan) form(plan);
  if (shown === `${plan}?${query}`) return null; // what was typed since stays
  shown = `${plan}?${query}`;
  fillIn(new URLSearchParams(query));
  clear();
  if (query) await ask(plan, query);
  return null;
}

// ---- the form

function form(plan) {
  drawn = plan;
  const { about, fields } = known.plans[plan];
  byId("plan-kinds").replaceChildren(...Object.keys(known.plans).map((name) => {
    const to = link(`#/plan/${name}`, words(name).replaceAll("-", " "));
    if (name === plan) to.setAttribute("aria-current", "page");
    return to;
  }));
  byId("plan-about").textContent = about;
  for (const list of new Set(Object.values(LISTS))) byId(`plan-${list}`).replaceChildren(...known[list].map((name) => new Option(name, name)));
  const first = FIRST[plan] ?? [];
  const byName = new Map(fields.map((each) => [each.name, each]));
  byId("plan-first").replaceChildren(...first.filter((name) => byName.has(name)).map((name) => field(byName.get(name))));
  byId("plan-more").replaceChildren(...fields.filter((each) => !first.includes(each.name)).map(field));
  byId("plan-paste").hidden = !byName.has("model");
  const { pastable } = known.plans[plan];
  for (const place of owns()) place.hidden = !pastable.includes(place.dataset.pasted);
  byId("plan-own").hidden = !pastable.length;
  byId("plan-example").href = `#/plan/${plan}?${EXAMPLES[plan] ?? ""}`;
  byId("plan-example").hidden = !EXAMPLES[plan];
}

function field({ name, kind, help, default: preset = null, needed = false }) {
  const id = `plan-field-${name}`;
  const input = element("input");
  input.id = id;
  input.dataset.plan = name;
  input.dataset.kind = kind;
  if (kind === "switch") {
    input.type = "checkbox";
    input.dataset.preset = String(preset === true);
  } else {
    input.placeholder = preset === null ? (needed ? "needed" : "") : plain(preset);
    input.autocomplete = "off";
    if (kind === "whole" || kind === "number") input.inputMode = "decimal";
    if (LISTS[name]) input.setAttribute("list", `plan-${LISTS[name]}`);
  }
  const label = element("label", words(name).replaceAll("-", " "));
  label.htmlFor = id;
  const told = element("small", kind === "texts" ? `${help} Several: with commas.` : help, "soft");
  told.id = `${id}-help`;
  input.setAttribute("aria-describedby", told.id);
  return holding("div", "field", label, input, told);
}

const MOST_BYTES = 256 * 1024;
const owns = () => [...byId("plan-own").querySelectorAll("[data-pasted]")];
const areas = () => [byId("plan-config"), ...owns().map((place) => place.querySelector("textarea"))];

const inputs = () => [...byId("plan-form").querySelectorAll("[data-plan]")];

function fillIn(asked) {
  for (const input of inputs()) {
    const value = asked.get(input.dataset.plan);
    if (input.type === "checkbox") input.checked = (value ?? input.dataset.preset) === "true";
    else input.value = value ?? "";
  }
  if ([...byId("plan-more").querySelectorAll("[data-plan]")].some((input) => asked.has(input.dataset.plan))) byId("plan-others").open = true;
}

function typed() {
  const asked = new URLSearchParams();
  for (const input of inputs()) {
    const value = input.type === "checkbox" ? String(input.checked) : input.value.trim();
    if (value && value !== (input.dataset.preset ?? "")) asked.set(input.dataset.plan, value);
  }
  return asked.toString().replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("%2F", "/");
}

// ---- the answer

function clear() {
  asking?.abort();
  asking = null;
  fault(null);
  byId("plan-answer").hidden = true;
  byId("plan-said").textContent = "";
}

async function ask(plan, query) {
  const own = (asking = new AbortController());
  byId("plan-said").textContent = plan === "fleet" ? "simulating, which takes a minute or so …" : "planning …";
  const began = performance.now();
  try {
    const body = { plan, fields: Object.fromEntries(new URLSearchParams(query)) };
    const pasted = byId("plan-config").value.trim();
    if (pasted && !byId("plan-paste").hidden) body.config = parsed("config", pasted);
    for (const place of owns().filter((each) => !each.hidden)) {
      const text = place.querySelector("textarea").value.trim();
      if (text) body[place.dataset.pasted] = parsed(place.dataset.pasted, text);
    }
    const headers = { "content-type": "application/json" };
    const response = await call("/inspect/plan", { method: "POST", body: JSON.stringify(body), headers, signal: own.signal });
    const found = await response.json();
    if (asking !== own) return;
    byId("plan-text").textContent = found.text;
    byId("plan-json").textContent = JSON.stringify(found.document, null, 2);
    byId("plan-command").textContent = found.command;
    byId("plan-answer").hidden = false;
    byId("plan-said").textContent = `planned in ${took(performance.now() - began)}`;
  } catch (error) {
    if (error.name === "AbortError") return;
    if (asking !== own) return;
    if (!(error instanceof Refused) || error.wantsKey) {
      shown = null;
      throw error;
    }
    byId("plan-said").textContent = "";
    fault(error);
  }
}

// One document, or one a line where a file may hold several.
function parsed(name, text) {
  try {
    if (name !== "trace") return JSON.parse(text);
  } catch {
    if (name !== "calibrate") throw new Refused(400, `${name}: this is no JSON`, name);
  }
  return text.split("\n").filter((line) => line.trim()).map((line, index) => {
    try {
      return JSON.parse(line);
    } catch {
      throw new Refused(400, `${name}: line ${index + 1} is no JSON`, name);
    }
  });
}

function fault(error) {
  const place = byId("plan-error");
  place.hidden = error === null;
  place.textContent = error?.message ?? "";
  for (const input of [...inputs(), ...areas()]) input.removeAttribute("aria-invalid");
  const wrong = error?.param && (byId(`plan-field-${error.param}`) ?? areas().find((area) => area.id === `plan-${error.param}`));
  if (!wrong) return;
  wrong.setAttribute("aria-invalid", "true");
  const folded = wrong.closest("details");
  if (folded) folded.open = true;
}

byId("plan-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  const query = typed();
  const to = `#/plan/${drawn}${query ? `?${query}` : ""}`;
  shown = null;
  if (location.hash !== to) location.hash = to;
  else window.dispatchEvent(new HashChangeEvent("hashchange", { oldURL: location.href, newURL: location.href }));
});
byId("plan-form").addEventListener("reset", (cleared) => {
  cleared.preventDefault();
  for (const area of areas()) area.value = "";
  if (location.hash === `#/plan/${drawn}`) fillIn(new URLSearchParams());
  else location.hash = `#/plan/${drawn}`;
});
for (const place of owns()) {
  place.querySelector("input").addEventListener("change", async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    const name = place.dataset.pasted;
    fault(file.size > MOST_BYTES ? new Refused(413, `${name}: the file has ${file.size} bytes, limit ${MOST_BYTES}`, name) : null);
    if (file.size <= MOST_BYTES) place.querySelector("textarea").value = await file.text();
    target.value = "";
  });
}
