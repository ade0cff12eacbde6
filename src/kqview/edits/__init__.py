"""What edits are for: directions of the residual stream, and patching of heads."""

from kqview.edits.patching import patch
from kqview.edits.vectors import ControlVector, vector

__all__ = ["ControlVector", "patch", "vector"]
