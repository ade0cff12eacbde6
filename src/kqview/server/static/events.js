// Server-Sent Events read from a reply's body. Not an EventSource, which can neither post nor send
// a key.

// Yields {event, data} of each event; its data as text.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    let event = "message";
    let data = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading leaves the connection
  }
}

const AGAIN_MS = [500, 1000, 2000, 5000]; // between attempts to follow

// Calls on.event for each event of the reply of *open*, and on.state(isListening), again and again
// until *signal* aborts or a key is needed.
export async function follow(open, signal, on) {
  for (let nFailed = 0; !signal.aborted; nFailed++) {
    try {
      const reply = await open();
      on.state(true);
      nFailed = 0;
      for await (const one of readEvents(reply.body)) on.event(one);
    } catch (error) {
      if (signal.aborted || error.needsKey) return;
    }
    if (signal.aborted) return;
    on.state(false);
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(nFailed, AGAIN_MS.length - 1)]));
  }
}
