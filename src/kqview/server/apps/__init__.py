"""Applications on top of the APIs: MIA4's front, its conversations."""
