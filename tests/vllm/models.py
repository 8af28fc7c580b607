"""A model that needs no download: a configuration file; weights, where asked for, are dummies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_tiny_llama(folder: Path, **changes: Any) -> Path:
    """A Llama of 4 layers, 2 KV heads of 32, for `load_format="dummy"`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
