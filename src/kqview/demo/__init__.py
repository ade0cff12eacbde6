"""The bundled demo model, which `Engine.demo` opens, and a prompt that suits it.

It is a llama of 1.2 million weights that tells small stories; ``vendor/demo`` in the repository
trains it.
"""

from pathlib import Path
from typing import Final

MODEL_PATH: Final = Path(__file__).parent / "model.gguf"

# Its names and its town were never seen in training; the continuation names them again.
PROMPT: Final = (
    "Mirelda the baker lived in the village of Tavendale. One morning, Mirelda found a silver key "
    "near the old bridge. Then Oskarin came to the bridge too."
)
