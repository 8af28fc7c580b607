"""Writes the demo's model: a tiny Llama with random weights and a tokenizer of single bytes.

The weights are made so that the comparison of answers means something. Attention is sharp enough
that single blocks of the context decide what comes next, and float32 keeps the noise of other
batch shapes orders of magnitude below the distance between the two best tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

BYTES = 256
BOS, EOS = 256, 257
VOCAB = 258


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the demo's Llama. `head_size` is one that vLLM's CPU attention has kernels for."""

    layers: int = 4
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    max_positions: int = 2048

    def kv_block_nbytes(self, block_size: int) -> int:
        """Bytes of KV that one block of `block_size` tokens takes over all layers (float32)."""
        return self.layers * 2 * self.kv_heads * self.head_size * block_size * 4


@dataclass(frozen=True, slots=True)
class Scales:
    """Standard deviations of the random weights, as multiples of 1/sqrt(inputs)."""

    query_key: float = 2.0
    value: float = 1.0
    attention_out: float = 1.5
    mlp: float = 1.0
    embedding: float = 1.0
    head: float = 1.0


def write_model(
    folder: Path,
    *,
    seed: int = 7,
    shape: ModelShape | None = None,
    scales: Scales | None = None,
) -> None:
    """Write config, weights and tokenizer into `folder`, which is made if it is not there.

    The same seed gives the same bytes on every machine. Raises OSError.
    """
    from safetensors.numpy import save_file

    shape = shape or ModelShape()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        weights(seed, shape, scales or Scales()),
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    _dump(folder / "config.json", _config(shape))
    _dump(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    _dump(folder / "tokenizer.json", _tokenizer())
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )


def weights(seed: int, shape: ModelShape, scales: Scales) -> dict[str, Array]:
    """Random weights under the names that a Llama checkpoint has."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float) -> Array:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return (values * np.float32(scale / columns**0.5)).astype(np.float32)

    def ones() -> Array:
        return np.ones(shape.hidden, dtype=np.float32)

    queries = shape.heads * shape.head_size
    keys = shape.kv_heads * shape.head_size
    out: dict[str, Array] = {
        "model.embed_tokens.weight": normal(VOCAB, shape.hidden, scales.embedding)
        * np.float32(shape.hidden**0.5)
    }
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = ones()
        out[at + "self_attn.q_proj.weight"] = normal(queries, shape.hidden, scales.query_key)
        out[at + "self_attn.k_proj.weight"] = normal(keys, shape.hidden, scales.query_key)
        out[at + "self_attn.v_proj.weight"] = normal(keys, shape.hidden, scales.value)
        out[at + "self_attn.o_proj.weight"] = normal(shape.hidden, queries, scales.attention_out)
        out[at + "post_attention_layernorm.weight"] = ones()
        out[at + "mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden, scales.mlp)
        out[at + "mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden, scales.mlp)
        out[at + "mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate, scales.mlp)
    out["model.norm.weight"] = ones()
    out["lm_head.weight"] = normal(VOCAB, shape.hidden, scales.head)
    return out


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _tokenizer() -> dict[str, Any]:
    """A byte-level vocabulary without merges: every byte of the text is one token, its value."""
    special = [("<bos>", BOS), ("<eos>", EOS)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, number in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _byte_names(),
            "merges": [],
        },
    }


def _byte_names() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes, each with the byte's value.

    Bytes that print in Latin-1 stand for themselves; the others take the characters from 256 on,
    in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names: dict[str, int] = {}
    spare = BYTES
    for byte in range(BYTES):
        if byte in printable:
            names[chr(byte)] = byte
        else:
            names[chr(spare)] = byte
            spare += 1
    return names


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
