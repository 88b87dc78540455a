"""Stages of the frozen model and the actions that run on them."""
