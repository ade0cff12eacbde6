"""Executes a notebook: ``python -m tests.support.notebook NOTEBOOK RESULT``.

In a process of its own, so that neither the kernel's client nor its warnings meet those of tests.
The folder of RESULT is the working folder, and holds all that Jupyter writes. The kernel is this
Python.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STARTS_WITHIN_S = 300
CELL_ENDS_WITHIN_S = 300


def main(source: str, result: str) -> None:
    """Execute the notebook *source*, and write it with its outputs to *result*."""
    folder = Path(result).resolve().parent
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        os.environ[name] = str(folder / name.lower())
    # The kernel's own ports are on loopback, as Jupyter's default is.
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        startup_timeout=STARTS_WITHIN_S,
        timeout=CELL_ENDS_WITHIN_S,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    nbformat.write(notebook, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
