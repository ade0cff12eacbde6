"""KoboldAI's API with attention, and the routes that KoboldCpp's clients expect beside it."""
