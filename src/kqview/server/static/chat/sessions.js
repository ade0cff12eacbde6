// The list of conversations that the server keeps: open one, delete one, begin a new one.

import { button, count, html, quietButton } from "../dom.js";
import { deleteSession, fetchSessions } from "./api.js";
import { icon } from "./icons.js";

export class Sessions {
  // on.open(id), undefined for a new one; on.problem(error).
  constructor(node, on) {
    this.on = on;
    this.all = [];
    this.open = undefined; // id of the one that is shown
    this.list = html`<ul></ul>`;
    this.none = html`<p class="note">Conversations that you begin are listed here.</p>`;
    const begin = button([icon("plus"), "New chat"], () => on.open(undefined), { class: "quiet new" });
    node.append(html`<a class="brand" href="./">kqview</a>`, begin, this.none, this.list);
  }

  async load() {
    this.all = (await fetchSessions()).sort((a, b) => b.used_s - a.used_s);
    this.draw();
  }

  titleOf(id) {
    const found = this.all.find(({ session_id }) => session_id === id);
    return found ? titleOf(found) : "New chat";
  }

  show(id) {
    this.open = id;
    this.draw();
  }

  draw() {
    this.none.hidden = this.all.length > 0;
    this.list.replaceChildren(...this.all.map((one) => this.row(one)));
  }

  row(one) {
    const { session_id: id } = one;
    const title = titleOf(one);
    const about = `${title}\n${count(one.n_messages, "message")}`;
    return html`<li data-session=${id}>
      <a href=${`#/${encodeURIComponent(id)}`} aria-current=${id === this.open && "page"} title=${about}>
        ${title}
      </a>
      ${quietButton(icon("trash"), () => this.ask(one), { "aria-label": `Delete ${title}` })}
    </li>`;
  }

  ask(one) {
    const dialog = html`<dialog aria-label="Delete a conversation" @close=${() => dialog.remove()}>
      <p>Delete “${titleOf(one)}”? This cannot be undone.</p>
      <div class="bar">
        ${button("Delete", () => this.remove(one, dialog), { class: "danger" })}
        ${quietButton("Keep it", () => dialog.close())}
      </div>
    </dialog>`;
    document.body.append(dialog);
    dialog.showModal();
  }

  async remove({ session_id: id }, dialog) {
    dialog.close();
    try {
      await deleteSession(id);
      this.all = this.all.filter((one) => one.session_id !== id);
      this.draw();
      if (id === this.open) this.on.open(undefined);
    } catch (error) {
      this.on.problem(error);
    }
  }
}

const titleOf = ({ title, session_id }) => title || `Conversation ${session_id.slice(0, 8)}`;
