// Asking the server. Enters: paths. Leaves: JSON, events. Always true: the key is in sessionStorage and in the header of
// a request to this server, nowhere else; a refusal says which status and what the server said.

const KEY = "hitsend-key";

export class Refused extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }

  get wantsKey() {
    return this.status === 401;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function call(path, options = {}) {
  const kept = key.get();
  const headers = { ...(kept ? { authorization: `Bearer ${kept}` } : {}), ...options.headers };
  // with a key of its own, the browser's are left out: nor does it ask for others where this one is refused
  const credentials = kept ? "omit" : "same-origin";
  const response = await fetch(path, { cache: "no-store", credentials, ...options, headers });
  if (response.ok) return response;
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    said = null;
  }
  throw new Refused(response.status, said?.message ?? `${path} answered ${response.status}`, said?.param ?? null);
}

export const read = async (path) => (await call(path)).json();

// The documents of a stream of server-sent events, as they come.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      kept += value;
      for (let end = kept.indexOf("\n\n"); end >= 0; end = kept.indexOf("\n\n")) {
        const data = kept.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
        kept = kept.slice(end + 2);
        if (data.length && data[0] !== "data: [DONE]") yield JSON.parse(data[0].slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
