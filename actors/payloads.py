"""An InferenceRequest's data as the rows of a forward, for routed and bare requests alike."""

import torch
from torch import Tensor

from zrt.runtime.compute.engine import Holding
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.inference import InferenceRequest
from zrt.runtime.tensors import as_dtype, from_bytes


def rows_of(engine: Holding, request: InferenceRequest, dtype: str) -> Tensor:
    """Token ids int64 [n] on the first stage, hidden states [n, hidden] in the model's dtype elsewhere; `dtype` is the wire's.

    ZrtError bad_request if this stage does not take such a request.
    """
    is_first = engine.shard.is_first
    if (request.payload_type == "token_ids") != is_first:
        wanted = "token_ids" if is_first else "hidden_states"
        raise ZrtError("bad_request", f"this stage takes {wanted}, not {request.payload_type}")
    if is_first:
        return from_bytes(request.data, "uint32", [len(request.data) // 4]).to(torch.int64)
    hidden = engine.spec.hidden_size
    if len(request.shape) != 3 or request.shape[0] != 1 or request.shape[2] != hidden:
        raise ZrtError("bad_request", f"decode hidden states: shape {request.shape}, expected [1, n, {hidden}]")
    return as_dtype(from_bytes(request.data, dtype, request.shape[1:]), engine.shard.dtype)
