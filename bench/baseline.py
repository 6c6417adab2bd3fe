"""transformers' own `generate`, in a process of its own with its own defaults: the other side of
every comparison.

Reads one JSON object a line from stdin, {"prompts": [[token ids], ...], "tokens": N, "cache":
"dynamic" | "static"}, and answers each with {"ids": [[...], ...], "ttft_s": seconds to the first
tokens, "decode_s": seconds from the first tokens to the last}. Several prompts make one padded
batch.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList


class Clock(LogitsProcessor):  # type: ignore[misc]
    """Notes when the logits of each step are there; changes nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        width = max(map(len, asked["prompts"]))
        prompts = torch.tensor([[0] * (width - len(ids)) + ids for ids in asked["prompts"]])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in asked["prompts"]])
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                prompts,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=asked["tokens"],
                max_new_tokens=asked["tokens"],
                logits_processor=LogitsProcessorList([clock]),
                cache_implementation="static" if asked["cache"] == "static" else None,
            )
        answer = {
            "ids": ids[:, width:].tolist(),
            "ttft_s": clock.times[0] - started,
            "decode_s": clock.times[-1] - clock.times[0],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
