"""A backend for kqview: one library, which kqview loads when it first asks for devices."""
