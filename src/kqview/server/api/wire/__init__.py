"""What the dialects share on the wire: fields of requests, attention, parts of events."""
