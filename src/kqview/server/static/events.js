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
