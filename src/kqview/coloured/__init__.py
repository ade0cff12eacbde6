"""Tokens coloured by attention: what pictures are drawn from, and their HTML."""
