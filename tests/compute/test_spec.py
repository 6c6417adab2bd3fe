"""A config.json means to zrt what it means to transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from zrt.runtime.compute.spec import ModelSpec, read_spec, spec_from_config
from zrt.runtime.errors import ZrtError

SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, grouped": LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, eos_token_id=[5, 6]),
    "llama, theta": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama, no end": LlamaConfig(**SIZES, eos_token_id=None, rms_norm_eps=1e-5, max_position_embeddings=77),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, grouped": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1),
    "qwen2, windows for no layer": Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=3),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3, biases": Qwen3Config(**SIZES, attention_bias=True, head_dim=64, num_key_value_heads=8, eos_token_id=9),
}
# As older tools wrote them, with keys absent or null.
WRITTEN: dict[str, dict[str, Any]] = {
    "llama, sizes alone": {"model_type": "llama"},
    "qwen2, sizes alone": {"model_type": "qwen2"},
    "qwen3, sizes alone": {"model_type": "qwen3"},
    "llama, nulls": {"model_type": "llama", "num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
    "llama, theta beside": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": None},
    "llama, theta beside a default scaling": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"type": "default"},
    },
    "llama, theta in both": {"model_type": "llama", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 70000.0}},
    "qwen2, integer theta": {
        "model_type": "qwen2",
        "rope_theta": 1000000,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "qwen2, window null": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": None,
        "max_window_layers": 0,
    },
    "qwen3, full layers": {"model_type": "qwen3", "layer_types": ["full_attention"] * 3, "num_key_value_heads": None},
}


def _expected(config: PretrainedConfig) -> ModelSpec:
    """The same features, as transformers' configuration and model classes understand them."""
    family = config.model_type
    eos = config.eos_token_id
    return ModelSpec(
        model_type=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_blocks=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        qkv_bias=True if family == "qwen2" else config.attention_bias,
        o_bias=False if family == "qwen2" else config.attention_bias,
        mlp_bias=config.mlp_bias if family == "llama" else False,
        qk_norm=family == "qwen3",
        tied=config.tie_word_embeddings,
        max_positions=config.max_position_embeddings,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        init_range=config.initializer_range,
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_saved_by_transformers_is_read_as_transformers_reads_it(config, tmp_path) -> None:
    config.save_pretrained(tmp_path)
    assert read_spec(tmp_path) == _expected(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN.keys())
def test_absent_keys_mean_what_transformers_takes_them_to_mean(written, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | written))
    assert read_spec(tmp_path) == _expected(AutoConfig.from_pretrained(tmp_path))


UNSUPPORTED = {
    "another family": ({"model_type": "gpt2"}, "'gpt2' is not one of llama, qwen2, qwen3"),
    "no family": ({"model_type": None}, "model_type None"),
    "family of another type": ({"model_type": ["llama"]}, "model_type"),
    "scaled rope": ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'llama3' is not one of default"),
    "scaled rope, older name": ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not one of default"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer"),
    "another activation": ({"hidden_act": "gelu"}, "'gelu' is not one of silu"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "windows": ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
    "windows by layer": ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "sliding-window"),
}


@pytest.mark.parametrize(("change", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_zrt_lacks_is_named_with_what_it_has(change, text) -> None:
    with pytest.raises(ZrtError, match=text) as caught:
        spec_from_config({"model_type": "llama"} | SIZES | change)
    assert caught.value.kind == "unsupported"


WRONG = {
    **{f"no {key}": ({key: ...}, key) for key in SIZES},
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
        (None, "No such file"),
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


@pytest.mark.parametrize("module", ["spec", "layout", "headers", "pages", "batch", "threads"])
def test_the_pure_modules_import_no_torch(module) -> None:
    code = f"import sys, zrt.runtime.compute.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
