"""A generation in Python: its tokens, its text, and how it ends."""
