"""Saved slots: reading SES1 blobs, state files, and named sessions.

`Slot.save` and `Slot.restore` write and load the blobs; the checks that protect a restore are in
the core (``cpp/state``).
"""

from kqview.state.files import read_state as read_state, write_state as write_state
from kqview.state.ses1 import SavedState as SavedState, inspect as inspect
from kqview.state.store import SessionInfo as SessionInfo, SessionStore as SessionStore
