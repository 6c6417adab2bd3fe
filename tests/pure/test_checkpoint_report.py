"""What is said of a model folder before anything starts: every problem by name, from config,
headers and tokenizer alone."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.broken import CASES, DOWN, EMBEDDING, HEAD, INDEX, ONLY_SURVEYED, SINGLE, Case, broken_copy, edit
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.families import FAMILIES
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.report import inspect, require_weights

MakeModel = Callable[..., Path]
EVERY_CASE = CASES | ONLY_SURVEYED


@pytest.fixture
def copied(make_model: MakeModel, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model that a test may change."""

    def copy(family: str = "llama", **options: object) -> Path:
        return shutil.copytree(make_model(family, **options), tmp_path / "model")

    return copy


def give_tokenizer(folder: Path, *, words: int = 20, template: str | None = "{{ messages[0].content }}") -> None:
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>"} | ({"chat_template": template} if template is not None else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("files", [1, 3])
def test_a_whole_model_of_every_family_has_no_problem(
    make_model: MakeModel, family: str, tied: bool, files: int
) -> None:
    report = inspect(make_model(family, tied=tied, files=files))
    assert report.usable, report.problems
    assert (report.family, report.blocks, report.vocab_size, report.context) == (family, 4, 160, 512)


def test_a_report_says_what_was_found(make_model: MakeModel) -> None:
    folder = make_model("qwen3", tied=True, dtype="bfloat16", files=3)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    numbers = sum(tensor.numel() for tensor in tensors.values())
    report = inspect(folder)
    assert (report.model, report.family, report.blocks, report.tied) == (str(folder), "qwen3", 4, True)
    assert (report.parameters, report.weight_bytes, report.dtypes) == (numbers, 2 * numbers, {"BF16": 2 * numbers})
    assert report.weight_files == len(list(folder.glob("*.safetensors")))
    assert (report.tokenizer, report.chat_template, report.eos_ids) == (False, False, [2])
    assert report.notes == ["no tokenizer.json: only token ids can be sent (--token-ids)"]


def test_a_tokenizer_with_a_template_needs_no_note(copied: Callable[..., Path]) -> None:
    folder = copied()
    give_tokenizer(folder)
    report = inspect(folder)
    assert (report.tokenizer, report.chat_template, report.eos_ids, report.notes) == (True, True, [1, 2], [])


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "no chat template: text can be sent as it is only (--raw)"),
        ("{{ raise_exception('only in French') }}", "only in French: a plain question needs --raw"),
        ("{% for %}", "refuses this chat"),
    ],
)
def test_a_chat_that_cannot_be_written_is_noted(copied: Callable[..., Path], template: str | None, note: str) -> None:
    folder = copied()
    give_tokenizer(folder, template=template)
    report = inspect(folder)
    assert report.usable
    assert any(note in each for each in report.notes), report.notes


def test_a_vocabulary_beyond_the_model_is_noted(copied: Callable[..., Path]) -> None:
    folder = copied()
    give_tokenizer(folder, words=200)
    assert any("ids up to 199, the model up to 159" in note for note in inspect(folder).notes)


def test_a_model_that_never_ends_is_noted(copied: Callable[..., Path]) -> None:
    folder = copied()
    for name in ("config.json", "generation_config.json"):
        text = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(text | {"eos_token_id": None}))
    report = inspect(folder)
    assert report.eos_ids == []
    assert any("no token ends an answer" in note for note in report.notes)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{", "the tokenizer of .* does not load"),
        ("generation_config.json", "[]", r"generation_config\.json cannot be read"),
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json is not a JSON object"),
        ("config.json", '{"model_type": "t5"}', "model_type 't5' is not one of"),
    ],
)
def test_a_broken_text_file_is_a_problem(copied: Callable[..., Path], name: str, text: str, says: str) -> None:
    folder = copied()
    give_tokenizer(folder, template="{{ messages }}")
    (folder / name).write_text(text)
    report = inspect(folder)
    (problem,) = report.problems
    assert re.search(says, problem.message)
    assert (report.eos_ids is None) == (text in ("[]", "{") and name != "tokenizer.json")
    assert report.chat_template == (name != "tokenizer.json")


def test_files_are_checked_even_where_the_config_is_not_understood(copied: Callable[..., Path]) -> None:
    folder = copied()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    (folder / SINGLE).write_bytes(b"short")
    (folder / "tokenizer.json").write_text("{")
    kinds = [problem.kind for problem in inspect(folder).problems]
    assert kinds == ["unsupported", "bad_model", "bad_model"]


