"""Print what pyproject.toml asks for, one requirement a line: requirements.py EXTRA...

The package's own dependencies and those of the extras, with the extras that these name in turn.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
wanted = dict.fromkeys(project["dependencies"])
extras = sys.argv[1:]
for extra in extras:  # grows while it is read
    for requirement in project["optional-dependencies"][extra]:
        if own := re.fullmatch(r"kqview\[(.*)\]", requirement):
            extras += [one for one in own[1].split(",") if one not in extras]
        else:
            wanted[requirement] = None
print(*wanted, sep="\n")
