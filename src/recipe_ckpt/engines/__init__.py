"""Engines: what is trained, and how its tensors get to disk and back."""
