// Draws /openapi.json. Text is only ever set as text.

const status = document.getElementById("status");
const docs = document.getElementById("docs");

function make(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

const nameOf = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

function link(ref) {
  const made = make("a", nameOf(ref));
  made.href = "#" + nameOf(ref);
  return made;
}

// A type in a few words, with links to what has a table of its own.
function typeOf(schema) {
  if (schema.$ref) return [link(schema.$ref)];
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter((one) => one.type !== "null").map(typeOf);
    return kinds.flatMap((kind, at) => (at ? [" or ", ...kind] : kind));
  }
  if (schema.const !== undefined || schema.enum) return [JSON.stringify(schema.enum ?? schema.const)];
  if (schema.type === "array") return ["list of ", ...(schema.items ? typeOf(schema.items) : ["anything"])];
  return [schema.type ?? "anything", ...limitsOf(schema)];
}

function limitsOf(schema) {
  const words = {
    minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
    minLength: "length ≥", maxLength: "length ≤",
  };
  return Object.entries(words).filter(([key]) => key in schema).map(([key, sign]) => ` ${sign} ${schema[key]}`);
}

function tableOf(schema) {
  const body = make("tbody");
  const required = new Set(schema.required ?? []);
  const fields = Object.entries(schema.properties ?? {});
  fields.sort(([one], [other]) => required.has(other) - required.has(one));
  for (const [name, field] of fields) {
    const type = make("td");
    type.append(...typeOf(field));
    const told = [required.has(name) ? "required" : "", field.description ?? ""].filter(Boolean).join(". ");
    body.append(make("tr", "", make("td", "", make("code", name)), type, make("td", told)));
  }
  return make("table", "", body);
}

function operation(path, method, item) {
  const head = make("summary", "", make("code", `${method.toUpperCase()} ${path}`), ` ${item.summary ?? ""}`);
  const parts = [head];
  for (const [type, { schema }] of Object.entries(item.requestBody?.content ?? {})) {
    const line = make("p", `Body, ${type}: `);
    line.append(...typeOf(schema));
    parts.push(line, ...(schema.properties ? [tableOf(schema)] : []));
  }
  for (const [status, answer] of Object.entries(item.responses)) {
    for (const [type, { schema }] of Object.entries(answer.content ?? {})) {
      const line = make("p", `${status} ${type}: `);
      line.append(...typeOf(schema));
      parts.push(line);
    }
  }
  return make("details", "", ...parts);
}

async function draw() {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`/openapi.json answered ${answer.status}`);
  const api = await answer.json();
  docs.append(make("p", api.info.description), make("h2", "Routes"));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, item] of Object.entries(methods)) {
      if (item.responses) docs.append(operation(path, method, item));
    }
  }
  docs.append(make("h2", "Bodies"));
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const title = make("h3", name);
    title.id = name;
    docs.append(title, make("p", schema.description ?? ""), tableOf(schema));
  }
  status.textContent = `version ${api.info.version}`;
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

draw().catch((error) => { status.textContent = String(error.message ?? error); });
