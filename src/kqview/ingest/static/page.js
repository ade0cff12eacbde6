// Which view is shown: "#/" is the list, "#/trace/ID/TAB/STEP" one trace. A view gets an abort
// signal, which ends its requests and timers when another view takes its place.

import { showList } from "./list.js";
import { showTrace } from "./trace.js";

let leave = new AbortController();
let shown;

async function show() {
  const [kind, id, tab, step] = location.hash
    .replace(/^#\//, "")
    .split("/")
    .map(decodeURIComponent);
  const main = document.getElementById("main");
  if (kind === "trace" && shown?.id === id) return shown.open(tab, step);
  leave.abort();
  leave = new AbortController();
  shown = undefined;
  if (kind === "trace" && id) {
    const here = leave;
    const view = await showTrace(main, id, leave.signal);
    if (here.signal.aborted) return;
    shown = view;
    shown?.open(tab, step);
  } else {
    showList(main, leave.signal);
  }
}

addEventListener("hashchange", show);
show();
