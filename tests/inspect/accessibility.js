// What keeps somebody from reading or using what is on screen now: a list of findings, empty when there are none.
// Rules: names, roles, references, headings, tables, landmarks, focus, contrast (WCAG 2.2 AA, by its formula).
(() => {
  const found = [];
  const say = (rule, node) => found.push(`${rule}: ${node.outerHTML.slice(0, 120)}`);
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const all = (selector) => [...document.querySelectorAll(selector)].filter(isShown);
  const named = (node) => {
    const label = node.getAttribute("aria-label")?.trim();
    const by = (node.getAttribute("aria-labelledby") ?? "").split(/\s+/).map((id) => document.getElementById(id)?.textContent.trim()).join(" ").trim();
    const labels = [...(node.labels ?? [])].map((one) => one.textContent.trim()).join(" ").trim();
    return label || by || labels || (["A", "BUTTON", "SUMMARY"].includes(node.tagName) ? node.textContent.trim() : "");
  };

  // the document
  if (!document.documentElement.lang) say("no language", document.documentElement);
  if (!document.title.trim()) say("no title", document.head);
  for (const role of ["main", "header", "nav"]) if (all(role).length !== 1) say(`not one ${role}`, document.body);
  const ids = new Map();
  for (const node of document.querySelectorAll("[id]")) ids.set(node.id, [...(ids.get(node.id) ?? []), node]);
  for (const [, nodes] of ids) if (nodes.length > 1) say("an id twice", nodes[1]);

  // names and references
  for (const node of all("a[href], button, input, select, textarea, summary, meter, [role=img], [role=group], [role=region], [role=log]")) if (!named(node)) say("no name", node);
  for (const node of all("svg")) if (node.getAttribute("aria-hidden") !== "true" && node.getAttribute("role") !== "img" && !node.closest('[aria-hidden="true"], [role="img"]')) say("a picture that says nothing", node);
  for (const name of ["aria-labelledby", "aria-controls", "aria-describedby"]) {
    for (const node of document.querySelectorAll(`[${name}]`)) for (const id of node.getAttribute(name).split(/\s+/)) if (!ids.has(id)) say(`${name} leads nowhere`, node);
  }
  for (const node of document.querySelectorAll("label[for]")) if (!ids.has(node.htmlFor)) say("a label of nothing", node);

  // headings in order
  const levels = all("h1, h2, h3, h4, h5, h6").map((node) => [Number(node.tagName[1]), node]);
  if (levels.filter(([level]) => level === 1).length !== 1) say("not one h1", document.body);
  levels.forEach(([level, node], at) => {
    if (at && level > levels[at - 1][0] + 1) say("a heading skips a level", node);
    if (!node.textContent.trim()) say("an empty heading", node);
  });

  // tables and lists
  for (const node of all("table")) if (!node.querySelector("th[scope]")) say("a table without headers", node);
  for (const node of all("th")) if (!node.scope) say("a header without scope", node);
  for (const node of all("ul > *, ol > *")) if (node.tagName !== "LI") say("no list item", node);
  for (const node of all("dl > *")) if (!["DIV", "DT", "DD"].includes(node.tagName)) say("no part of a dl", node);

  // focus
  for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) say("a focus order of its own", node);
  const focusable = "a[href], button:not(:disabled), input:not(:disabled), select, textarea, summary, [tabindex='0']";
  for (const node of document.querySelectorAll("[aria-hidden=true]")) if (node.querySelector(focusable)) say("focus on something hidden", node);
  for (const node of all("*")) {
    const style = getComputedStyle(node);
    const scrolls = (node.scrollWidth > node.clientWidth + 1 && /auto|scroll/.test(style.overflowX)) || (node.scrollHeight > node.clientHeight + 1 && /auto|scroll/.test(style.overflowY));
    if (scrolls && node !== document.scrollingElement && !node.matches(focusable) && !node.querySelector(focusable)) say("scrolls, but not by keyboard", node);
  }
  for (const node of all("button, select, summary")) if (node.getBoundingClientRect().height < 20) say("too small to hit", node);

  // contrast
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  for (const node of all("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || node.closest("svg, :disabled, option, .unseen, .skip, script, noscript")) continue;
    const style = getComputedStyle(node);
    const [one, other] = [light(parse(style.color)), light(behind(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) say(`contrast ${ratio.toFixed(2)}`, node);
  }
  return found;
})()
