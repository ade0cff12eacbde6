"""Heads: which attention heads of a model do a task, measured, kept in a small file, and applied.

`HeadFile` is the file, `calibrate` makes one, `kqview.guards` uses it. The shared steps, from spans
of a prompt to a number for each head, are in `kqview.heads.measures`.
"""

from kqview.heads.calibration import calibrate
from kqview.heads.examples import TASKS, Task, made_examples, read_examples
from kqview.heads.file import Figure, Head, HeadFile, HeadFileWarning, ModelKey

__all__ = [
    "TASKS",
    "Figure",
    "Head",
    "HeadFile",
    "HeadFileWarning",
    "ModelKey",
    "Task",
    "calibrate",
    "made_examples",
    "read_examples",
]
