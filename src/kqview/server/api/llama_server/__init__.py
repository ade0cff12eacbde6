"""The API of llama.cpp's server, so that its clients work without a change."""
