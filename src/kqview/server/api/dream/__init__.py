"""The dream dialect, with the ``POST /api/v1/generate`` that KoboldAI's API shares."""
