"""KwaaiNet's two messages, exactly as documented: what a block server takes and gives.

`InferenceRequest` goes to a block server: from the coordinator (token ids, to stage 0), from the
previous stage (hidden states) or, as a bare frame, from any peer. `InferenceResponse` is the reply
to a bare request alone; between zrt actors results travel on as the next stage's request.

Between zrt actors one message carries the results of a whole turn: the header's steps name the
sessions in row order, `shape` is `[Σn]` for token ids and `[1, Σn, hidden]` for hidden states, and
`session_id` and `seq_pos` are those of the first step. Where the header says that the rows are
handed over in memory, `data` is empty.
"""

from typing import Literal

from msgspec import Struct

from zrt.runtime.messages.header import U32, U64

PayloadType = Literal["token_ids", "hidden_states"]
ResponseType = Literal["hidden_states", "logits"]

WARMING_UP = "node warming up — model loading in background"
"""The documented error text of a server whose model is still loading (response with session 0 and
empty data)."""


class InferenceRequest(Struct):
    """One step: `token_ids` u32-LE of shape [n], or `hidden_states` of shape [1, n, hidden] (f16-LE
    when bare)."""

    session_id: U64
    seq_pos: U32
    payload_type: PayloadType
    shape: list[U32]
    data: memoryview


class InferenceResponse(Struct):
    """Answer to a bare request: hidden states [1, n, hidden] or the last position's logits [1, 1,
    vocab], f16-LE.

    On failure `error` is a text, `session_id` 0, `response_type` hidden_states, `shape` and `data`
    empty.
    """

    session_id: U64
    response_type: ResponseType
    shape: list[U32]
    data: memoryview
    error: str | None
