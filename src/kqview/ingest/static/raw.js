// The payload as it is stored, to read and to keep.

import { button, count, element, note } from "./dom.js";

const SHOWN_CHARACTERS = 200_000; // more would take a browser seconds to lay out

export function rawView({ payload, text }) {
  const pretty = JSON.stringify(payload, null, 2);
  const name = `${String(payload.request.request_id).replace(/[^\w.-]+/g, "_")}.json`;
  const save = () => {
    const link = element("a", {
      href: URL.createObjectURL(new Blob([text], { type: "application/json" })),
      download: name,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  };
  const isCut = pretty.length > SHOWN_CHARACTERS;
  return {
    node: element(
      "div",
      {},
      element(
        "p",
        { class: "bar" },
        button("Download", save),
        note(
          isCut
            ? `The first ${count(SHOWN_CHARACTERS, "character")} of ${pretty.length.toLocaleString("en")}; the download has all.`
            : count(pretty.length, "character"),
        ),
      ),
      element("pre", { tabindex: 0, class: "raw" }, pretty.slice(0, SHOWN_CHARACTERS)),
    ),
  };
}
