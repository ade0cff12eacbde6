"""Adapters that make an engine a model of other libraries, which they import."""
