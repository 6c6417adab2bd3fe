"""The tokens that transformers generates, and those that a cluster does, with the logits of
each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.clusters import local_cluster


def reference(folder: Path, prompt: list[int], tokens: int, dtype: str = "float32") -> tuple[list[int], Tensor]:
    """Return transformers' greedy ids, and the logits [tokens, vocab] each was picked from."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


async def through_stages(
    folder: Path,
    stages: Sequence[str | None],
    prompt: list[int],
    tokens: int,
    dtype: str = "float32",
    **settings: Any,
) -> tuple[list[int], Tensor]:
    """Return a cluster's greedy ids, and the logits as the last stage's executor computed them
    after real hops."""
    async with local_cluster(folder, stages, model_dtype=dtype, **settings) as cluster:
        seen: list[Tensor] = []
        engine: Any = cluster.servers[-1].turns.engine
        forward = engine._decoder.forward

        def record(*asked: Any) -> Tensor:
            logits: Tensor = forward(*asked)
            if len(logits):
                seen.append(logits.clone())
            return logits

        engine._decoder.forward = record
        ids = await cluster.greedy(prompt, tokens)
        return ids, torch.cat(seen)
