// Requests of a page to its server. A key, where the server wants one, is kept for the tab only.

// What the server refused or reported; `code` is what a client shows.
export class ApiError extends Error {
  constructor(code, message, status) {
    super(message);
    this.code = code;
    this.status = status;
    this.needsKey = status === 401 || status === 403;
  }

  // Of the data of an error frame, or the body of a refused request.
  static of(body, status, who = "server") {
    const error = body?.error?.message ? body.error : body;
    const text = typeof body?.error === "string" ? body.error : error?.message;
    return new ApiError(
      error?.code ?? body?.error_code ?? `HTTP_${status}`,
      text || `The ${who} responded with status ${status}.`,
      status,
    );
  }
}

export class Client {
  // *keptAs* names the key in the tab's storage; *who* is what answers, in messages.
  constructor(keptAs, who = "server") {
    this.keptAs = keptAs;
    this.who = who;
  }

  get key() {
    return sessionStorage.getItem(this.keptAs) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(this.keptAs, value.trim());
  }

  // The reply to a request; raises ApiError if there is none, or a refusal.
  async call(path, { json, headers, ...options } = {}) {
    const sent = { ...headers };
    if (this.key) sent["X-Api-Key"] = this.key;
    if (json !== undefined) sent["Content-Type"] = "application/json";
    let reply;
    try {
      reply = await fetch(path, { ...options, headers: sent, body: json && JSON.stringify(json) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("OFFLINE", `The ${this.who} does not answer.`);
    }
    if (reply.ok) return reply;
    throw ApiError.of(await reply.json().catch(() => undefined), reply.status, this.who);
  }

  async get(path, signal) {
    return (await this.call(path, { signal })).json();
  }

  post(path, json, more = {}) {
    return this.call(path, { method: "POST", json, ...more });
  }
}
