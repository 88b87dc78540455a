"""Arithmetic that is the same bits for a sample whoever its neighbours are."""
