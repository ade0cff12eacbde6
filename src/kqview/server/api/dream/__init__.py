"""The dream dialect: seed 001's API, and ``POST /api/v1/generate`` that two protocols share."""
