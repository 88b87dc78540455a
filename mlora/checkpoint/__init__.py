"""Adapters on disk, in PEFT's form."""
