// The payload as it is stored, to read and to keep.

import { button, count, html, note } from "./dom.js";

const SHOWN_CHARACTERS = 200_000; // more would take a browser seconds to lay out

export function rawView({ payload, text }) {
  const pretty = JSON.stringify(payload, null, 2);
  const name = `${String(payload.request.request_id).replace(/[^\w.-]+/g, "_")}.json`;
  const save = () => {
    const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    html`<a href=${href} download=${name}></a>`.click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  };
  const size =
    pretty.length > SHOWN_CHARACTERS
      ? `The first ${count(SHOWN_CHARACTERS, "character")} of ${pretty.length.toLocaleString("en")}; the download has all.`
      : count(pretty.length, "character");
  return {
    node: html`<div>
      <p class="bar">${button("Download", save)}${note(size)}</p>
      <pre tabindex="0" class="raw">${pretty.slice(0, SHOWN_CHARACTERS)}</pre>
    </div>`,
  };
}
