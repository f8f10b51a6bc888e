// What was spent and what is left. Enters: /inspect/usage. Leaves: bars and tables; a caller's are its own.

import { read } from "./api.js";
import { byId, element, gauge, headed, line, money, number, plain, table, words } from "./dom.js";
import { key, stack } from "./waterfall.js";

const COLOURS = { input: "prefill_own", cached_input: "cached", output: "decode_own", reasoning: "render" };

export async function showMoney() {
  const asked = new URLSearchParams([...new FormData(byId("money-form"))].filter(([, value]) => value));
  const spent = await read(`/inspect/usage?${asked}`);
  const kinds = spent.kinds.map((each) => ({ value: each.cost_microusd, name: COLOURS[each.kind], text: `${words(each.kind)} ${money(each.cost_microusd)}, ${number(each.num_tokens)} tokens` }));
  const most = Math.max(1, ...spent.parts.map((each) => each.totals.cost_microusd));
  byId("spent").replaceChildren(
    element("p", `${money(spent.totals.cost_microusd)} for ${number(spent.totals.requests)} requests: ${number(spent.totals.prompt_tokens)} tokens in, ${number(spent.totals.completion_tokens)} out`, "sum"),
    element("h3", "By kind of token"),
    stack(kinds, spent.totals.cost_microusd),
    key(kinds),
    element("h3", `By ${words(spent.by)}`),
    spent.parts.length ? table(`Cost by ${spent.by}`, [spent.by, "", ">cost", ">requests", ">in", ">cached", ">out"], spent.parts.map((each) => partLine(each, most))) : element("p", "Nothing yet.", "soft"),
    element("h3", "Budgets"),
    spent.budgets.length ? table("Budgets", ["level", "budget", "", ">spent", ">left", ">limit"], spent.budgets.map(budgetLine)) : element("p", "No budget is set.", "soft"),
  );
  return null;
}

function partLine(each, most) {
  const name = each.of.key ?? Object.values(each.of).map(plain).join(" / ");
  const bar = stack(each.kinds.map((kind) => ({ value: kind.cost_microusd, name: COLOURS[kind.kind] })), most);
  const { totals } = each;
  const row = line(headed(name), bar, money(totals.cost_microusd), totals.requests, totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens);
  row.cells[1].className = "wide";
  row.cells[2].className = "n";
  return row;
}

function budgetLine(budget) {
  const level = budget.name_of_key ? `key of ${budget.name_of_key}` : budget.level;
  const title = `${words(budget.name)} of ${level}`;
  const row = line(headed(level), `${words(budget.name)}, from ${budget.since}`, gauge(budget.spent_microusd, budget.limit_microusd, title), money(budget.spent_microusd), money(budget.left_microusd), money(budget.limit_microusd));
  for (const cell of [...row.cells].slice(3)) cell.className = "n";
  return row;
}

byId("money-form").addEventListener("submit", (submitted) => submitted.preventDefault());
export const onMoneyChange = (again) => byId("money-form").addEventListener("change", again);
