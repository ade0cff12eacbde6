"""Client packages of others against a real server; `python -m tests.clients` runs all of them."""
