// What a trace says, made ready to be shown: every token that was ever added, when it came, when it
// was taken back, and what it looked at. Pure: no page, no network.
//
// The rules are those of kqview.trace.replay. An Added event appends its tokens. An action follows
// the event that it answers:
// - Backtrack takes back its number of tokens, those just added included. Its own tokens go in at
//   once at an Added event; at others an Added event brings them, so they are not added here.
// - ForceTokens at an Added event appends its tokens; at others an Added event brings them.
// - ForceOutput replaces everything with its tokens, ToolCalls and EmitError with nothing.
// - Tokens beyond `n_kept` of an event or an action are no output, but a Backtrack counts them.
//
// The receiver has checked every field but `details` and `top_tokens`, which may be any JSON.

const ENDS = new Set(["ForceOutput", "ToolCalls", "EmitError"]);

// The payload as {request, events, steps, calls, actions, prompt, tokens, erasures, finalIds,
// hasAttention}. Events have `at`, their index, and their `calls`; calls have `logs` and `actions`.
export function timelineOf(payload) {
  const trace = joined(payload);
  return { ...trace, ...replayed(trace) };
}

function joined(payload) {
  const events = [...(payload.events ?? [])]
    .sort((a, b) => a.sequence_order - b.sequence_order)
    .map((event, at) => ({ ...event, at, calls: [] }));
  const byOrder = new Map(events.map((event) => [event.sequence_order, event]));
  const calls = (payload.mod_calls ?? []).map((call) => ({ ...call, logs: [], actions: [] }));
  for (const call of calls) byOrder.get(call.event_sequence_order)?.calls.push(call);
  for (const log of payload.mod_logs ?? []) calls[log.mod_call_sequence]?.logs.push(log);
  // Some engines put an action's fields into its details only.
  const actions = (payload.actions ?? []).map((action) => ({
    ...action.details,
    ...withoutNulls(action),
    mod: calls[action.mod_call_sequence]?.mod_name,
  }));
  for (const action of actions) calls[action.mod_call_sequence]?.actions.push(action);
  const steps = new Map();
  for (const event of events) {
    if (!steps.has(event.step)) steps.set(event.step, { step: event.step, events: [], tokens: [] });
    steps.get(event.step).events.push(event);
  }
  return { request: payload.request ?? {}, events, steps, calls, actions };
}

function replayed({ request, events, steps }) {
  const texts = knownTexts(request, events);
  const { length, ids } = promptOf(request, events);
  // Filled where the ids are known, otherwise with what is looked at.
  const prompt = ids.map((id, position) => promptToken(position, id, texts.get(id)));
  const tokens = [];
  const erasures = [];
  const live = []; // the tokens that are not taken back
  const stood = []; // position behind the prompt -> the tokens that ever stood there

  function append(from, event, isForced) {
    for (const [i, id] of list(from.tokens ?? from.added_tokens).entries()) {
      const token = {
        index: tokens.length,
        id,
        text: texts.get(id),
        step: event.step,
        isForced,
        born: event.at,
        died: Infinity,
        position: length + live.length,
        received: 0,
        isOutput: i < (from.details?.n_kept ?? Infinity),
        mod: from.mod ?? (isForced ? forcer(steps.get(event.step)) : undefined),
      };
      // A forward pass is about one token: the first that its step adds.
      if (i === 0 && from === event)
        Object.assign(token, odds(steps.get(event.step), id, isForced));
      tokens.push(token);
      steps.get(event.step).tokens.push(token);
      (stood[live.length] ??= []).push(token);
      live.push(token);
    }
  }

  function takeBack(n, action, event) {
    const gone = live.splice(Math.max(0, live.length - n));
    for (const token of gone) token.died = event.at;
    if (gone.length > 0)
      erasures.push({ n: gone.length, action, at: event.at, before: tokens.length });
  }

  for (const event of events) {
    const isAdded = event.event_type === "Added";
    if (isAdded) append(event, event, event.forced === true);
    for (const action of applied(event)) {
      if (action.action_type === "Backtrack")
        takeBack(number(action.backtrack_steps) ?? 0, action, event);
      if (ENDS.has(action.action_type)) takeBack(live.length, action, event);
      const isOwn = isAdded && ["Backtrack", "ForceTokens"].includes(action.action_type);
      if (isOwn || action.action_type === "ForceOutput") append(action, event, true);
    }
  }

  const occupant = (position, reader) =>
    position < length
      ? (prompt[position] ??= promptToken(position))
      : stood[position - length]?.findLast((token) => token.index < reader.index);
  for (const token of tokens) {
    token.attention = attentionOf(token.forward)
      ?.map(([position, weight]) => ({ token: occupant(position, token), weight }))
      .filter((one) => one.token);
    for (const one of token.attention ?? []) one.token.received += one.weight;
  }
  return {
    prompt,
    tokens,
    erasures,
    finalIds: live.filter((token) => token.isOutput).map((token) => token.id),
    hasAttention: tokens.some((token) => token.attention),
  };
}

