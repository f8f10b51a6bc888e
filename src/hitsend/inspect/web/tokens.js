// Tokens one by one. Enters: tokens with text, and id or probability. Leaves: a field of them: what the pointer or the
// arrow keys are on is told in full below.

import { element, holding } from "./dom.js";

const COLOURS = 6; // of ids: one id always has the same one
const percent = (logprob) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;
export const visible = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");

// `tokens`: {text, id?, logprob?, top?, isControl?, isCached?, opens?}; `opens` names the role that begins with this one.
export function tokenField(name, tokens) {
  const field = element("div", "", "tokens");
  field.tabIndex = 0;
  field.setAttribute("role", "group");
  field.setAttribute("aria-label", `${name}: arrow keys go from token to token`);
  const told = element("div", "", "told soft");
  told.setAttribute("aria-live", "polite");
  told.textContent = "Point at a token, or go through them with the arrow keys.";
  let at = -1;
  const show = (index) => {
    field.children[marks[at]]?.classList.remove("here");
    at = Math.max(0, Math.min(tokens.length - 1, index));
    field.children[marks[at]].classList.add("here");
    told.replaceChildren(...about(tokens[at], at));
  };
  const marks = [];
  tokens.forEach((token, index) => {
    if (token.opens) field.append(element("span", token.opens, "role"));
    const spot = element("span", visible(token.text));
    if (token.isControl) spot.className = "token control";
    else if (token.logprob !== undefined) spot.className = `token p${bucket(token.logprob)}`;
    else spot.className = `token i${(token.id ?? index) % COLOURS}`;
    if (token.isCached) spot.classList.add("fromcache");
    spot.dataset.index = index;
    marks.push(field.children.length);
    field.append(spot);
  });
  field.addEventListener("pointerover", (event) => event.target.dataset.index !== undefined && show(Number(event.target.dataset.index)));
  field.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
    if (step === undefined || !tokens.length) return;
    event.preventDefault();
    show(at + step);
  });
  return holding("div", "", field, told);
}

function bucket(logprob) {
  const chance = Math.exp(logprob);
  return chance >= 0.9 ? 4 : chance >= 0.5 ? 3 : chance >= 0.2 ? 2 : chance >= 0.05 ? 1 : 0;
}

function about(token, index) {
  const id = token.id === undefined ? "" : `, id ${token.id}`;
  const chance = token.logprob === undefined ? "" : `, ${percent(token.logprob)}`;
  const said = [element("strong", `${JSON.stringify(token.text)}`), element("span", ` token ${index + 1}${id}${chance}${token.isControl ? ", control token" : ""}${token.isCached ? ", from the cache" : ""}`)];
  if (token.top?.length) {
    const list = element("ol", "", "top");
    for (const other of token.top) list.append(element("li", `${JSON.stringify(other.token)} ${percent(other.logprob)}`));
    said.push(list);
  }
  return said;
}
