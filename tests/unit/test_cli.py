"""The command line: what each command asks of a fake engine, prints, saves and exits with."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import kqview
from kqview import Engine, durable, errors
from kqview.cli import (
    generate_command,
    main as cli_main,
    options as shared_options,
    server_words,
    serving,
    starting,
)
from kqview.cli.exit_status import reported
from kqview.cli.generate_command import rows_file
from kqview.cli.main import app
from kqview.cli.model_file import fetch
from kqview.demo import MODEL_PATH
from kqview.state import write_state
from kqview.state.files import SlotMarks, StateFacts
from kqview.state.fingerprint import ModelFiles
from kqview.types import Capture, EngineStats, ModelInfo, Sampling, Token, Usage
from kqview.types.sampling import OPTIONS
from tests.support import ses1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kqview.server.app import App
    from kqview.server.settings import Settings

pytestmark = pytest.mark.full

TEXTS = ["<s>", "Anna", " has", " a", " red", " ball", "\n", "é"]
MODEL = ModelInfo(
    name="toy", architecture="llama", n_vocab=len(TEXTS), n_layer=3, n_head=2, n_head_kv=1,
    n_embd=8, n_ctx_train=512, attention_layers=(0, 2), attention_scale=0.5, bos_token_id=0,
    eos_token_id=None, eot_token_id=None, pad_token_id=None, special_tokens={"bos": "<s>"},
    rope_freq_base=1e4, rope_freq_scale=1.0, chat_template=None, n_params=1234, size_bytes=4936,
    file_type="F32", classifier_labels=(), metadata={"general.name": "toy"},
)  # fmt: skip


class FakeGeneration:
    """Tokens one after the other, with attention that says which token it belongs to."""

    def __init__(self, engine: FakeEngine, ids: list[int], options: dict[str, Any]) -> None:
        self.engine, self.ids, self.options = engine, ids, options
        self.finish_reason = "length"
        self.prompt_ids, self.model, self.request_id, self.text = ids, MODEL, "generate-1", ""
        self.closed = False
        self.delta = ""

    def take_delta(self) -> str:
        delta, self.delta = self.delta, ""
        return delta

    def __iter__(self) -> Iterator[Token]:
        capture = self.options.get("capture")
        for i in range(self.options["max_tokens"]):
            token = Token(id=1 + i % 7, text=TEXTS[1 + i % 7], index=i)
            self.delta = token.text
            if capture is not None:
                shape = (len(capture.layers or (0, 2)), 2, len(self.ids) + i)
                attention = np.full(shape, 1 / shape[2], np.float32)
                attention[..., 1:3] = i
                attention.flags.writeable = False
                # A view, as the engine hands it out; every second row is not contiguous if asked.
                token.attention = attention[...] if not self.engine.strided else attention[:, ::2]
            yield token

    @property
    def usage(self) -> Usage:
        n_tokens = self.options["max_tokens"]
        return Usage(len(self.ids), 0, n_tokens, prefill_s=0.1, decode_s=(n_tokens - 1) / 100)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


class FakeEngine:
    """Records what the commands ask of an engine."""

    made: list[FakeEngine] = []  # noqa: RUF012, emptied by the fixture
    load_failure: BaseException | None = None
    strided = False
    attention_kernel = "kqview"

    def __init__(self, model: str | None, **options: Any) -> None:
        if self.load_failure is not None:
            raise self.load_failure
        self.path, self.options, self.model = model, options, MODEL
        self.generations: list[FakeGeneration] = []
        self.closed = False
        if options["progress"] is not None:
            options["progress"](0.5)
        self.made.append(self)

    @classmethod
    def demo(cls, **options: Any) -> FakeEngine:
        return cls("<demo>", **options)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True):
        self.tokenized = (text, add_special, parse_special)
        return ([0] if add_special else []) + [1 + i % 7 for i in range(len(text.split()))]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(TEXTS[i] for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return TEXTS[token_id]

    def generate(self, prompt: list[int], **options: Any) -> FakeGeneration:
        self.generations.append(FakeGeneration(self, prompt, options))
        return self.generations[-1]

    def stats(self) -> EngineStats:
        return EngineStats()

    def system_info(self) -> dict[str, Any]:
        return {
            "kqview_version": "0", "llama_cpp_commit": "0c1e570", "n_threads": 2,
            "capture": "pinned" if self.options.get("n_gpu_layers") else "zero-copy",
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    class Engine(FakeEngine):
        made: list[FakeEngine] = []  # noqa: RUF012, one list a test

    demo = types.ModuleType("kqview.demo")
    demo.PROMPT = "Anna has a"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "kqview.demo", demo)
    for name, value in {"Engine": Engine, "Capture": Capture, "Sampling": Sampling}.items():
        monkeypatch.setattr(kqview, name, value, raising=False)
    monkeypatch.setattr(shared_options, "check_model_file", lambda path: None)  # any name will do
    return Engine


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "100"})


def test_generate_streams_the_text_and_closes_everything(engine_class: type[FakeEngine]):
    result = run(
        "generate", "m.gguf", "Anna has", "-n", "7", "--ngl", "3", "--rpc", "gpu-1:50052",
        "--flash-attn", "off", "--attention-kernel", "llama.cpp",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stdout == "Anna has a red ball\né\n"
    assert result.stderr == ""
    (engine,) = engine_class.made
    assert engine.path == "m.gguf"
    assert engine.options == {
        "n_ctx": None, "n_threads": None, "n_gpu_layers": 3, "flash_attn": False, "progress": None,
        "rpc_servers": ["gpu-1:50052"], "kv_type": "f16", "attention_kernel": "llama.cpp",
    }  # fmt: skip
    assert engine.tokenized == ("Anna has", True, True)
    (generation,) = engine.generations
    assert generation.ids == [0, 1, 2]
    assert generation.options["capture"] is None
    assert generation.closed
    assert engine.closed


def test_loading_shows_its_progress_on_a_terminal(
    engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("tokenize", "m", "a", "--ids")
    assert result.stdout == "0 1\n"
    assert "loading the model" in result.stderr


def test_generate_takes_the_names_that_llama_cpp_has_for_its_options(
    engine_class: type[FakeEngine],
):
    words = "-m m -c 64 -t 2 -ngl 3 -fa off -n 1 --temp 0 -s 9 --repetition-penalty 1.1 -p x"
    long = (
        "--model m --ctx-size 64 --threads 2 --n-gpu-layers 3 --flash-attn off --n-predict 1 "
        "--temperature 0 --seed 9 --repeat-penalty 1.1 --prompt x"
    )
    for line in (words, long):
        assert run("generate", *line.split()).exit_code == 0
    ours, theirs = engine_class.made
    assert ours.options == theirs.options
    assert (ours.path, ours.options["n_ctx"], ours.options["n_gpu_layers"]) == ("m", 64, 3)
    given = [engine.generations[0].options for engine in (ours, theirs)]
    assert given[0] == given[1]
    assert given[0]["sampling"] == Sampling(temperature=0, seed=9, repeat_penalty=1.1)


COMMANDS = (
    "attend", "bench", "calibrate", "chat", "config", "config show", "convert-classifier", "demo",
    "embed",
    "generate", "info", "ingest", "score", "serve", "state", "state check", "state inspect",
    "tokenize",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_its_usage_and_an_example(command: str):
    result = CliRunner().invoke(app, [*command.split(), "-h"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert command in ("config", "state") or f"• kqview {command}" in result.stdout


def test_generate_has_an_option_for_every_number_and_flag_of_sampling():
    names = set(inspect.signature(generate_command.generate).parameters)
    rows = OPTIONS.values()
    assert {row.name for row in rows if row.type in (int, float, bool)} | {"seed", "stop"} <= names


def test_generate_reads_the_prompt_from_stdin_without_its_last_newline(
    engine_class: type[FakeEngine],
):
    assert run("generate", "m", "-", "-n", "1", stdin="one\ntwo\n\n").exit_code == 0
    assert engine_class.made[0].tokenized[0] == "one\ntwo\n"


def test_generate_saves_a_strided_row_whole(
    engine_class: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "strided", True)
    path = tmp_path / "rows.npz"
    assert (
        run("generate", "m", "a", "-n", "1", "--capture", "probs", "--save", str(path)).exit_code
        == 0
    )
    assert np.load(path)["attention_00000"].shape == (2, 1, 2)


@pytest.mark.parametrize(
    ("option", "plan"),
    [
        (["--layers", "0,2"], Capture("probs", layers=[0, 2])),
        (["--layers=-1", "--heads", "0-1"], Capture("probs", layers=[-1], heads=[0, 1])),
        (["--reduce", "mean_heads", "--capture", "qk"], Capture("qk", reduce="mean_heads")),
        (["--spans", "0:3, 3:"], Capture("probs", spans=[(0, 3), (3, None)])),
        (["--top-values", "4", "--dtype", "float16"], Capture("probs", top_k=4, dtype="float16")),
    ],
)
def test_any_option_of_attention_captures_probs_unless_told(
    engine_class: type[FakeEngine], option: list[str], plan: Capture
):
    assert run("generate", "m", "x", "-n", "1", *option).exit_code == 0
    assert engine_class.made[0].generations[0].options["capture"] == plan


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.PromptTooLong("a: b, c; d"), 2),
        (errors.ModelLoadError("a: b, c; d"), 3),
        (errors.OutOfMemory("a: b, c; d"), 4),
        (errors.StateMismatch("a: b, c; d"), 1),
        (errors.InternalError("a: b, c; d"), 1),
        (PermissionError(13, "a: b, c; d"), 1),
        (errors.ModelLoadError("first\n  a: b, c; d\n"), 3),
        (errors.OutOfMemory("lower n_gpu_layers; a: b, c; d"), 4),
    ],
)
def test_error_is_one_line_on_stderr_and_its_exit_code(
    engine_class: type[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    exit_code: int,
):
    monkeypatch.setattr(engine_class, "load_failure", error)
    result = run("info", "m")
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("a: b, c; d\n")
    assert result.stderr.count("\n") == 1
    assert "n_gpu_layers" not in result.stderr  # it is --ngl here


def test_tokenize_prints_tokens_ids_or_json(
    engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    result = run("tokenize", "m", "a b", "--no-parse-special")
    assert result.stdout == "      0  '<s>'\n      1  'Anna'\n      2  ' has'\n"
    assert engine_class.made[0].tokenized == ("a b", True, False)
    result = run("tokenize", "m", "-", "--json", stdin="a b\n")
    assert json.loads(result.stdout) == {"ids": [0, 1, 2], "pieces": ["<s>", "Anna", " has"]}
    result = run("tokenize", "--demo", "a b c", "--ids", "--no-add-special")
    assert (result.stdout, engine_class.made[-1].path) == ("1 2 3\n", "<demo>")
    # Part of a character is shown as escapes.
    monkeypatch.setattr(engine_class, "token_bytes", lambda self, token_id: b"\xe2\x82")
    assert json.loads(run("tokenize", "m", "a", "--json").stdout)["pieces"][1:] == [r"\xe2\x82"]


def test_info_json_holds_every_field_of_the_model(engine_class: type[FakeEngine]):
    content = json.loads(run("info", "m", "--json").stdout)
    assert set(content["model"]) == set(ModelInfo.__slots__)
    assert content["model"]["attention_layers"] == [0, 2]
    assert content["model"]["metadata"] == {"general.name": "toy"}
    assert content["capture"] == {"n_context": 4096, "bytes_per_token": 2 * 2 * 4096 * 4}
    assert content["attention_kernel"] == "kqview"
    assert content["system"]["llama_cpp_commit"] == "0c1e570"


def test_info_table_shows_the_model_and_what_is_asked(engine_class: type[FakeEngine]):
    text = run("info", "m").stdout
    assert "65,536 (every layer and head)" in text
    assert re.search("attention on the CPU +kqview", text)
    assert re.search("capture with --ngl 0 +zero-copy", text)
    assert "general.name" not in text
    text = run("info", "m", "--ngl", "-1", "--metadata").stdout
    assert re.search("capture with --ngl -1 +pinned", text)
    assert "general.name" in text
    assert [one.options["n_gpu_layers"] for one in engine_class.made] == [0, -1]


@pytest.mark.parametrize("kind", ["probs", "scores", "logits"])
def test_demo_draws_a_line_a_token_and_measures_both_ways(
    engine_class: type[FakeEngine], kind: str
):
    result = run("demo", "-n", "8", "--kind", kind, "--runs", "2", "--layer", "2", "--head", "1")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Anna has aAnna has a red ball"
    assert any(line.startswith("layer 2, head 1") for line in lines)
    assert sum(line.startswith(" ball ") for line in lines) == 1
    table = result.stdout[result.stdout.index("attention of the last token") :]
    assert f"(2, 2, 11) float32, {kind}" in table
    assert "owndata False, writeable False" in table
    assert re.search("176 bytes .* 11 tokens", table)
    assert "copied by Python" in table
    assert "0c1e570" in table
    captures = [g.options.get("capture") for g in engine_class.made[0].generations]
    plan = Capture(kind)  # pyright: ignore[reportArgumentType]
    # The text, the prompt, a warm-up, and rounds whose order changes.
    assert captures == [plan, None, None, plan, None, plan, plan, None]
    assert all(g.options["temperature"] == 0 for g in engine_class.made[0].generations)


@pytest.mark.parametrize("words", [("--layer", "1"), ("--head", "2")])
def test_demo_refuses_a_head_that_is_not_there(
    engine_class: type[FakeEngine], words: tuple[str, str]
):
    assert (run("demo", *words).exit_code, engine_class.made[0].generations) == (2, [])


# ---- start, help and the hub


def test_model_of_the_hub_opens_with_all_its_parts(monkeypatch: pytest.MonkeyPatch):
    fetched: list[str] = []

    def download(repo_id: str, filename: str, revision: str = "") -> str:
        fetched.append(f"{repo_id} {filename} {revision}".rstrip())
        return str(MODEL_PATH)

    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = download  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    with Engine.from_hub("me/models", "m-00001-of-00002.gguf", revision="v1", n_ctx=64) as engine:
        assert engine.n_ctx == 64
    assert fetched == [f"me/models m-0000{i}-of-00002.gguf v1" for i in (1, 2)]
    for repo, file in (("models", "m.gguf"), ("me/models", "")):
        with pytest.raises(errors.RequestError):
            Engine.from_hub(repo, file)


def test_hub_fetch_failure_says_what_and_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def fail(**options: str) -> str:
        raise ConnectionError("no route\nsecond line")

    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = fail  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    with pytest.raises(errors.ModelLoadError, match=r"m\.gguf .*ConnectionError: no route"):
        fetch("me/models/m.gguf")


def test_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("kqview")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_entry_point_without_the_cli_extra_is_one_line(missing: str):
    code = f"import sys; sys.modules[{missing!r}] = None; import kqview.__main__ as m; m.main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"error: the command line needs {missing}, which is not installed; "
        'run pip install "kqview[cli]"\n'
    )


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("uvicorn", 'run pip install "kqview[server]"'),
        ("_sqlite3", "this Python was built without it; use one that can import _sqlite3"),
    ],
)
def test_what_a_command_cannot_import_is_one_line_with_what_to_do(
    missing: str, remedy: str, capsys: pytest.CaptureFixture[str]
):
    status = reported(ModuleNotFoundError(f"No module named {missing!r}", name=missing), "serve")
    assert status == 2
    said = f"error: kqview serve needs {missing}, which is not installed; {remedy}\n"
    assert capsys.readouterr().err == said


# ---- info about the build


CPU = {
    "name": "CPU", "description": "some processor", "type": "CPU", "backend": "CPU",
    "memory_free_bytes": 2**33, "memory_total_bytes": 2**34, "compute_capability": None,
    "capture": "zero-copy", "row_kernel": False,
}  # fmt: skip
GPU = {
    "name": "CUDA0", "description": "some accelerator", "type": "GPU", "backend": "CUDA",
    "memory_free_bytes": 70 * 2**30, "memory_total_bytes": 80 * 2**30,
    "compute_capability": "9.0", "capture": "pinned", "row_kernel": True,
}  # fmt: skip
REMOTE = {**GPU, "name": "RPC0", "backend": "RPC", "memory_total_bytes": 0, "capture": "plain",
          "compute_capability": None, "row_kernel": False}  # fmt: skip
BUILD_INFO: dict[str, Any] = {
    "kqview_version": "1.2.3", "llama_cpp_commit": "0c1e570", "is_portable": False,
    "cpu_variant": "native", "cpu_variants": ["native"],
    "gpu_backends": "CUDA", "cuda_version": "13.0", "cuda_architectures": "80,90",
    "backends": ["CUDA", "CPU"], "backend_packages": {},
    "backend_features": {"CUDA": {"ARCHS": "800,900"}, "CPU": {}}, "devices": [GPU, CPU],
    "nvidia_driver": "580.1", "nvidia_driver_cuda": "13.0", "cpu_features": "",
    "n_threads_default": 2,
}  # fmt: skip


WITHOUT_CUDA: dict[str, Any] = {
    "gpu_backends": None, "cuda_version": None, "cuda_architectures": None, "backends": ["CPU"],
    "backend_features": {"CPU": {}}, "devices": [CPU], "nvidia_driver": None,
    "nvidia_driver_cuda": None,
}  # fmt: skip


def show_info(monkeypatch: pytest.MonkeyPatch, *arguments: str, **changes: Any) -> str:
    monkeypatch.setattr(kqview, "system_info", lambda: {**BUILD_INFO, **changes})
    result = CliRunner().invoke(app, ["info", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_info_without_a_model_shows_build_driver_and_devices(monkeypatch: pytest.MonkeyPatch):
    text = show_info(monkeypatch)
    assert "1.2.3" in text
    assert "this kind of CPU; CUDA 13.0 for 80,90" in text
    assert re.search(r"CPU variant +native +$", text, re.M)
    assert "ARCHS=800,900" in text
    assert "580.1, runs CUDA 13.0" in text
    (gpu,) = [line for line in text.splitlines() if line.strip().startswith("CUDA0")]
    assert "some accelerator" in gpu
    assert "70.0 of 80.0 GiB" in gpu
    assert gpu.split()[-3:] == ["9.0", "pinned", "kqview"]


RADEON = {
    **GPU, "name": "Vulkan0", "backend": "Vulkan", "compute_capability": None, "row_kernel": False,
}  # fmt: skip
NO_DRIVER = {"nvidia_driver": None, "nvidia_driver_cuda": None, "devices": [CPU]}
WITHOUT_GPU = "no GPU found: models run on the CPU"


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        (
            {**WITHOUT_CUDA, "is_portable": True}, ["any CPU of its kind; no GPU"],
            ["NVIDIA", "compute capability", "no GPU found", "rows by"],
        ),
        (
            {**WITHOUT_CUDA, "gpu_backends": "HIP,Vulkan", "devices": [RADEON, CPU]},
            ["this kind of CPU; HIP, Vulkan"], ["NVIDIA", WITHOUT_GPU],
        ),
        ({**WITHOUT_CUDA, "gpu_backends": "HIP,Vulkan"}, ["HIP, Vulkan", WITHOUT_GPU], ["NVIDIA"]),
        (
            {**WITHOUT_CUDA, "backend_packages": {"kqview_vulkan": None}, "devices": [RADEON, CPU]},
            ["package kqview_vulkan loaded"], [WITHOUT_GPU],
        ),
        (
            {**WITHOUT_CUDA, "backend_packages": {"kqview_vulkan": "no loader"}},
            ["package kqview_vulkan no loader", WITHOUT_GPU], [],
        ),
        (NO_DRIVER, ["NVIDIA driver none", WITHOUT_GPU], []),
        ({"devices": [REMOTE]}, ["RPC0 GPU some accelerator unknown plain"], []),
        (
            {"cpu_variant": "avx2", "cpu_variants": ["sse42", "avx2", "avx512"]},
            ["CPU variant avx2 (also sse42, avx512)"], [],
        ),
    ],
)  # fmt: skip
def test_info_says_what_a_build_and_its_devices_are(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: list[str], unsaid: list[str]
):
    text = re.sub(" +", " ", show_info(monkeypatch, **changes))
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []


def test_info_json_without_a_model_is_system_info(monkeypatch: pytest.MonkeyPatch):
    assert json.loads(show_info(monkeypatch, "--json")) == BUILD_INFO


# ---- the file of generate --save


ROWS_ENGINE: Any = SimpleNamespace(
    model=SimpleNamespace(attention_layers=(0, 1)), token_text=lambda id: f"t{id}"
)


def row_token(index: int) -> Any:
    rows = np.full((2, 4, 1000 + index), index, np.float32)
    return SimpleNamespace(
        id=index, text=f"t{index}", index=index, attention=rows, attention_positions=None
    )


def rows_in(path: Path) -> AbstractContextManager[Callable[[Any], None]]:
    generation: Any = FakeGeneration(ROWS_ENGINE, [1, 2, 3], {"max_tokens": 1, "capture": None})
    return rows_file(path, ROWS_ENGINE, Capture("probs"), generation)


def write_until(path: Path, n_tokens: int, error: BaseException | None = None) -> None:
    with rows_in(path) as add:
        for i in range(n_tokens):
            add(row_token(i))
        if error is not None:
            raise error


def ids_in(path: Path) -> list[int]:
    with np.load(path) as rows:
        assert all(rows[name] is not None for name in rows.files)
        return rows["ids"].tolist()


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 2)
    before = path.read_bytes()
    with rows_in(path) as add:
        for i in range(3):
            add(row_token(i))
            assert path.read_bytes() == before
    assert ids_in(path) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["rows.npz"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError(32, "x"), ValueError()])
def test_interruption_keeps_the_rows_before_it(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 2)
    with pytest.raises(type(error)):
        write_until(path, 0, error)
    assert ids_in(path) == [0, 1]  # no row came: nothing worth the old file
    with pytest.raises(type(error)):
        write_until(path, 1, error)
    assert ids_in(path) == [0]
    assert os.listdir(tmp_path) == ["rows.npz"]


def test_disk_that_is_full_at_any_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.npz"
    write_until(path, 1)
    before = path.read_bytes()
    real = os.write
    n_left = 10**9

    def write(handle: int, data: Any) -> int:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(durable.os, "write", write)
    n_left = n_writes = 0
    while True:
        with contextlib.suppress(OSError):
            write_until(path, 2)
            break
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["rows.npz"]
        n_writes += 1
        n_left = n_writes
    gc.collect()  # nothing that was given up writes or complains when it is collected
    assert n_writes > 3
    assert ids_in(path) == [0, 1]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
from kqview.cli.main import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "n_tokens"),
    [
        (["generate", "--demo", "Anna has", "--output", "old.npz"], 8),
        (["generate", "--demo", "Anna has", "--output", "old.safetensors"], 8),
        (["demo", "--runs", "1", "--png", "old.png"], 4),
    ],
    ids=["npz", "safetensors", "demo"],
)
def test_command_on_a_full_disk_says_so_and_leaves_the_old_file(
    tmp_path: Path, arguments: list[str], n_tokens: int
) -> None:
    *arguments, name = arguments
    path = tmp_path / name
    path.write_bytes(b"old")
    command = [sys.executable, "-c", LIMITED, *arguments, str(path), "-n", str(n_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: {path}: File too large; nothing was changed, free some space"
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [name]


# ---- serve


def serve(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["serve", *words], env=env)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings with which the command would serve; it does not."""
    seen: list[Settings] = []

    def run(
        app: App, settings: Settings, listener: socket.socket, supervised: object, read: object
    ) -> None:
        seen.append(settings)
        assert supervised is None

    monkeypatch.setattr(serving, "run", run)
    return seen


