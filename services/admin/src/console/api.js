// Calls the admin API of this listener with the operator's token.

const STORED = "refrain-operator-token";

// The error of a call that was answered, or that could not be made (`status` 0).
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The token is kept for this tab only, and is gone when the tab is closed.
export const token = {
  get: () => sessionStorage.getItem(STORED),
  set: (text) => sessionStorage.setItem(STORED, text.trim()),
  forget: () => sessionStorage.removeItem(STORED),
};

// Sends a call. The error of a call that was refused is thrown.
async function send(method, path, { body, headers = {}, signal } = {}) {
  let answer;
  try {
    answer = await fetch(`/admin/${path}`, {
      method,
      signal,
      cache: "no-store",
      credentials: "omit",
      headers: {
        authorization: `Bearer ${token.get()}`,
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "This gateway does not answer.");
  }
  if (answer.ok) return answer;
  const error = parsed(await answer.text())?.error;
  throw new Refused(answer.status, error?.message ?? `The gateway answered with status ${answer.status}.`, error?.code);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    // The status says enough.
    return null;
  }
}

export async function call(method, path, options) {
  const answer = await send(method, path, options);
  return parsed(await answer.text());
}

// The events of a streamed answer. One that breaks off, or that ends with an error, throws it.
export async function* events(method, path, options) {
  const answer = await send(method, path, options);
  let rest = "";
  try {
    for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
      const lines = (rest + piece).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        const event = line.startsWith("data: ") ? parsed(line.slice(6)) : null;
        if (event?.error) throw new Refused(answer.status, event.error.message, event.error.code);
        if (event) yield event;
      }
    }
  } catch (error) {
    if (error instanceof Refused || error.name === "AbortError") throw error;
  }
  throw new Refused(0, "The answer broke off.");
}

// Not every browser can iterate over a stream by itself.
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    // A stream that has failed cannot be cancelled, which does not matter.
    reader.cancel().catch(() => {});
  }
}
