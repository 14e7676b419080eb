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

export async function call(method, path, { body, headers = {}, signal } = {}) {
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
  const text = await answer.text();
  let json = null;
  try {
    json = JSON.parse(text);
  } catch {
    // The status says enough.
  }
  if (answer.ok) return json;
  const error = json?.error;
  throw new Refused(answer.status, error?.message ?? `The gateway answered with status ${answer.status}.`, error?.code);
}
