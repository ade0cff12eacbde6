"""llama.cpp's log lines, handed to ``logging.getLogger("kqview.llama")``."""

import logging

from kqview import _core

_logger = logging.getLogger("kqview.llama")


def forward_log() -> None:
    """Hand over what llama.cpp has logged since the last call; any thread."""
    for level, text in _core.drain_log():
        _logger.log(level, "%s", text)
