"""OpenAI's Responses API: ``/v1/responses`` and ``/v1/responses/input_tokens``."""
