"""Heads: which attention heads of a model do a task, measured, kept in a small file, and applied.

`HeadFile` is the file, `calibrate` makes one, `kqview.guards` uses it. The shared steps, from spans
of a prompt to a number for each head, are in `kqview.heads.measures`.
"""

from kqview.heads.calibration import calibrate as calibrate
from kqview.heads.examples import (
    TASKS as TASKS,
    Task as Task,
    made_examples as made_examples,
    read_examples as read_examples,
)
from kqview.heads.file import (
    Figure as Figure,
    Head as Head,
    HeadFile as HeadFile,
    HeadFileWarning as HeadFileWarning,
    ModelKey as ModelKey,
)
