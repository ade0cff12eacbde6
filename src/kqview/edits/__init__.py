"""Edits: act on the attention and the activations of one request while the model runs."""

from kqview.edits.edit import Edit, EditTarget, listed, plan_of

__all__ = ["Edit", "EditTarget", "listed", "plan_of"]
