"""Saved slots: what is in a SES1 blob, files of them, and named sessions.

`Slot.save` and `Slot.restore` make and take the blobs; the checks that guard a restore are in the
core (``cpp/state``).
"""

from kqview.state.files import read_state, write_state
from kqview.state.ses1 import SavedState, inspect
from kqview.state.store import SessionInfo, SessionStore

__all__ = [
    "SavedState",
    "SessionInfo",
    "SessionStore",
    "inspect",
    "read_state",
    "write_state",
]
