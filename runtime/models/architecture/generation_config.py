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

NEUTRAL: Final[dict[str, object]] = {
    "num_beams": 1,
    "penalty_alpha": 0,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "max_time": None,
    "stop_strings": [],
    "bad_words_ids": [],
    "sequence_bias": {},
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "dola_layers": None,
    "token_healing": False,
}
"""Keys that change an answer in transformers and not in zrt, each with the value that has no effect
(null never has an effect)."""


class GenerationDefaults(Struct, frozen=True):
    """How the model is sampled where a request says nothing. Without `max_tokens` an answer may
    fill the context. `unheeded` names what the file asks for and zrt does not do."""

    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    unheeded: tuple[str, ...] = ()


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


_GenerationJson: Final = cast(
    type[_FileBase],
    msgspec.defstruct(
        "_GenerationJson",
        [(key, _file_type(option), None) for option in SAMPLING_OPTIONS if (key := option.generation_config)],
        bases=(_FileBase,),
        module=__name__,
    ),
)


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
    return GenerationDefaults(sampling, max_tokens, _unheeded(_read(file, dict[str, Any])))


def _unheeded(said: dict[str, Any]) -> tuple[str, ...]:
    """Return `key value` for each setting that changes an answer in transformers and is not applied
    here."""
    asked = ((key, said.get(key)) for key in NEUTRAL)
    return tuple(
        f"{key} {msgspec.json.encode(value).decode()[:40]}"
        for key, value in asked
        if value is not None and value != NEUTRAL[key]
    )


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
