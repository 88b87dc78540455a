"""Rows of files to tokens in a memory-mapped cache."""
