"""What edits are for: directions of the residual stream, and patching of heads."""

from kqview.edits.patching import patch as patch
from kqview.edits.vectors import ControlVector as ControlVector, vector as vector