@pytest.mark.parametrize("case", EVERY_CASE.values(), ids=EVERY_CASE.keys())
def test_every_broken_file_is_named(make_model: MakeModel, tmp_path: Path, case: Case) -> None:
    problems = inspect(broken_copy(case, make_model, tmp_path)).problems
    for pattern in case.says:
        found = [problem for problem in problems if re.search(pattern, problem.message)]
        assert len(found) == 1, problems
        assert found[0].kind == case.kind


@pytest.mark.parametrize("case", EVERY_CASE.values(), ids=EVERY_CASE.keys())
def test_every_broken_file_is_refused_before_a_start(make_model: MakeModel, tmp_path: Path, case: Case) -> None:
    folder = broken_copy(case, make_model, tmp_path)
    with pytest.raises(ZrtError) as caught:
        require_weights(folder, read_spec(folder))
    problems = inspect(folder).problems
    assert caught.value.kind == problems[0].kind
    shown = caught.value.message.split("\n")
    assert shown[:8] == [problem.message for problem in problems[:8]]
    assert len(problems) <= 8 or shown[8:] == [f"and {len(problems) - 8} more: `zrt check {folder}` lists them"]


@pytest.mark.parametrize(
    "name", ["an empty file", "a header that is not JSON", "a Git LFS pointer", "an index that is not JSON"]
)
def test_what_cannot_be_read_at_all_is_one_problem(make_model: MakeModel, tmp_path: Path, name: str) -> None:
    assert len(inspect(broken_copy(CASES[name], make_model, tmp_path)).problems) == 1


def test_a_missing_file_is_one_problem_for_all_its_tensors(make_model: MakeModel, tmp_path: Path) -> None:
    assert len(inspect(broken_copy(CASES["a file missing"], make_model, tmp_path)).problems) == 1


@pytest.mark.parametrize("shipped", ["equal", "alone"])
def test_a_tied_head_that_is_shipped_is_told(copied: Callable[..., Path], shipped: str) -> None:
    folder = copied(tied=True)
    edit(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))(folder)
    if shipped == "alone":
        edit(lambda tensors: tensors.pop(EMBEDDING))(folder)
    report = inspect(folder)
    assert report.usable
    assert report.tied == (shipped == "alone")
    told = "the config ties the head to the embedding, but the files hold lm_head.weight: that is used"
    assert (told in report.notes) == (shipped == "equal")
    assert not any("not used" in note for note in report.notes)


def test_tensors_and_files_that_are_not_used_are_noted(copied: Callable[..., Path]) -> None:
    folder = copied()
    edit(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(folder)
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")
    report = inspect(folder)
    assert report.usable
    assert "1 tensor of no use: model.layers.0.self_attn.rotary_emb.inv_freq" in report.notes
    assert "files that are not part of the model are ignored: consolidated.safetensors" in report.notes


def test_float8_weights_are_counted_as_they_lie(copied: Callable[..., Path]) -> None:
    folder = copied()
    save_file(
        {name: tensor.to(torch.float8_e5m2) for name, tensor in load_file(folder / SINGLE).items()}, folder / SINGLE
    )
    report = inspect(folder)
    assert report.usable
    assert report.dtypes == {"F8_E5M2": report.parameters}


def test_every_quantised_tensor_is_told_once_for_all_blocks(copied: Callable[..., Path]) -> None:
    folder = copied()

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for block in range(4):
            name = DOWN.replace("3", str(block))
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.ones(1)

    edit(quantise)(folder)
    assert [(problem.kind, problem.message) for problem in inspect(folder).problems] == [
        (
            "unsupported",
            "tensor model.layers.{0-3}.mlp.down_proj.weight is quantised (weight_scale is stored with it); "
            "only plain weights are supported",
        )
    ]


def test_nothing_but_headers_is_read(copied: Callable[..., Path]) -> None:
    """A hole where the data was takes no notice, and no time."""
    folder = copied()
    size = (folder / SINGLE).stat().st_size
    with (folder / SINGLE).open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.truncate(header)
        file.truncate(size)
    assert inspect(folder).usable


def test_a_check_loads_no_torch(make_model: MakeModel) -> None:
    code = (
        "import sys, pathlib; from zrt.runtime.models.checkpoint.report import inspect;"
        "assert inspect(pathlib.Path(sys.argv[1])).usable; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, make_model("llama")], check=True, timeout=60)


def test_an_index_beside_a_single_file_is_not_looked_at(copied: Callable[..., Path]) -> None:
    folder = copied()
    (folder / INDEX).write_text("{")
    assert inspect(folder).usable