function applied(event) {
  return event.calls
    .flatMap((call) => call.actions)
    .filter((action) => action.details?.is_applied !== false);
}

// The mod whose tokens a forced Added event of the step brings.
function forcer(step) {
  const actions = step.events.filter((event) => event.event_type !== "Added").flatMap(applied);
  return actions.findLast((action) => ["ForceTokens", "Backtrack"].includes(action.action_type))
    ?.mod;
}

// Of the prompt that was evaluated.
function promptOf(request, events) {
  const adjusted = events
    .flatMap(applied)
    .find((action) => action.action_type === "AdjustedPrefill");
  const prefilled = events.find((event) => event.event_type === "Prefilled");
  const ids = request.user_prompt_token_ids ?? [];
  const length = adjusted?.new_length ?? prefilled?.prompt_length ?? ids.length;
  return {
    length,
    ids: [ids, list(adjusted?.tokens)].find((some) => some.length === length) ?? [],
  };
}

function promptToken(position, id, text) {
  return { id, text, position, isPrompt: true, received: 0 };
}

// The forward pass of a step and what it said of a token. After a Backtrack it was of another text,
// so it says nothing of forced tokens.
function odds(step, id, isForced) {
  const forward = step.events.find((event) => event.event_type === "ForwardPass");
  const isMoved =
    isForced && step.events.flatMap(applied).some((action) => action.action_type === "Backtrack");
  if (!forward || isMoved) return {};
  const top = topTokens(forward);
  const rank = top.findIndex((one) => one.id === id) + 1;
  return {
    forward,
    nTop: top.length,
    entropy: number(forward.details?.entropy) ?? entropyOf(top),
    ...(rank > 0 ? { rank, probability: top[rank - 1].probability } : {}),
  };
}

// The likeliest tokens of a forward pass, best first: [{id, text, probability}].
export function topTokens(forward) {
  return list(forward?.top_tokens)
    .filter((one) => one?.token !== undefined)
    .map((one) => ({
      id: one.token,
      text: typeof one.token_str === "string" ? one.token_str : undefined,
      probability: number(one.prob) ?? Math.exp(number(one.logprob) ?? -Infinity),
    }))
    .sort((a, b) => b.probability - a.probability);
}

// In nats. What the list leaves over counts as one token, so this is a lower bound; undefined
// without a list.
export function entropyOf(top) {
  if (top.length === 0) return undefined;
  const listed = top.map((one) => one.probability);
  const rest = 1 - listed.reduce((sum, p) => sum + p, 0);
  return [...listed, rest].filter((p) => p > 1e-6).reduce((sum, p) => sum - p * Math.log(p), 0);
}

// [[position, weight]], the most attended first; undefined where the trace has none.
function attentionOf(forward) {
  const { positions, weights } = forward?.details?.attention ?? {};
  if (!Array.isArray(positions)) return undefined;
  return positions
    .map((position, i) => [position, number(weights?.[i]) ?? 0])
    .filter(([position]) => position >= 0);
}

// id -> text, from wherever the trace tells it.
function knownTexts(request, events) {
  const texts = new Map();
  const learn = (ids, words) => {
    if (!Array.isArray(ids) || ids.length !== words?.length) return;
    for (const [i, id] of ids.entries())
      if (typeof words[i] === "string" && !texts.has(id)) texts.set(id, words[i]);
  };
  for (const event of events) {
    if (event.event_type === "Prefilled")
      learn(request.user_prompt_token_ids, event.details?.tokens_as_text);
    if (event.event_type === "Sampled") learn([event.sampled_token], [event.token_text]);
    learn(event.added_tokens, event.details?.tokens_as_text);
    for (const action of event.calls.flatMap((call) => call.actions))
      learn(action.tokens, action.tokens_as_text);
    for (const one of topTokens(event)) learn([one.id], [one.text]);
  }
  return texts;
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function number(value) {
  return typeof value === "number" ? value : undefined;
}

function withoutNulls(object) {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => value !== null));
}
