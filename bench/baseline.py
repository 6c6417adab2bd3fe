"""transformers' own `generate`, in a process of its own with its own defaults: the other side of every comparison.

Reads one JSON object a line from stdin, {"prompt": [token ids], "tokens": N}, and answers each with
{"ids": [...], "ttft_s": seconds to the first token, "decode_s": seconds from the first token to the last}.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Notes when each token came; the first call is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main(folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                prompt, do_sample=False, min_new_tokens=asked["tokens"], max_new_tokens=asked["tokens"], streamer=clock
            )
        answer = {
            "ids": ids[0, prompt.shape[1] :].tolist(),
            "ttft_s": clock.times[1] - started,
            "decode_s": clock.times[-1] - clock.times[1],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
