"""The bundled demo model: a tiny real llama, trained by this package's own script on text it
generates.

Owns the path of the model file and a prompt that suits it. `Engine.demo()` loads it; how it was
trained is in README.md beside this file.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model.gguf"

# Its names and its town were never seen in training; the continuation names them again.
PROMPT = (
    "Mirelda the baker lived in the village of Tavendale. One morning, Mirelda found a silver key "
    "near the old bridge. Then Oskarin came to the bridge too."
)
