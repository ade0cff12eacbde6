"""OpenAI's API: models, chat completions, completions, embeddings; and attention through them."""
