"""Write docs/models.md: which models run, and how near they come to transformers' own, compared
here and now.

    python bench/models_table.py > docs/models.md

The models are the tiny random ones of the test suite (`tests/support/tiny_models.py`), untied and tied, cut
into 1, 2 and 4 stages.
"""

import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from support.chained import Pipeline
from support.tiny_models import LONG_PROMPT, MODELS, ORIGINAL, SHORT_PROMPT, TINY, WINDOW, Tiny, save_model

from zrt.runtime.models.architecture.families import FAMILIES
from zrt.runtime.models.architecture.rope_spec import ROPE_TYPES

TOKENS = 64
TEXT = torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = (((0, 3),), ((0, 1), (2, 3)), ((0, 0), (1, 1), (2, 2), (3, 3)))
BUDGET = 1 << 24  # bytes of KV

FAMILY_LIST = ", ".join(f"`{family}`" for family in FAMILIES)
ROPE_LIST = ", ".join(f"`{kind}`" for kind in ROPE_TYPES)
PARAGRAPHS = (
    f"""One decoder runs every family here; `runtime/models/architecture/families.py` says in a row each how they differ. The model types are
    {FAMILY_LIST}; the rope types are {ROPE_LIST}. Any other is refused by its name, with these lists.""",
    """Refused by name, too: quantised weights, `gemma3` with images (its text models are `gemma3_text`), attention both ways,
    soft-capped attention scores in gemma3, a rope that differs by layer (except gemma3's), a rotated part of a head (except phi3's).""",
    """Where a rope depends on the length of the sequence it is as in transformers' `generate`: with `dynamic` and `longrope`, a prompt is
    rotated by its whole length, and each later token by the length that ends with it; phi3 runs the whole history again where it
    outgrows the short factors of its `longrope`.""",
    f"""The table is written by `python bench/models_table.py > docs/models.md` with `.venv` active, here with transformers
    {transformers.__version__} and torch {torch.__version__.partition("+")[0]}. Every model is a random one of {TINY["num_hidden_layers"]}
    layers, untied and tied, in 1, 2 and 4 stages. Windows see {WINDOW} tokens and stretched ropes were made for {ORIGINAL}; prompts have
    {len(SHORT_PROMPT)} tokens, and {len(LONG_PROMPT)} where there are windows or stretched ropes. *ids*: runs whose {TOKENS} greedy
    tokens in float32 are those of `generate`, of all runs. *float32*: the greatest difference of a logit over those tokens, and *of*: the
    greatest logit. *bfloat16*: the greatest difference of a logit over {len(TEXT)} tokens between both in bfloat16, in percent of the
    greatest logit.""",
)
HEAD = "| `model_type` | what the model has | ids | float32 | of | bfloat16 |\n| --- | --- | --- | --- | --- | --- |"


class Result(NamedTuple):
    """One run: whether all ids are equal, the greatest difference of a logit (none where ids part),
    and the greatest logit."""

    equal: bool
    difference: float
    greatest: float


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("# Models\n")
    for paragraph in PARAGRAPHS:
        print(textwrap.fill(" ".join(paragraph.split()), 100, break_on_hyphens=False) + "\n")
    print(HEAD)
    equal = runs = 0
    for tiny in MODELS.values():
        with tempfile.TemporaryDirectory() as folder:
            results = list(_compare(tiny, Path(folder)))
            percent = 100 * _bfloat16(Path(folder) / "untied")
        good = sum(result.equal for result in results)
        difference, greatest = max(result.difference for result in results), max(result.greatest for result in results)
        print(
            f"| `{tiny.family}` | {tiny.features} | {good} of {len(results)} "
            f"| {difference:.1e} | {greatest:.1f} | {percent:.1f} % |",
            flush=True,
        )
        equal, runs = equal + good, runs + len(results)
    print(f"\n{equal} of {runs} runs give the ids of transformers.")
    sys.exit(equal != runs)


def _compare(tiny: Tiny, folder: Path) -> Iterator[Result]:
    for tied in (False, True):
        model = folder / ("tied" if tied else "untied")
        save_model(model, tiny.family, TINY | {"tie_word_embeddings": tied} | tiny.config, 0, "float32", 1)
        for prompt in (SHORT_PROMPT, LONG_PROMPT) if tiny.stretched else (SHORT_PROMPT,):
            reference = _reference(model, torch.float32)
            reference.generation_config.eos_token_id = None
            out = reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            wanted_ids, wanted = out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
            for cuts in CUTS:
                ids, logits = Pipeline(model, cuts, torch.float32, 256, BUDGET).generate("s", prompt, TOKENS)
                equal = ids == wanted_ids
                difference = float((logits - wanted).abs().max()) if equal else float("nan")
                yield Result(equal, difference, float(wanted.abs().max()))


def _bfloat16(model: Path) -> float:
    """The greatest difference of a logit, as a part of the greatest logit."""
    with torch.no_grad():
        expected = _reference(model, torch.bfloat16)(torch.tensor([TEXT])).logits[0].float()
    worst = max(Pipeline(model, cuts, torch.bfloat16, 256, BUDGET).difference("s", TEXT, expected) for cuts in CUTS)
    return worst / float(expected.abs().max())


def _reference(model: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


if __name__ == "__main__":
    main()
