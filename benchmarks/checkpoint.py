"""Writes a random-weight Llama checkpoint with a tokenizer, for speed only: every engine can load it, its output is meaningless."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

# About 207 M parameters: small enough for a laptop core, large enough to live in memory and not in a cache.
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2816,
}


def write(folder: Path, dtype: torch.dtype) -> Path:
    """The checkpoint of SHAPE in `folder`, written unless it is there."""
    if (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SHAPE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"})
    )
    save_file(dict(_tensors(dtype)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def parameters_read() -> int:
    """Weights that a decode step reads: all but the embedding table."""
    return sum(tensor.numel() for name, tensor in _tensors(torch.float32) if "embed" not in name)


def _tensors(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden, wide, size = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).to(dtype)

    tensors = [("model.embed_tokens.weight", matrix(SHAPE["vocab_size"], hidden))]
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors += [
            (f"{prefix}.self_attn.q_proj.weight", matrix(heads * size, hidden)),
            (f"{prefix}.self_attn.k_proj.weight", matrix(kv_heads * size, hidden)),
            (f"{prefix}.self_attn.v_proj.weight", matrix(kv_heads * size, hidden)),
            (f"{prefix}.self_attn.o_proj.weight", matrix(hidden, heads * size)),
            (f"{prefix}.mlp.gate_proj.weight", matrix(wide, hidden)),
            (f"{prefix}.mlp.up_proj.weight", matrix(wide, hidden)),
            (f"{prefix}.mlp.down_proj.weight", matrix(hidden, wide)),
            (f"{prefix}.input_layernorm.weight", torch.ones(hidden, dtype=dtype)),
            (f"{prefix}.post_attention_layernorm.weight", torch.ones(hidden, dtype=dtype)),
        ]
    return [
        *tensors,
        ("model.norm.weight", torch.ones(hidden, dtype=dtype)),
        ("lm_head.weight", matrix(SHAPE["vocab_size"], hidden)),
    ]
