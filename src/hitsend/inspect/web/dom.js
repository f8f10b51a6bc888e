// Small builders. Always true: text becomes text through textContent, nothing is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "" && text !== null) made.textContent = text;
  return made;
}

export function holding(tag, className, ...children) {
  const made = element(tag, "", className);
  made.append(...children);
  return made;
}

export function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function link(address, text) {
  const made = element("a", text);
  made.href = address;
  return made;
}

export const toRequest = (id, text = id) => {
  const made = link(`#/request/${encodeURIComponent(id)}`, text);
  made.title = id;
  return made;
};

// One row of a table; numbers are set to the right.
export function line(...cells) {
  const row = element("tr");
  for (const cell of cells) {
    if (cell instanceof Node) row.append(cell.nodeName === "TH" || cell.nodeName === "TD" ? cell : holding("td", "", cell));
    else if (typeof cell === "number") row.append(element("td", number(cell), "n"));
    else row.append(element("td", cell ?? ""));
  }
  return row;
}

export function headed(text) {
  const made = element("th", text);
  made.scope = "row";
  return made;
}

// A table that scrolls by itself where it is wider than the page. `heads` beginning with ">" are numbers.
export function table(name, heads, rows) {
  const head = element("tr");
  for (const each of heads) {
    const cell = element("th", each.replace(/^>/, ""), each.startsWith(">") ? "n" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const made = holding("table", "", holding("thead", "", head), holding("tbody", "", ...rows));
  const around = holding("div", "scroll", made);
  around.tabIndex = 0;
  around.setAttribute("role", "region");
  around.setAttribute("aria-label", name);
  return around;
}

export function facts(pairs, className = "") {
  const list = element("dl", "", className);
  fill(list, pairs);
  return list;
}

export function fill(list, pairs) {
  list.replaceChildren(...pairs.map(([name, value]) => holding("div", "", element("dt", name), element("dd", value))));
}

export function gauge(value, limit, name) {
  const made = element("meter");
  made.max = Math.max(limit, 1);
  made.value = value;
  made.setAttribute("aria-label", name);
  return made;
}

export function folded(title, ...children) {
  return holding("details", "", element("summary", title), ...children);
}

export function part(title, ...children) {
  return holding("section", "part", element("h3", title), ...children);
}

// made once: making one takes longer than a row of a table does
const grouped = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

export const timeOf = (seconds) => clock.format(seconds * 1000);
export const number = (value) => (Number.isInteger(value) ? grouped.format(value) : value.toFixed(Math.abs(value) < 10 ? 2 : 1));
export const plain = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
export const words = (name) => name.replaceAll("_", " ");
export const took = (ms) => (ms === null || ms === undefined ? "–" : ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : `${ms.toFixed(1)} ms`);

export function money(microusd) {
  const whole = Math.trunc(Math.abs(microusd) / 1e6);
  return `${microusd < 0 ? "-" : ""}$${whole}.${String(Math.abs(microusd) % 1e6).padStart(6, "0")}`;
}
