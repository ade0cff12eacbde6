"""The models that are served: their engines, slots and sessions, and what runs on them."""
