// The page's views and which of them is open. Enters: the address after #. Leaves: one view, kept up to date. Always
// true: only the open view asks the server, and only while the page can be seen; a server that is gone is said so and
// looked for again; a refusal for want of a key opens the field for one.

import { key, Refused } from "./api.js";
import { showTry } from "./ask.js";
import { showCompare } from "./compare.js";
import { byId } from "./dom.js";
import { showLive, stopLive } from "./live.js";
import { onMoneyChange, showMoney } from "./money.js";
import { showPlan } from "./plan.js";
import { showRequest } from "./record.js";
import { showRequests } from "./search.js";

const AGAIN_MS = 2000;

// Each shows itself and says after how many milliseconds it wants to be asked again, or null: when something changes.
const VIEWS = {
  try: () => showTry(),
  live: () => showLive(() => say("live")),
  requests: (_, query) => showRequests(query),
  request: ([id]) => showRequest(id),
  compare: ([first, second]) => showCompare(first, second),
  money: () => showMoney(),
  plan: ([name], query) => showPlan(name, query),
};

let round = 0; // what was begun for an older address doesn't go on

function place() {
  const raw = location.hash.slice(1);
  if (!raw) return { view: location.pathname === "/" ? "try" : "requests", parts: [], query: "" };
  if (!raw.startsWith("/")) return { view: "request", parts: [decoded(raw)], query: "" };
  const [path, query = ""] = raw.slice(1).split("?", 2);
  const [view, ...parts] = path.split("/").map(decoded);
  return { view: view in VIEWS ? view : "try", parts, query };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function show() {
  const own = (round += 1);
  const { view, parts, query } = place();
  stopLive();
  for (const name of Object.keys(VIEWS)) byId(`view-${name}`).hidden = name !== view;
  for (const to of document.querySelectorAll("nav a")) {
    if (to.getAttribute("href") === `#/${view}`) to.setAttribute("aria-current", "page");
    else to.removeAttribute("aria-current");
  }
  while (own === round) {
    let wait = document.visibilityState === "visible" ? 0 : AGAIN_MS;
    if (!wait) wait = await once(view, parts, query);
    if (wait === null) return;
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function once(view, parts, query) {
  try {
    const wait = await VIEWS[view](parts, query);
    say("live");
    return wait ?? null;
  } catch (error) {
    if (error instanceof Refused && error.wantsKey) {
      say("an API key is needed");
      openKey(true);
      return null;
    }
    say(error instanceof Refused ? error.message : "no answer from the server; trying again");
    return error instanceof Refused && error.status < 500 ? null : AGAIN_MS;
  }
}

function say(text) {
  if (byId("status").textContent !== text) byId("status").textContent = text;
}

function openKey(isOpen) {
  byId("key-form").hidden = !isOpen;
  byId("key-button").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("key").focus();
}

byId("key-button").addEventListener("click", () => openKey(byId("key-form").hidden));
byId("key-forget").addEventListener("click", () => {
  key.forget();
  openKey(false);
  show();
});
byId("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  if (byId("key").value) key.set(byId("key").value);
  byId("key").value = "";
  openKey(false);
  show();
});
window.addEventListener("hashchange", (event) => {
  const before = new URL(event.oldURL).hash.split("?")[0];
  show();
  if (location.hash === "#main") return;
  if (before !== location.hash.split("?")[0]) document.querySelector("main > section:not([hidden]) h2")?.focus();
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") show();
  else stopLive();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
onMoneyChange(show);
show();
