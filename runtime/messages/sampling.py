"""How a token is picked: what a client may ask for, what the last stage is told, and what
log-probabilities look like on the way back.

The ranges stand here once: a value outside is refused where it is decoded, by the name of its
field.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from zrt.runtime.messages.header import U32, U64

SEED_MAX: Final = 2**63 - 1

Temperature = Annotated[float, Meta(ge=0, le=1000)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Meta(ge=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=1000)]
"""Divides logits in float32, which a smaller one would make infinite."""
CountPenalty = Annotated[float, Meta(ge=-2, le=2)]
"""Presence and frequency penalties, in OpenAI's range."""
Seed = Annotated[int, Meta(ge=0, le=SEED_MAX)]
LogitBias = Annotated[dict[U32, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
"""Token id → what is added to its logit, in OpenAI's range: -100 all but bans a token, 100 all but
forces it."""
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenIds = Annotated[list[U32], Meta(max_length=256)]
Stops = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
"""Each is looked for in every piece of text, by the coordinator itself."""


class Sampling(Struct, frozen=True):
    """How the last stage picks a session's tokens; every default is off.

    `temperature` 0 is greedy. `logprobs` n asks for the log-probability of each picked token and
    those of the n likeliest. Until `min_tokens` tokens are generated, none is picked that would end
    the generation. See compute/sampler.py for what applies when.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: CountPenalty = 0.0
    frequency_penalty: CountPenalty = 0.0
    min_tokens: U32 = 0
    logit_bias: LogitBias = {}
    logprobs: TopLogprobs | None = None
    seed: U64 = 0


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