@pytest.mark.parametrize("words", [(), ("--demo", "--model", "m.gguf")])
def test_not_exactly_one_model_is_wrong_usage(words: tuple[str, ...]):
    result = serve(*words)
    assert result.exit_code == 2
    assert "name one model" in result.output


def test_demo_smollm2_is_the_file_of_its_package(
    engine_class: type[FakeEngine],
    served: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    file = tmp_path / "smollm2.gguf"
    file.write_bytes(MODEL_PATH.read_bytes())
    for user in (shared_options, server_words):
        monkeypatch.setattr(user, "model_path", lambda name: file)
    result = run("tokenize", "--demo", "smollm2", "a b c", "--ids", "--no-add-special")
    assert (result.stdout, engine_class.made[-1].path) == ("1 2 3\n", str(file))
    serve("--demo", "smollm2", "--port", "0")
    assert (served[0].model, served[0].demo) == (str(file), False)


def test_taken_port_is_said_before_the_model_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = serve("--model", "missing.gguf", "--port", str(port))
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.output


def test_command_line_of_llama_server_is_taken(served: list[Settings]):
    result = serve("--demo", "-c", "256", "-np", "2", "-fa", "off", "--metrics", "--port", "0")
    assert result.exit_code == 0, result.output
    assert "--metrics" in result.stderr
    (settings,) = served
    assert (settings.n_ctx, settings.n_slots, settings.flash_attn) == (128, 2, "off")


# ---- serve with a configuration file


def config_file(folder: Path, text: str) -> str:
    path = folder / "kqview.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_configuration_file_lies_below_environment_and_flags(
    served: list[Settings], tmp_path: Path
):
    path = config_file(
        tmp_path,
        "[server]\ndemo = true\nport = 0\nn_slots = 2\nn_ctx = 64\nmax_tokens = 3\n"
        "max_samples = 4\nkv_type = 'q8_0'\n",
    )
    env = {"KQVIEW_MAX_TOKENS": "5", "LLAMA_ARG_CTX_SIZE": "512", "KQVIEW_CONFIG": path}
    for words in (("--config", path), ()):
        result = serve(*words, "-np", "4", "--max-samples", "6", env=env)
        assert result.exit_code == 0, result.output
        settings = served.pop()
        assert (settings.n_slots, settings.n_ctx, settings.kv_type) == (4, 128, "q8_0")
        assert (settings.max_tokens, settings.max_samples) == (5, 6)


