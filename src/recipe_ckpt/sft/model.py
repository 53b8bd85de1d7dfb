"""Causal language models and their tokenizers, from a config or a local folder. Nothing is downloaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from recipe_ckpt.errors import ConfigError


class LanguageModel(NamedTuple):
    model: nn.Module
    tokenizer: Any


def build_tiny(*, hidden_size: int, num_layers: int, num_heads: int, attention_dropout: float, dtype: str) -> LanguageModel:
    """Build a small Llama over bytes, with weights from torch's global generator."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        attention_dropout=attention_dropout,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=False,
    )
    return LanguageModel(LlamaForCausalLM(shape).to(getattr(torch, dtype)), tokenizer)


def build_hf(*, path: str, dtype: str) -> LanguageModel:
    """Load a folder in the Hugging Face format.

    Raises:
        ConfigError: the folder has no model or no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.path", path, "a folder with a causal language model and its tokenizer", str(error)
        ) from error
    return LanguageModel(model, tokenizer)
