"""Tiny models that between them have every feature of every family, for comparison with
transformers, in tests and in docs/models.md."""

from pathlib import Path
from typing import Any, NamedTuple

TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 16
ORIGINAL = 32  # positions a stretched rope was made for
SHORT_PROMPT = [1, 17, 93, 4, 150, 62, 62, 8, 31, 120, 5]  # within both; 64 tokens more are beyond both
LONG_PROMPT = [5 + 7 * token * token % 143 for token in range(50)]  # beyond both

_LONG = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL}
_LONG |= {"short_factor": [1 + pair / 10 for pair in range(8)], "long_factor": [2.0 + pair for pair in range(8)]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}


class Tiny(NamedTuple):
    """One tiny model: its family, keys of its config beside those every tiny model has, and its
    features in words."""

    family: str
    config: dict[str, Any]
    features: str
    stretched: bool = (
        False  # windows, or a rope for more positions than the model was made for: a long prompt is another matter
    )


MODELS = {
    "llama": Tiny("llama", {}, "grouped-query attention"),
    "llama-biases": Tiny("llama", {"attention_bias": True, "mlp_bias": True}, "every bias"),
    "llama-wide-heads": Tiny("llama", {"head_dim": 24}, "heads wider than hidden / heads"),
    "llama-one-kv-head": Tiny("llama", {"num_key_value_heads": 1}, "one kv head"),
    "llama-all-kv-heads": Tiny("llama", {"num_key_value_heads": 4}, "as many kv heads as heads"),
    "llama-odd": Tiny("llama", {"vocab_size": 157, "rope_theta": 5e5}, "odd vocabulary, another rope base"),
    "llama-linear": Tiny("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "linear rope"),
    "llama-dynamic": Tiny(
        "llama",
        {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
        "dynamic NTK rope",
        True,
    ),
    "llama-llama3": Tiny(
        "llama",
        {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": ORIGINAL}},
        "llama3 rope",
        True,
    ),
    "llama-yarn": Tiny(
        "llama",
        {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16}},
        "yarn rope: mscale, untruncated",
        True,
    ),
    "llama-longrope": Tiny("llama", {"rope_parameters": _LONG | {"factor": 4.0}}, "longrope", True),
    "mistral": Tiny("mistral", {"sliding_window": WINDOW}, "sliding window", True),
    "mistral-full": Tiny("mistral", {"sliding_window": None, "head_dim": 24}, "no window, wide heads"),
    "qwen2": Tiny("qwen2", {}, "q, k, v biases"),
    "qwen2-narrow-heads": Tiny("qwen2", {"head_dim": 8}, "heads narrower than hidden / heads"),
    "qwen2-windows": Tiny("qwen2", _QWEN_WINDOW | {"max_window_layers": 2}, "windows in the last layers", True),
    "qwen2-yarn": Tiny("qwen2", {"rope_parameters": _YARN}, "yarn rope", True),
    "qwen3": Tiny("qwen3", {"head_dim": 16}, "q/k norm"),
    "qwen3-biases": Tiny("qwen3", {"head_dim": 32, "attention_bias": True}, "q/k norm, biases, wide heads"),
    "qwen3-windows": Tiny(
        "qwen3",
        _QWEN_WINDOW | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "windows by layer_types",
        True,
    ),
    "smollm3": Tiny("smollm3", {}, "every 4th layer without rope"),
    "smollm3-windows": Tiny(
        "smollm3",
        {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW, "attention_bias": True},
        "layers without rope by a list, windows in them, biases",
        True,
    ),
    "olmo2": Tiny("olmo2", {}, "norms after attention and MLP, q/k norm over all heads"),
    "olmo2-biases": Tiny("olmo2", {"attention_bias": True, "num_key_value_heads": 4}, "the same, with biases"),
    "granite": Tiny(
        "granite",
        {
            "embedding_multiplier": 3.3,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.7,
            "mlp_bias": True,
        },
        "embedding, residual, attention and logits multipliers",
    ),
    "phi3": Tiny("phi3", {"sliding_window": WINDOW}, "fused q, k, v and gate, up; sliding window", True),
    "phi3-partial": Tiny("phi3", {"partial_rotary_factor": 0.5}, "half of each head is rotated"),
    "phi3-longrope": Tiny(
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": ORIGINAL},
        "longrope: the history is run again where it outgrows its short factors",
        True,
    ),
    "gemma2": Tiny(
        "gemma2",
        _GEMMA,
        "four norms of 1 + weight, tanh GELU, scaled embeddings, soft-caps, windows in every other layer",
        True,
    ),
    "gemma2-uncapped": Tiny(
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        "without soft-caps, with biases",
        True,
    ),
    "gemma3": Tiny(
        "gemma3_text",
        _GEMMA
        | {
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "as gemma2, with q/k norm, another rope base where there is a window, no soft-caps",
        True,
    ),
}


def save_model(folder: Path, family: str, config: dict[str, Any], seed: int, dtype: str, files: int) -> None:
    """Write config.json and safetensors of a random model; `files` > 1 writes indexed shards.

    Weights are random everywhere (norms around 1, biases away from 0), so that no part of a model
    can be left out unnoticed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                center = float(parameter.detach().mean())  # the family's own: 1, or 0 where 1 is added to the weight
                torch.nn.init.uniform_(parameter, center - 0.2, center + 0.2)
            elif name.endswith("bias"):
                torch.nn.init.uniform_(parameter, -0.2, 0.2)
    model.to(getattr(torch, dtype))
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size + 1 if files == 1 else size // files)


def reference(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """Return transformers' greedy ids."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    generated: list[int] = ids[0, len(prompt) :].tolist()
    return generated
