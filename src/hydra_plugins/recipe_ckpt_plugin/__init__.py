"""What Hydra finds of this package by itself."""
