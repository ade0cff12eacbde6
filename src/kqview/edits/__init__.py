"""Edits: act on the attention and the activations of one request while the model runs."""

from kqview.edits.edit import Edit, EditTarget, listed, plan_of
from kqview.edits.patching import patch
from kqview.edits.vectors import ControlVector, vector

__all__ = ["ControlVector", "Edit", "EditTarget", "listed", "patch", "plan_of", "vector"]
