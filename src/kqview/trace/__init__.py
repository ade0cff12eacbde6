"""The trace of a request: its events, calls of mods, logs and actions, as data and as JSON.

The JSON is Thunder's ingest format. `Engine.generate` makes traces, see `Generation.trace`;
`kqview ingest` keeps and shows them.
"""

from kqview.trace.record import (
    ModCall,
    ModLog,
    Trace,
    TraceAction,
    TraceEvent,
    TraceRequest,
)
from kqview.trace.recorder import TraceRecorder
from kqview.trace.replay import final_ids

__all__ = [
    "ModCall",
    "ModLog",
    "Trace",
    "TraceAction",
    "TraceEvent",
    "TraceRecorder",
    "TraceRequest",
    "final_ids",
]
