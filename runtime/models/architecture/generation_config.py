"""Sampling defaults that a model comes with: generation_config.json, and the ids that end an
answer. No torch.

Keys and their neutral values are those of transformers' GenerationConfig.
"""

from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.sampling import SAMPLING_OPTIONS, Sampling, SamplingOption
from zrt.runtime.model_files import find_model_file
from zrt.runtime.models.architecture.config_json import Keys, read_config
from zrt.runtime.text.tokenizer import Tokenizer

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "max_time": (),
    "stop_strings": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": (False,),
    "assistant_ensemble_weight": (0,),
    "is_assistant": (False,),
    "cache_implementation": (
        "dynamic",
        "static",
        "offloaded",
        "offloaded_static",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
        "sliding_window",
        "hybrid",
        "hybrid_chunked",
    ),
}
"""Keys that change an answer in transformers and not in zrt, each with the values that have no
effect (null never has an effect)."""

HARMLESS: Final = frozenset(
    {
        # about the file
        *("transformers_version", "_from_model_config", "_commit_hash"),
        # without effect unless `num_beams` is more than 1, which is said
        *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
        # where keys and values lie, and what is compiled
        *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory"),
        *("prefill_chunk_size", "continuous_batching_config"),
        # what is returned beside the tokens
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        # normalising logits moves all of them alike
        "renormalize_logits",
        # tokens of prompts that zrt's tokenizers write, or that fill up batches and encoders
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        # speculation, which only makes the same answer come faster
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "speculation_type", "use_mtp"),
    }
)
"""Keys of transformers that do not change an answer."""


class GenerationDefaults(Struct, frozen=True):
    """How the model is sampled where a request says nothing. Without `max_tokens` an answer may
    fill the context, or reach `max_length` tokens together with its prompt. `unheeded` names what
    the file asks for and zrt does not do, `unknown` the settings that transformers does not have
    either."""

    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    max_length: int | None = None
    unheeded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def length_limit(self, prompt: int, max_tokens: int | None, context: int) -> int:
        """Return the most tokens that prompt and answer may have together in a context of so many,
        by what the request says or else the file: as in transformers, a number of new tokens comes
        before one of all tokens."""
        new = self.max_tokens if max_tokens is None else max_tokens
        if new is not None:
            return min(context, prompt + new)
        return context if self.max_length is None else min(context, self.max_length)

    def notes(self) -> list[str]:
        """Return what people should be told of the file."""
        said = []
        if self.unheeded:
            said.append(f"the model's generation_config asks for {', '.join(self.unheeded)}, which zrt does not do")
        if self.unknown:
            said.append(f"the model's generation_config has {', '.join(self.unknown)}, which zrt does not know")
        return said


_STAGE_TYPES: Final = {field.name: field.type for field in fields(Sampling)}
_KEYS: Final = {option.name: option.generation_config for option in SAMPLING_OPTIONS if option.generation_config}
"""Options that the file may set, with its key for each."""


def _file_type(option: SamplingOption) -> Any:
    """Return the type of an option's value in the file: all values that the sampling stage takes,
    such as a top_p of 0."""
    if option.name == "max_tokens":
        return Annotated[int, Meta(ge=1, le=2**32 - 1)] | None
    return _STAGE_TYPES.get(option.name, option.type) | None


class _FileBase(Struct):
    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    max_length: Annotated[int, Meta(ge=1, le=2**32 - 1)] | None = None


_GenerationJson: Final = cast(
    type[_FileBase],
    msgspec.defstruct(
        "_GenerationJson",
        [(key, _file_type(option), None) for option in SAMPLING_OPTIONS if (key := option.generation_config)],
        bases=(_FileBase,),
        module=__name__,
    ),
)


FOLLOWED: Final = frozenset(_GenerationJson.__struct_fields__)
"""Keys that zrt follows."""


def eos_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return every id that ends an answer: the union of config.json, generation_config.json and the
    tokenizer.

    The three differ in practice: the tokenizer may name the end of a text and generation_config the
    end of a turn. Errors: bad_model.
    """
    ids = set(Keys(read_config(folder)).ids("eos_token_id", None))
    said = _read(folder / "generation_config.json", _GenerationJson).eos_token_id
    ids.update([said] if isinstance(said, int) else said or ())
    if tokenizer is not None and tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return frozenset(ids)


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the defaults in generation_config.json. As in transformers, a model without
    `do_sample` is greedy, and its top-k, top-p and min-p hold for requests that ask for a
    temperature. Errors: bad_model, also for a value out of range."""
    file = folder / "generation_config.json"
    said = _read(file, _GenerationJson)
    values = {name: value for name, key in _KEYS.items() if (value := getattr(said, key)) is not None}
    temperature = values.pop("temperature", 1.0)
    max_tokens = values.pop("max_tokens", None)
    sampling = Sampling(temperature=temperature if said.do_sample else 0.0, **values)
    settings = {key: value for key, value in _read(file, dict[str, Any]).items() if value is not None}
    unheeded = {key: value for key, value in settings.items() if key in NEUTRAL and value not in NEUTRAL[key]}
    known = NEUTRAL.keys() | HARMLESS | FOLLOWED
    unknown = {key: value for key, value in settings.items() if key not in known}
    return GenerationDefaults(sampling, max_tokens, said.max_length, _spelled(unheeded), _spelled(unknown))


def _spelled(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return `key value` for each setting, long ones cut."""
    return tuple(f"{key[:40]} {msgspec.json.encode(value).decode()[:40]}" for key, value in settings.items())


_Said = TypeVar("_Said")


def _read(file: Path, kind: type[_Said]) -> _Said:
    """Read `file` as `kind`, other keys left alone; return an empty `kind` if the folder has no
    such file."""
    data = find_model_file(file)
    if data is None:
        return kind()
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ZrtError("bad_model", f"{file} cannot be read: {error}") from error
