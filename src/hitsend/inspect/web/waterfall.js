// Where the time of one request went. Enters: a record. Leaves: pictures. Always true: the segments are those of the
// record, which add up to its wall time; every picture has its numbers beside it as text.

import { drawn, element, headed, holding, line, number, took, words } from "./dom.js";

export const ENDED = new Set(["finished", "failed", "cancelled"]);

// `scale`: the milliseconds of the full width, so that two requests can be drawn to one measure.
export function waterfall(record, scale = record.wall_ms) {
  const rows = [];
  let begun = 0;
  for (const { name, ms } of record.segments) {
    if (ms > 0) {
      const width = Math.max(2, (ms / scale) * 1000);
      const chart = drawn("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true" });
      chart.append(drawn("rect", { x: 0, y: 7.5, width: 1000, height: 1, class: "axis" }));
      chart.append(drawn("rect", { x: Math.min((begun / scale) * 1000, 998), y: 2, width, height: 12, rx: 1, class: name }));
      rows.push(measured(words(name), holding("div", "track", chart), took(ms), `${((ms / record.wall_ms) * 100).toFixed(1)} %`));
    }
    begun += ms;
  }
  rows.push(measured(ENDED.has(record.state) ? "wall" : "so far", "", took(record.wall_ms), ""));
  rows.at(-1).className = "total";
  return holding("table", "segments", holding("tbody", "", ...rows));
}

function measured(name, track, ms, share) {
  const row = line(headed(name), track, ms, share);
  row.cells[2].className = row.cells[3].className = "n";
  return row;
}

export const stepsOf = (record) => record.events.filter((event) => event.type === "step");

export function stepChart(record) {
  const steps = stepsOf(record);
  const most = Math.max(1, ...steps.map((step) => step.batch_prefill_tokens + step.batch_decode_tokens));
  const chart = drawn("svg", { class: "steps", role: "img", "aria-label": "Steps over time", viewBox: "0 0 1000 60", preserveAspectRatio: "none" });
  for (const step of steps) {
    const x = (step.started_ms / record.wall_ms) * 1000;
    const width = Math.max(1, ((step.at_ms - step.started_ms) / record.wall_ms) * 1000 - 0.5);
    const kind = step.prefill_tokens > 0 ? "prefill" : "decode";
    const bars = [[step.batch_prefill_tokens + step.batch_decode_tokens, `${kind}_shared`], [step.prefill_tokens + step.decode_tokens, `${kind}_own`]];
    for (const [tokens, name] of bars) {
      const height = Math.max(2, (tokens / most) * 58);
      chart.append(drawn("rect", { x, y: 60 - height, width, height, class: name }));
    }
  }
  const dropped = record.steps_dropped ? `, ${number(record.steps_dropped)} more not kept` : "";
  const said = steps.length ? `${number(steps.length)} steps${dropped}; height: tokens in the batch (at most ${number(most)}), dark: this request's own` : "No step of an engine here.";
  return holding("div", "", ...(steps.length ? [chart] : []), element("p", said, "soft"));
}

// One bar whose parts are known by their colour and by the words below it.
export function stack(parts, total) {
  const chart = drawn("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true", class: "bar" });
  chart.append(drawn("rect", { x: 0, y: 0, width: 1000, height: 14, class: "empty" }));
  let begun = 0;
  for (const { value, name } of parts) {
    const width = total > 0 ? (value / total) * 1000 : 0;
    chart.append(drawn("rect", { x: begun, y: 0, width: Math.max(0, width - 1), height: 14, class: name }));
    begun += width;
  }
  return chart;
}

export function key(parts) {
  const list = element("ul", "", "key");
  for (const { name, text } of parts) {
    const spot = drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, drawn("rect", { x: 0, y: 0, width: 10, height: 10, class: name }));
    list.append(holding("li", "", spot, element("span", text)));
  }
  return list;
}
