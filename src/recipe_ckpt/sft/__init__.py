"""The reference recipe: supervised fine-tuning of causal language models."""
