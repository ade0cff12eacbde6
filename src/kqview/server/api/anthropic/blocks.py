"""Blocks of an answer as it grows, with the events that tell a client so. Pure."""

from typing import Any

import msgspec

from kqview.server.api.anthropic import schema

Object = dict[str, Any]


class Blocks:
    """The content of an answer; one block is open at a time, and each change returns its events."""

    def __init__(self) -> None:
        self.content: list[schema.TextBlock | schema.ThinkingBlock | schema.ToolUseBlock] = []
        self._open: str | None = None
        self._pieces: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether the model calls a tool."""
        return any(isinstance(block, schema.ToolUseBlock) for block in self.content)

    def think(self, text: str) -> list[Object]:
        """More of what the model thinks."""
        opened = self._turn_to("thinking", schema.ThinkingBlock(""))
        return [*opened, self._delta("thinking_delta", "thinking", text)]

    def write(self, text: str) -> list[Object]:
        """More of the answer's text."""
        opened = self._turn_to("text", schema.TextBlock(""))
        return [*opened, self._delta("text_delta", "text", text)]

    def call(self, id_: str, name: str) -> list[Object]:
        """A tool is called."""
        return [*self.close(), *self._turn_to("tool_use", schema.ToolUseBlock(id_, name, {}))]

    def argue(self, text: str) -> list[Object]:
        """More of the JSON of the open call's arguments."""
        return [self._delta("input_json_delta", "partial_json", text)]

    def close(self) -> list[Object]:
        """End the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        whole = "".join(self._pieces)
        self._pieces.clear()
        events: list[Object] = []
        match self.content[-1]:
            case schema.TextBlock() as block:
                block.text = whole
            case schema.ThinkingBlock() as block:
                block.thinking = whole
                events.append(self._event("content_block_delta", delta=_NO_SIGNATURE))
            case schema.ToolUseBlock() as block:
                block.input = _input(whole)
        return [*events, self._event("content_block_stop")]

    def _turn_to(
        self, kind: str, block: schema.TextBlock | schema.ThinkingBlock | schema.ToolUseBlock
    ) -> list[Object]:
        if self._open == kind:
            return []
        closed = self.close()
        self._open = kind
        self.content.append(block)
        started = msgspec.to_builtins(block)
        return [*closed, self._event("content_block_start", content_block=started)]

    def _delta(self, kind: str, name: str, text: str) -> Object:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _event(self, kind: str, **fields: Any) -> Object:
        return {"type": kind, "index": len(self.content) - 1, **fields}


_NO_SIGNATURE = {"type": "signature_delta", "signature": ""}


def _input(text: str) -> Object:
    """Arguments as an object; none if the JSON was cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=Object)
    except msgspec.DecodeError:
        return {}
