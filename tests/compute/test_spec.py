"""A config.json means to zrt what it means to transformers."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.families import FAMILIES
from zrt.runtime.models.architecture.rope_spec import Rope
from zrt.runtime.models.architecture.spec import BlockSpec, ModelSpec, read_spec, spec_from_config
from zrt.runtime.models.checkpoint.layout import HEAD, shard_shapes

SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "pad_token_id": 0,
}
REQUIRED = [key for key in SIZES if key != "pad_token_id"]
WINDOWS = {"use_sliding_window": True, "sliding_window": 64}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, grouped": ("llama", {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "eos_token_id": [5, 6]}),
    "llama, theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama, no end": ("llama", {"eos_token_id": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 77}),
    "mistral, window": ("mistral", {"sliding_window": 64, "head_dim": 8}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, grouped": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1}),
    "qwen2, windows for no layer": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2, windows for some layers": ("qwen2", WINDOWS | {"max_window_layers": 1}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "eos_token_id": 9}),
    "qwen3, windows by layer": (
        "qwen3",
        WINDOWS | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "smollm3, rope by layer": (
        "smollm3",
        {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False, "mlp_bias": True},
    ),
    "smollm3, rope by interval": ("smollm3", {"no_rope_layer_interval": 2} | WINDOWS),
    "olmo2, biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 8}),
    "granite, multipliers": (
        "granite",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
        },
    ),
    "phi3, window": ("phi3", {"sliding_window": 64, "num_key_value_heads": 8}),
    "phi3, partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "gemma2, small": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "final_logit_softcapping": None}),
    "gemma2, windows by layer": (
        "gemma2",
        {"head_dim": 16, "layer_types": ["full_attention"] * 3, "attention_bias": True},
    ),
    "gemma3, small": ("gemma3_text", {"head_dim": 16, "sliding_window": 64, "final_logit_softcapping": 20.0}),
    "gemma3, windows by layer": (
        "gemma3_text",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}
# As older tools wrote them, with keys absent or null.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{family}, sizes alone": (family, {}) for family in FAMILIES},
    "llama, nulls": ("llama", {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}),
    "llama, theta beside": ("llama", {"rope_theta": 500000.0, "rope_scaling": None}),
    "llama, theta beside a default scaling": ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "default"}}),
    "llama, theta in both": ("llama", {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 70000.0}}),
    "qwen2, integer theta": ("qwen2", {"rope_theta": 1000000, "use_sliding_window": False, "sliding_window": None}),
    "qwen2, window null": ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    "qwen3, full layers": ("qwen3", {"layer_types": ["full_attention"] * 3, "num_key_value_heads": None}),
    "gemma3, two thetas beside": ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4}),
    "gemma3, pattern and scaling": (
        "gemma3_text",
        {"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}


def _expected(config: PretrainedConfig) -> ModelSpec:
    """The same features, as the model that transformers makes of the config shows them."""
    model = AutoModelForCausalLM.from_config(config)
    decoder, layer, attention = model.model, model.model.layers[0], model.model.layers[0].self_attn
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    activation = getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn
    eos = config.eos_token_id
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_blocks=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=(attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj).bias is not None,
        o_bias=attention.o_proj.bias is not None,
        mlp_bias=layer.mlp.down_proj.bias is not None,
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        init_range=config.initializer_range,
        blocks=tuple(_block(config, block.self_attn, head_dim) for block in decoder.layers),
        attention_scale=attention.scaling,
        fused=hasattr(attention, "qkv_proj"),
        norms=FAMILIES[
            config.model_type
        ].norms,  # their tensors are compared below, their places by the parity of logits
        wide_norms=_weighs_before_rounding(decoder.norm),
        norms_plus_one=not decoder.norm.weight.any(),
        qk_norm=_qk_norm(attention, head_dim),
        activation="silu" if torch.equal(activation(PROBE), torch.nn.functional.silu(PROBE)) else "gelu_tanh",
        embedding_scale=getattr(
            decoder.embed_tokens, "scalar_embed_scale", getattr(decoder, "embedding_multiplier", 1.0)
        ),
        embedding_scale_rounds=hasattr(decoder.embed_tokens, "scalar_embed_scale"),
        residual_scale=getattr(layer, "residual_multiplier", 1.0),
        attention_softcap=getattr(attention, "attn_logit_softcapping", None),
        logits_divisor=getattr(config, "logits_scaling", 1.0),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


PROBE = torch.randn(128, generator=torch.Generator().manual_seed(0))


def _block(config: PretrainedConfig, attention: torch.nn.Module, head_dim: int) -> BlockSpec:
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    table = config.rope_parameters
    table = table.get("full_attention" if window is None else "sliding_attention", table)
    dim = int(head_dim * table.get("partial_rotary_factor", 1.0))
    rope = Rope(table["rope_type"], table["rope_theta"], dim, factor=table.get("factor", 1.0))
    return BlockSpec(window, rope if getattr(attention, "use_rope", True) else None)


def _weighs_before_rounding(norm: torch.nn.Module) -> bool:
    x, weight = PROBE.bfloat16(), (norm.weight + PROBE.abs()).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean() + 1e-6)
    norm = deepcopy(norm).bfloat16()
    norm.weight.data = weight
    return not torch.equal(norm(x), normed.bfloat16() * weight)


def _qk_norm(attention: torch.nn.Module, head_dim: int) -> str | None:
    if not hasattr(attention, "q_norm"):
        return None
    return "head" if len(attention.q_norm.weight) == head_dim else "width"


@pytest.mark.parametrize(("family", "keys"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_saved_by_transformers_is_read_as_transformers_reads_it(family, keys, tmp_path) -> None:
    AutoConfig.for_model(family, **SIZES | keys).save_pretrained(tmp_path)
    assert read_spec(tmp_path) == _expected(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(("family", "keys"), WRITTEN.values(), ids=WRITTEN.keys())
def test_absent_keys_mean_what_transformers_takes_them_to_mean(family, keys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": family} | keys))
    assert read_spec(tmp_path) == _expected(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(("family", "keys"), CONFIGS.values(), ids=CONFIGS.keys())
def test_the_tensors_of_a_model_are_those_that_transformers_saves(family, keys, tmp_path) -> None:
    config = AutoConfig.for_model(family, **SIZES | keys)
    config.save_pretrained(tmp_path)
    wanted = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        del wanted[HEAD]
    assert shard_shapes(read_spec(tmp_path), 0, 2) == wanted


def test_the_table_of_families_names_model_types_that_transformers_knows() -> None:
    assert set(FAMILIES) <= set(CONFIG_MAPPING)


ROPE_TYPES = "is not one of default, linear, dynamic, llama3, yarn, longrope"
UNSUPPORTED = {
    "another family": ({"model_type": "gpt2"}, f"model_type 'gpt2' is not one of {', '.join(FAMILIES)}"),
    "gemma3 with images": ({"model_type": "gemma3", "text_config": {}}, "'gemma3' is not one of .*, gemma3_text"),
    "no family": ({"model_type": None}, "model_type None"),
    "family of another type": ({"model_type": ["llama"]}, "model_type"),
    "another rope": ({"rope_parameters": {"rope_type": "proportional"}}, f"'proportional' {ROPE_TYPES}"),
    "another rope, older name": ({"rope_scaling": {"type": "mrope"}}, f"'mrope' {ROPE_TYPES}"),
    "a rope type that is none": ({"rope_scaling": {"rope_type": 3}}, f"3 {ROPE_TYPES}"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not 1"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer"),
    "dynamic rope of one pair": (
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        "a dynamic rope of 2 numbers",
    ),
    "another activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu"),
    "another activation of gemma": ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "attention both ways": (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "soft-caps of gemma3": (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping 50.0",
    ),
    "another kind of layer": ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
}


@pytest.mark.parametrize(("change", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_zrt_lacks_is_named_with_what_it_has(change, text) -> None:
    with pytest.raises(ZrtError, match=text) as caught:
        spec_from_config({"model_type": "llama"} | SIZES | change)
    assert caught.value.kind == "unsupported"


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1}
WRONG = {
    **{f"no {key}": ({key: ...}, key) for key in REQUIRED},
    "text for a size": ({"hidden_size": "128"}, "hidden_size is '128'"),
    "true for a size": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "zero for a size": ({"vocab_size": 0}, "vocab_size is 0"),
    "hidden not a multiple of heads": ({"hidden_size": 100}, "hidden_size 100 is not a multiple of 32 heads"),
    "heads not a multiple of kv heads": ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of 5"),
    "more heads than hidden": ({"hidden_size": 16}, "head_dim"),
    "odd head_dim": ({"head_dim": 7}, "head_dim 7 is odd"),
    "negative eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    "text for eps": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    "infinite theta": ({"rope_theta": float("inf")}, "rope_theta"),
    "text for theta": ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta"),
    "text for rope": ({"rope_parameters": "default"}, "rope_parameters is 'default'"),
    "text for a flag": ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    "text for eos": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "text among eos": ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    "zero for a factor": ({"rope_scaling": {"rope_type": "dynamic", "factor": 0}}, "rope_scaling.factor is 0"),
    "equal frequency factors": ({"rope_scaling": LLAMA3}, "high_freq_factor is 1; it must be greater"),
    "too few long factors": ({"rope_scaling": LONG | {"long_factor": [1.0]}}, "long_factor .* a list of 2 numbers"),
    "text among short factors": ({"rope_scaling": LONG | {"short_factor": [1.0, "x"]}}, "short_factor"),
    "half a pair rotated": ({"model_type": "phi3", "partial_rotary_factor": 0.3}, "an even part of 4 numbers"),
    "no layer of rope": ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is .* at least 3 numbers"),
    "text among layers of rope": ({"model_type": "smollm3", "no_rope_layers": ["1"] * 3}, "no_rope_layers"),
    "too few kinds of layer": ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "a list of 3 kinds"),
    "windows of no size": ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    "windows of size 0": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    "windows below 0 layers": ({"model_type": "qwen2", "max_window_layers": -1}, "max_window_layers is -1"),
    "one rope for gemma3": ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "full_attention"),
    "zero for a multiplier": ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0"),
    "text for a soft-cap": ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_missing_or_ill_typed_key_is_named(change, text) -> None:
    config = {key: value for key, value in ({"model_type": "llama"} | SIZES | change).items() if value is not ...}
    with pytest.raises(ZrtError, match=text) as caught:
        spec_from_config(config)
    assert caught.value.kind == "bad_model"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "there is no .*config.json"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["absent", "cut off", "a list", "not text", "too deep"],
)
def test_a_folder_without_a_readable_config_is_refused(content, text, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ZrtError, match=text) as caught:
        read_spec(tmp_path)
    assert caught.value.kind == "bad_model"


@pytest.mark.parametrize(
    "module",
    [
        "models.architecture.spec",
        "models.architecture.families",
        "models.architecture.rope_spec",
        "models.checkpoint.formats.registry",
        "models.checkpoint.layout",
        "models.checkpoint.split",
        "models.checkpoint.safetensors",
        "models.checkpoint.report",
        "compute.kv.page_pool",
        "compute.threads",
    ],
)
def test_the_pure_modules_import_no_torch(module) -> None:
    code = f"import sys, zrt.runtime.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
