"""Tensors on disk: sharded safetensors with local plans."""
