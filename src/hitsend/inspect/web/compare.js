// Two requests side by side, drawn to one measure. Enters: two ids. Leaves: what differs.

import { read } from "./api.js";
import { byId, element, holding, line, money, plain, table, took, toRequest, words } from "./dom.js";
import { summed } from "./record.js";
import { waterfall } from "./waterfall.js";

export async function showCompare(first, second) {
  const records = await Promise.all([first, second].map((id) => read(`/inspect/requests/${encodeURIComponent(id)}`)));
  const scale = Math.max(...records.map((record) => record.wall_ms));
  byId("compared").replaceChildren(
    holding("div", "pair", ...records.map((record) => {
      const title = holding("h3", "", toRequest(record.request_id));
      return holding("div", "", title, element("p", summed(record), "soft"), waterfall(record, scale));
    })),
    element("h3", "Segment by segment"),
    table("Segments", ["segment", ">first", ">second", ">difference"], segments(records)),
    element("h3", "Tokens, money, sampling"),
    table("Facts", ["", ">first", ">second"], differing(records)),
  );
  return null;
}

function segments([first, second]) {
  const of = (record) => new Map(record.segments.map(({ name, ms }) => [name, ms]));
  const [a, b] = [of(first), of(second)];
  const names = [...new Set([...a.keys(), ...b.keys()])].filter((name) => (a.get(name) ?? 0) + (b.get(name) ?? 0) > 0);
  const rows = [...names.map((name) => [words(name), a.get(name) ?? 0, b.get(name) ?? 0]), ["wall", first.wall_ms, second.wall_ms]];
  return rows.map(([name, one, other]) => right(line(name, took(one), took(other), `${other >= one ? "+" : "−"}${took(Math.abs(other - one))}`)));
}

function differing([first, second]) {
  const ttft = (record) => took(record.events.find((event) => event.type === "first_token")?.at_ms);
  const rows = [
    ["first token", ttft(first), ttft(second)],
    ["cost", money(first.cost_microusd), money(second.cost_microusd)],
    ...Object.keys(first.usage).map((name) => [words(name), plain(first.usage[name]), plain(second.usage[name])]),
    ...[...new Set([...Object.keys(first.sampling ?? {}), ...Object.keys(second.sampling ?? {})])]
      .map((name) => [words(name), plain(first.sampling?.[name]), plain(second.sampling?.[name])])
      .filter(([, one, other]) => one !== other),
  ];
  return rows.map(([name, one, other]) => {
    const row = right(line(name, one, other));
    if (one !== other) row.className = "differs";
    return row;
  });
}

function right(row) {
  for (const cell of [...row.cells].slice(1)) cell.className = "n";
  return row;
}
