"""Items of a response as it grows, with the events that tell a client so. Pure."""

import uuid
from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]


class Items:
    """The output of a response; one item is open at a time, and each change returns its events.

    Events have no ``sequence_number`` yet.
    """

    def __init__(self) -> None:
        self.output: list[Object] = []
        """Finished items, and the open one as it was when it was opened."""
        self._open: str | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Object] = []

    def think(self, text: str) -> list[Object]:
        """More of what the model thinks."""
        events = self._turn_to("reasoning", "rs", summary=[], content=[])
        if not self._pieces:
            events.append(self._event("content_part.added", part=_thought(""), content_index=0))
        self._pieces.append(text)
        return [*events, self._event("reasoning_text.delta", delta=text, content_index=0)]

    def write(self, text: str, logprobs: Sequence[Object] = ()) -> list[Object]:
        """More of the answer's text, with the logprobs of its tokens."""
        events = self._turn_to("message", "msg", role="assistant", content=[])
        if not self._pieces:
            events.append(self._event("content_part.added", part=_text("", []), content_index=0))
        self._pieces.append(text)
        self._logprobs += logprobs
        delta: Object = {"delta": text, "logprobs": [*logprobs], "content_index": 0}
        return [*events, self._event("output_text.delta", **delta)]

    def call(self, call_id: str, name: str) -> list[Object]:
        """A tool is called."""
        fields = {"call_id": call_id, "name": name, "arguments": ""}
        return [*self.close("completed"), *self._turn_to("function_call", "fc", **fields)]

    def argue(self, text: str) -> list[Object]:
        """More of the JSON of the open call's arguments."""
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, status: str) -> list[Object]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        kind, whole = self._open, "".join(self._pieces)
        item: Object = {**self.output[-1], "status": status}
        events: list[Object] = []
        if kind == "function_call":
            item["arguments"] = whole
            events.append(
                self._event("function_call_arguments.done", arguments=whole, name=item["name"])
            )
        elif self._pieces:
            part = _thought(whole) if kind == "reasoning" else _text(whole, self._logprobs)
            item["content"] = [part]
            done: Object = {"text": whole, "content_index": 0}
            if kind == "reasoning":
                events.append(self._event("reasoning_text.done", **done))
            else:
                events.append(self._event("output_text.done", **done, logprobs=self._logprobs))
            events.append(self._event("content_part.done", part=part, content_index=0))
        self._open, self._pieces, self._logprobs = None, [], []
        self.output[-1] = item
        return [*events, self._event("output_item.done", item=item, is_about_item=False)]

    def _turn_to(self, kind: str, prefix: str, **fields: Any) -> list[Object]:
        if self._open == kind:
            return []
        closed = self.close("completed")
        self._open = kind
        item = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        self.output.append({**item, **fields})
        event = self._event("output_item.added", item=self.output[-1], is_about_item=False)
        return [*closed, event]

    def _event(self, kind: str, *, is_about_item: bool = True, **fields: Any) -> Object:
        event = {"type": f"response.{kind}", "output_index": len(self.output) - 1, **fields}
        if is_about_item:
            event["item_id"] = self.output[-1]["id"]
        return event


def _text(text: str, logprobs: list[Object]) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought(text: str) -> Object:
    return {"type": "reasoning_text", "text": text}
