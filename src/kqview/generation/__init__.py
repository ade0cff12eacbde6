"""One generation as Python sees it: its tokens, its text and how it ends."""