def test_every_error_of_a_configuration_file_is_said(served: list[Settings], tmp_path: Path):
    path = config_file(tmp_path, "[server]\nslots = 2\nport = -1\n")
    result = serve("--config", path, "--demo")
    assert (result.exit_code, served) == (2, [])
    assert f'{path}: no key "slots" in [server]; it is n_slots' in result.output
    assert f"{path}: port is -1; expected int >= 0" in result.output
    result = serve("--config", "/nowhere/kqview.toml", "--demo")
    assert (result.exit_code, served) == (1, [])
    assert "/nowhere/kqview.toml: No such file or directory" in result.output


def test_file_without_a_model_needs_one_named(served: list[Settings], tmp_path: Path):
    path = config_file(tmp_path, "[server]\nport = 0\n")
    result = serve("--config", path)
    assert (result.exit_code, served) == (2, [])
    assert "[models.ID]" in result.output
    assert serve("--config", path, "--demo").exit_code == 0


def test_model_of_the_hub_is_a_key_too(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def fetched(name: str) -> str:
        asked.append(name)
        return str(MODEL_PATH)

    monkeypatch.setattr(starting, "fetch", fetched)
    path = config_file(tmp_path, "[server]\nport = 0\nhf = 'owner/repo/file.gguf'\n")
    assert serve("--config", path).exit_code == 0
    assert (served[0].model, asked) == (str(MODEL_PATH), ["owner/repo/file.gguf"])
    assert "name one model" in serve("--config", path, "--demo").output


# ---- state


STATE_ROWS = [ses1.Rows(np.ones((5, 16), np.float16))]
STATE_BLOB = ses1.Blob(
    [1, 2, 3, 4, 5], STATE_ROWS * 3, STATE_ROWS * 3, False, list(range(5))
).encode()


def run_state(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["state", *map(str, arguments)])


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


def saved_state(path: Path, model_file: Path, adapters: Sequence[tuple[str, float]] = ()) -> Path:
    files = ModelFiles(str(model_file), adapters)
    facts = StateFacts(files.fingerprint(), "f16")
    write_state(path, STATE_BLOB, facts, SlotMarks(n_exact=4))
    return path


def test_whole_file_is_said_to_be_one(tmp_path: Path, model_file: Path) -> None:
    path = saved_state(tmp_path / "a.ses1", model_file)
    result = run_state("check", path)
    n_bytes = path.stat().st_size
    assert result.stdout == f"{path}: intact, 5 tokens, {n_bytes:,} bytes, checksum correct\n"
    assert result.exit_code == 0
    result = run_state("check", path, "--model", model_file)
    assert result.stdout.endswith("checksum correct, matches the model\n")
    assert result.exit_code == 0


def test_file_of_another_model_or_other_adapters_is_named(tmp_path: Path, model_file: Path) -> None:
    other, adapter = tmp_path / "other.gguf", tmp_path / "lora=x.gguf"
    other.write_bytes(b"WEIGHTS" * 1000)
    adapter.write_bytes(b"lora")
    plain = saved_state(tmp_path / "plain.ses1", model_file)
    adapted = saved_state(tmp_path / "adapted.ses1", model_file, [(str(adapter), 0.5)])
    half, whole = ["--lora", f"{adapter}=0.5"], ["--lora", adapter]
    for path, options, is_of_model in (
        (plain, ["--model", model_file], True),
        (plain, ["--model", other], False),
        (plain, ["--model", model_file, *half], False),
        (adapted, ["--model", model_file], False),
        (adapted, ["--model", model_file, *half], True),
        (adapted, ["--model", model_file, *whole], False),
    ):
        result = run_state("check", path, *options)
        assert result.exit_code == (0 if is_of_model else 1)
        assert ("saved with another model" in result.stdout) is not is_of_model
        assert json.loads(run_state("check", path, *options, "--json").stdout)[0][
            "is_of_model"
        ] == (is_of_model)


def test_raw_blob_is_whole_but_not_known_to_be_of_a_model(tmp_path: Path, model_file: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(STATE_BLOB)
    result = run_state("check", path)
    assert result.exit_code == 0
    assert result.stdout.endswith("raw blob without a checksum\n")
    result = run_state("check", path, "--model", model_file)
    assert result.exit_code == 1
    assert "no trailer" in result.stdout


def test_every_file_gets_its_line_and_one_that_is_bad_the_status(
    tmp_path: Path, model_file: Path
) -> None:
    good = saved_state(tmp_path / "good.ses1", model_file)
    (tmp_path / "text").write_text("no blob")
    files = [good, tmp_path / "none", tmp_path, tmp_path / "text"]
    result = run_state("check", *files)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.startswith(f"{file}: ") for file, line in zip(files, lines, strict=True)]
    assert ["FAILED" in line for line in lines] == [False, True, True, True]
    assert "No such file" in lines[1]
    assert run_state("check", good, "--model", tmp_path / "none").exit_code == 1
    assert run_state("check", good, "--lora", good).exit_code == 2
    assert run_state("check").exit_code == 2


def test_inspect_shows_what_is_in_a_file(tmp_path: Path, model_file: Path) -> None:
    path = saved_state(tmp_path / "a.ses1", model_file)
    (shown,) = json.loads(run_state("inspect", path, "--json").stdout)
    expected = {
        **{"n_tokens": 5, "tokens": [1, 2, 3, 4, 5], "n_layer": 3, "kv_type": "f16"},
        **{"flash_attn": True, "n_exact": 4, "problems": []},
        **{"n_bytes": path.stat().st_size, "model": ModelFiles(str(model_file), []).fingerprint()},
    }
    assert expected.items() <= shown.items()
    text = run_state("inspect", path).stdout
    for part in ("3 layers of f16", "flash attention", expected["model"]):
        assert part in text
    path.write_bytes(STATE_BLOB[:-1])
    result = run_state("inspect", path)
    assert result.exit_code == 1
    assert "problem" in result.stdout


def test_help_loads_neither_the_engine_nor_a_command():
    code = (
        "import sys; sys.argv[1:] = ['-h']\nfrom kqview.__main__ import main\n"
        "try: main()\nexcept SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split("\n")[-2].split())
    assert "typer.rich_utils" in loaded
    assert {name for name in loaded if name.startswith("kqview")} == {
        "kqview", "kqview.__main__", "kqview.errors", "kqview.cli", "kqview.cli.exit_status",
        "kqview.cli.main", "kqview.cli.terminal",
    }  # fmt: skip
    assert not loaded & {"numpy", "jinja2", "msgspec", "asyncio"}


@pytest.mark.parametrize("name", cli_main._COMMANDS)  # pyright: ignore[reportPrivateUsage]
def test_line_of_the_help_is_that_of_the_command(name: str):
    panel, _, line = cli_main._COMMANDS[name]  # pyright: ignore[reportPrivateUsage]
    command = cli_main._loaded(name)  # pyright: ignore[reportPrivateUsage]
    assert (command.help or "").partition("\n")[0] == line
    assert panel in cli_main._PANELS  # pyright: ignore[reportPrivateUsage]
