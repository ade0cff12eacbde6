"""The trace of a request: its events, calls of mods, logs and actions, as data and as JSON.

The JSON is Thunder's ingest format. `Engine.generate` makes traces, see `Generation.trace`;
`kqview ingest` stores and shows them.
"""

from typing import TYPE_CHECKING

from kqview.trace.record import (
    ModCall as ModCall,
    ModLog as ModLog,
    Trace as Trace,
    TraceAction as TraceAction,
    TraceEvent as TraceEvent,
    TraceRequest as TraceRequest,
)
from kqview.trace.recorder import TraceRecorder as TraceRecorder
from kqview.trace.replay import final_ids as final_ids

if TYPE_CHECKING:
    from kqview.trace.post import Poster as Poster, PosterStats as PosterStats


def __getattr__(name: str) -> object:
    # Few programs post traces, and HTTP and TLS take a while to import.
    if name in ("Poster", "PosterStats"):
        from kqview.trace import post

        return getattr(post, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
