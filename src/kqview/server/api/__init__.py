"""Dialects: one folder each, with schema (typed bodies), convert (pure functions), routes (glue).

A dialect never imports another; names that two protocols share are in files beside the folders.
"""
