// Line drawings for buttons; what a button does is in its label.

import { html } from "../dom.js";

const PATHS = {
  menu: "M3 6h18M3 12h18M3 18h18",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  close: "M6 6l12 12M18 6L6 18",
  trash: "M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  eye: "M2.5 12C5 7.5 8.5 5.5 12 5.5S19 7.5 21.5 12C19 16.5 15.5 18.5 12 18.5S5 16.5 2.5 12zM12 9a3 3 0 100 6 3 3 0 000-6z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 10-2 6M20 4v7h-7",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  book: "M4 5h6a2 2 0 012 2v12a2 2 0 00-2-2H4zM20 5h-6a2 2 0 00-2 2v12a2 2 0 012-2h6z",
  down: "M12 5v14M6 13l6 6 6-6",
};

export const icon = (name) =>
  html`<svg viewBox="0 0 24 24" class="icon" aria-hidden="true"><path d=${PATHS[name]}></path></svg>`;
