"""The bundled demo model, which `Engine.demo` opens, and a prompt that suits it.

It is a Llama model with 1.2 million weights that tells short stories; ``vendor/demo`` in the
repository contains its training code.
"""

from pathlib import Path
from typing import Final

MODEL_PATH: Final = Path(__file__).parent / "model.gguf"

# Its names and its town do not occur in the training data; the continuation repeats them.
PROMPT: Final = (
    "Mirelda the baker lived in the village of Tavendale. One morning, Mirelda found a silver key "
    "near the old bridge. Then Oskarin came to the bridge too."
)
