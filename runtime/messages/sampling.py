"""The options of a generation, in one table: what a client may ask for, what the last stage is
told, and what log-probabilities look like on the way back.

A new option is a row of SAMPLING_OPTIONS and a field each of SamplingRequest, SamplingKeywords and,
if the stage that samples is to know it, Sampling, all of them here; its effect is in
compute/sampler.py. The command line's arguments, the checks of Client.generate and the defaults
from a model's generation_config.json come from the table. A value out of range is refused by the
name of its option wherever it comes in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypedDict

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.header import U32, U64
from zrt.runtime.messages.prompt import PromptRequest

SEED_MAX: Final = 2**63 - 1

MaxTokens = Annotated[int, Meta(ge=1)]
Temperature = Annotated[float, Meta(ge=0, le=1000)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=1000)]
"""Divisor of logits in float32, which a smaller one would make infinite."""
CountPenalty = Annotated[float, Meta(ge=-2, le=2)]
"""Value of the presence and frequency penalties, in OpenAI's range."""
LogitBias = Annotated[dict[U32, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
"""Token id → what is added to its logit, in OpenAI's range: -100 all but bans a token, 100 all but
forces it."""
Stops = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
"""Stop strings, each looked for in every piece of text by the coordinator itself."""
TokenIds = Annotated[list[U32], Meta(max_length=256)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=0, le=SEED_MAX)]
Answers = Annotated[int, Meta(ge=1, le=16)]


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One option: its name as a field of SamplingRequest and keyword of Client.generate, the type
    and range of its values, and its flag, metavar and help on the command line (`metavar` is empty
    for a switch).

    `generation_config` is the key by which a model's generation_config.json sets a value that a
    request leaves out. `holds_token_ids` says that the value (or its keys) are ids of the
    vocabulary.
    """

    name: str
    type: Any
    flag: str
    metavar: str
    help: str
    generation_config: str | None = None
    holds_token_ids: bool = False


SAMPLING_OPTIONS: Final = (
    SamplingOption(
        "max_tokens",
        MaxTokens,
        "--max-tokens",
        "N",
        "end after N tokens, or at the end of the context",
        generation_config="max_new_tokens",
    ),
    SamplingOption(
        "temperature",
        Temperature,
        "--temperature",
        "T",
        "higher is more random; 0 is greedy",
        generation_config="temperature",
    ),
    SamplingOption(
        "top_k", TopK, "--top-k", "K", "draw from the K likeliest tokens; 0 is off", generation_config="top_k"
    ),
    SamplingOption(
        "top_p",
        TopP,
        "--top-p",
        "P",
        "draw from the likeliest tokens that together reach this probability; 1 is off",
        generation_config="top_p",
    ),
    SamplingOption(
        "min_p",
        MinP,
        "--min-p",
        "P",
        "draw from tokens at least P times as likely as the likeliest; 0 is off",
        generation_config="min_p",
    ),
    SamplingOption(
        "repetition_penalty",
        RepetitionPenalty,
        "--repetition-penalty",
        "R",
        "divisor of the logits of all tokens so far; 1 is off",
        generation_config="repetition_penalty",
    ),
    SamplingOption(
        "presence_penalty",
        CountPenalty,
        "--presence-penalty",
        "A",
        "subtracted from the logits of the answer's tokens",
    ),
    SamplingOption(
        "frequency_penalty",
        CountPenalty,
        "--frequency-penalty",
        "A",
        "subtracted from the logits of the answer's tokens, once for each time a token occurs",
    ),
    SamplingOption(
        "logit_bias",
        LogitBias,
        "--logit-bias",
        "ID:BIAS",
        "added to the logit of a token",
        holds_token_ids=True,
    ),
    SamplingOption(
        "min_tokens",
        U32,
        "--min-tokens",
        "N",
        "nothing ends the answer before N tokens",
        generation_config="min_new_tokens",
    ),
    SamplingOption("ignore_eos", bool, "--ignore-eos", "", "go on after the model's own end of an answer"),
    SamplingOption("stop", Stops, "--stop", "TEXT", "end before this text; special tokens count by their names"),
    SamplingOption("stop_token_ids", TokenIds, "--stop-token-id", "ID", "end at this token", holds_token_ids=True),
    SamplingOption(
        "logprobs",
        TopLogprobs,
        "--logprobs",
        "N",
        "with --json: each token's log-probability, and the N likeliest tokens'",
    ),
    SamplingOption("seed", Seed, "--seed", "N", "seed of the draws (default: a new one, which is reported)"),
    SamplingOption("n", Answers, "--n", "N", "this many answers, each with the next seed"),
)
"""Every option of a generation, in the order of SamplingRequest's fields."""

_BY_NAME: Final = {option.name: option for option in SAMPLING_OPTIONS}


class SamplingRequest(PromptRequest):
    """Options of a generation as a client sends them.

    An option that is left out (None) is taken from the model's generation_config; `temperature` 0
    is greedy; without `seed` one is drawn and reported. Generation ends at an end-of-sequence token
    or one of `stop_token_ids` (counted, without text), at a string of `stop` (not part of the
    text; special tokens, which have no text, count by their names in strings that name them), after
    `max_tokens`, or at the end of the context.

    `repetition_penalty` divides (multiplies, below 0) the logits of all tokens of prompt and
    answer; `presence_penalty` is subtracted from those of the answer's tokens, `frequency_penalty`
    once for each time they occur there. `logit_bias` is added to the logits of its ids. Before
    `min_tokens` tokens no token is picked that ends the generation, and no stop string looked for.
    With `ignore_eos` end-of-sequence tokens do not end it; they have no text. `logprobs` n asks for
    each token's log-probability and those of the n likeliest. `n` answers are given to one prompt,
    the i-th (from 0) with `seed` + i.
    """

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: CountPenalty = 0.0
    frequency_penalty: CountPenalty = 0.0
    logit_bias: LogitBias = {}
    min_tokens: U32 | None = None
    ignore_eos: bool = False
    stop: Stops = []
    stop_token_ids: TokenIds = []
    logprobs: TopLogprobs | None = None
    seed: Seed | None = None
    n: Answers = 1


class SamplingKeywords(TypedDict, total=False):
    """Options as keywords of Client.generate; None is the same as leaving the option out."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logprobs: int | None
    seed: int | None
    n: int | None


class Sampling(Struct, frozen=True):
    """How the last stage picks a session's tokens; with its default, an option has no effect.

    `temperature` 0 is greedy. `logprobs` n asks for the log-probability of each picked token and
    those of the n likeliest. Until `min_tokens` tokens are generated, none is picked that would end
    the generation. See compute/sampler.py for what applies when.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: CountPenalty = 0.0
    frequency_penalty: CountPenalty = 0.0
    min_tokens: U32 = 0
    logit_bias: LogitBias = {}
    logprobs: TopLogprobs | None = None
    seed: U64 = 0


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` as fields of SamplingRequest, without those that are None.

    TypeError: there is no option of this name. ZrtError bad_request, in the coordinator's words: a
    value is out of range.
    """
    fields = {}
    for name, value in options.items():
        if name not in _BY_NAME:
            raise TypeError(f"{name!r} is not an option of a generation; valid: {', '.join(_BY_NAME)}")
        if value is None:
            continue
        try:
            fields[name] = msgspec.convert(_plain(value), _BY_NAME[name].type)
        except msgspec.ValidationError as error:
            raise ZrtError("bad_request", _out_of_range(name, error)) from None
    return fields


def _plain(value: Any) -> Any:
    """Return any mapping as a dict, and any other iterable but a text as a list."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value


def _out_of_range(name: str, error: msgspec.ValidationError) -> str:
    """Return the coordinator's message about a value out of range."""
    text, _, path = str(error).partition(" - at ")
    if path.startswith("`key`"):
        return f"generate: {text} - at {path.replace('$', f'$.{name}')}"
    return f"generate.{name}{path.strip('`$')}: {text}"


def stage_sampling(request: SamplingRequest, defaults: Sampling) -> Sampling:
    """Return what the last stage is told: the request's values, `defaults` where the request says
    nothing (None)."""
    said = {name: getattr(request, name) for name in Sampling.__struct_fields__}
    return replace(defaults, **{name: value for name, value in said.items() if value is not None})


class Logprob(Struct, frozen=True):
    """A token and the natural logarithm of its probability."""

    token: U32
    logprob: float


class TokenLogprobs(Struct, frozen=True):
    """What the model itself thought of one picked token: the distribution before bias, penalties,
    temperature and restrictions.

    `top` are the likeliest tokens, most likely first; the picked one may be among them.
    """

    token: U32
    logprob: float
    top: list[Logprob] = []
