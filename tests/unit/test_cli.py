"""The command line against a fake engine: what it asks for, prints, saves and exits with."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from typer.testing import CliRunner

import kqview
from kqview import errors
from kqview.cli.main import app
from kqview.types import Capture, EngineStats, ModelInfo, Sampling, Token, Usage

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

    def __init__(self, engine: "FakeEngine", ids: list[int], options: dict[str, Any]) -> None:
        self.engine, self.ids, self.options = engine, ids, options
        self.finish_reason = "length"
        self.closed = False

    def __iter__(self) -> Iterator[Token]:
        capture = self.options["capture"]
        for i in range(self.options["max_tokens"]):
            if i == self.engine.fail_at:
                raise self.engine.failure
            token = Token(id=1 + i % 7, text=TEXTS[1 + i % 7], index=i)
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

    made: list["FakeEngine"] = []  # noqa: RUF012, emptied by the fixture
    failure: BaseException = errors.PoolExhausted("pool.lease: full, 0 bytes left; drop views")
    fail_at: int | None = None
    load_failure: BaseException | None = None
    strided = False

    def __init__(self, model: str | None, **options: Any) -> None:
        if self.load_failure is not None:
            raise self.load_failure
        self.path, self.options, self.model = model, options, MODEL
        self.generations: list[FakeGeneration] = []
        self.n_copied = 0
        self.closed = False
        if options["progress"] is not None:
            options["progress"](0.5)
        self.made.append(self)

    @classmethod
    def demo(cls, **options: Any) -> "FakeEngine":
        return cls("<demo>", **options)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True):
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

    def count_copied(self, n_bytes: int) -> None:
        self.n_copied += n_bytes

    def stats(self) -> EngineStats:
        return EngineStats(copied_bytes=self.n_copied)

    def system_info(self) -> dict[str, Any]:
        return {"kqview_version": "0", "llama_cpp_commit": "0c1e570", "backends": ["CPU"]}

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
    return Engine


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "100"})


def test_generate_streams_the_text_and_closes_everything(engine_class: type[FakeEngine]):
    result = run(
        "generate", "m.gguf", "Anna has", "-n", "7", "--ngl", "3", "--rpc", "gpu-1:50052",
        "--flash-attn", "off",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stdout == "Anna has a red ball\né\n"
    assert result.stderr == ""
    (engine,) = engine_class.made
    assert engine.path == "m.gguf"
    assert engine.options == {
        "n_ctx": None, "n_threads": None, "n_gpu_layers": 3, "flash_attn": False, "progress": None,
        "rpc_servers": ["gpu-1:50052"],
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
    assert result.stdout == "1\n"
    assert "loading the model" in result.stderr


def test_generate_passes_sampling_options_on(engine_class: type[FakeEngine]):
    options = "--temperature 0 --top-k 5 --top-p 0.5 --min-p 0.1 --repeat-penalty 1.1 --seed 9"
    result = run("generate", "m", "x", "-n", "1", *options.split(), "--stop", "a", "--stop", "b")
    assert result.exit_code == 0
    assert engine_class.made[0].generations[0].options["sampling"] == Sampling(
        temperature=0, top_k=5, top_p=0.5, min_p=0.1, repeat_penalty=1.1, seed=9, stop=("a", "b")
    )


def test_generate_reads_the_prompt_from_stdin_without_its_last_newline(
    engine_class: type[FakeEngine],
):
    assert run("generate", "m", "-", "-n", "1", stdin="one\ntwo\n\n").exit_code == 0
    assert engine_class.made[0].tokenized[0] == "one\ntwo\n"


def test_generate_with_demo_takes_the_only_argument_as_prompt(engine_class: type[FakeEngine]):
    assert run("generate", "--demo", "Anna", "-n", "1").exit_code == 0
    assert engine_class.made[0].path == "<demo>"
    assert engine_class.made[0].tokenized[0] == "Anna"


def test_generate_saves_each_row_as_it_was(engine_class: type[FakeEngine], tmp_path: Path):
    path = tmp_path / "rows.npz"
    arguments = ["--capture", "probs", "--layers", "2", "--heads", "0-1", "--save", str(path)]
    result = run("generate", "m", "Anna has a", "-n", "3", *arguments)
    assert result.exit_code == 0
    plan = engine_class.made[0].generations[0].options["capture"]
    assert plan == Capture("probs", layers=[2], heads=[0, 1])
    with np.load(path) as rows:
        assert rows["ids"].tolist() == [1, 2, 3]
        assert rows["texts"].tolist() == ["Anna", " has", " a"]
        assert rows["prompt_ids"].tolist() == [0, 1, 2, 3]
        assert rows["layers"].tolist() == [2]
        assert str(rows["kind"]) == "probs"
        for i in range(3):
            row = rows[f"attention_{i:05d}"]
            assert row.shape == (1, 2, 4 + i)
            assert row.dtype == np.float32
            assert (row[..., 1:3] == i).all()
            assert (row[..., 3:] == np.float32(1 / (4 + i))).all()
        assert len(rows.files) == 5 + 3
    assert engine_class.made[0].n_copied == 0
    assert "captured 120 bytes of probs" in result.stderr


def test_generate_counts_the_copy_of_a_strided_row(
    engine_class: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "strided", True)
    path = tmp_path / "rows.npz"
    assert (
        run("generate", "m", "a", "-n", "1", "--capture", "probs", "--save", str(path)).exit_code
        == 0
    )
    assert engine_class.made[0].n_copied == 2 * 1 * 2 * 4
    assert np.load(path)["attention_00000"].shape == (2, 1, 2)


def test_generate_leaves_a_readable_file_when_it_fails_on_the_way(
    engine_class: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "fail_at", 2)
    path = tmp_path / "rows.npz"
    result = run("generate", "m", "a", "-n", "5", "--capture", "probs", "--save", str(path))
    assert result.exit_code == 4
    assert result.stderr == "error: pool.lease: full, 0 bytes left; drop views\n"
    assert np.load(path)["ids"].tolist() == [1, 2]


@pytest.mark.parametrize("option", [["--save", "x.npz"], ["--layers", "0"], ["--heads", "0"]])
def test_generate_refuses_capture_options_without_capture(
    engine_class: type[FakeEngine], option: list[str]
):
    result = run("generate", "m", "x", *option)
    assert result.exit_code == 2
    assert "--capture" in result.stderr
    assert not engine_class.made


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "m"],
        ["generate"],
        ["generate", "--demo"],
        ["generate", "m", "x", "--demo"],
        ["generate", "--demo", "--hf", "a/b/c", "x"],
        ["generate", "m", "x", "--capture", "weights"],
        ["generate", "m", "x", "--capture", "probs", "--layers", "0;1"],
        ["generate", "m", "x", "--capture", "probs", "--layers", "0,0"],
        ["generate", "m", "x", "--top-p", "1.5"],
        ["generate", "--hf", "no-file", "x"],
        ["info", "--metadata"],
        ["tokenize", "m"],
        ["demo", "--layer", "1"],
        ["demo", "--head", "2"],
        ["unknown"],
    ],
)
def test_wrong_usage_exits_with_2_before_anything_is_generated(
    engine_class: type[FakeEngine], arguments: list[str]
):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr
    assert not any(engine.generations for engine in engine_class.made)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.PromptTooLong("a: b, c; d"), 2),
        (errors.ModelLoadError("a: b, c; d"), 3),
        (errors.OutOfMemory("a: b, c; d"), 4),
        (errors.StateMismatch("a: b, c; d"), 1),
        (errors.InternalError("a: b, c; d"), 1),
        (PermissionError(13, "a: b, c; d"), 1),
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


def test_error_of_several_lines_is_joined_to_one(
    engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "load_failure", errors.ModelLoadError("first\n  second\n"))
    assert run("info", "m").stderr == "error: first | second\n"


def test_interrupt_ends_the_line_and_exits_with_130(
    engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "fail_at", 1)
    monkeypatch.setattr(engine_class, "failure", KeyboardInterrupt())
    result = run("generate", "m", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "Anna", "\n")
    assert engine_class.made[0].generations[0].closed
    assert engine_class.made[0].closed


def test_broken_pipe_is_quiet(engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_class, "fail_at", 1)
    monkeypatch.setattr(engine_class, "failure", BrokenPipeError())
    result = run("generate", "m", "x")
    assert (result.exit_code, result.stderr) == (141, "")


def test_tokenize_prints_a_line_a_token(engine_class: type[FakeEngine]):
    result = run("tokenize", "m", "a b", "--add-special", "--no-parse-special")
    assert result.stdout == "      0  '<s>'\n      1  'Anna'\n      2  ' has'\n"
    assert engine_class.made[0].tokenized == ("a b", True, False)


def test_tokenize_json_has_ids_and_pieces(engine_class: type[FakeEngine]):
    result = run("tokenize", "m", "-", "--json", stdin="a b\n")
    assert json.loads(result.stdout) == {"ids": [1, 2], "pieces": ["Anna", " has"]}


def test_tokenize_ids_prints_the_ids_alone(engine_class: type[FakeEngine]):
    assert run("tokenize", "--demo", "a b c", "--ids").stdout == "1 2 3\n"


def test_tokenize_shows_part_of_a_character_as_escapes(
    engine_class: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_class, "token_bytes", lambda self, token_id: b"\xe2\x82")
    assert json.loads(run("tokenize", "m", "a", "--json").stdout)["pieces"] == [r"\xe2\x82"]


def test_info_json_holds_every_field_of_the_model(engine_class: type[FakeEngine]):
    content = json.loads(run("info", "m", "--json").stdout)
    assert set(content["model"]) == set(ModelInfo.__slots__)
    assert content["model"]["attention_layers"] == [0, 2]
    assert content["model"]["metadata"] == {"general.name": "toy"}
    assert content["capture"] == {"n_context": 4096, "bytes_per_token": 2 * 2 * 4096 * 4}
    assert content["system"]["llama_cpp_commit"] == "0c1e570"


def test_info_table_shows_the_model_and_the_metadata_if_asked(engine_class: type[FakeEngine]):
    assert "65,536 (every layer and head)" in run("info", "m").stdout
    assert "general.name" not in run("info", "m").stdout
    assert "general.name" in run("info", "m", "--metadata").stdout


@pytest.mark.parametrize("kind", ["probs", "scores", "logits"])
def test_demo_draws_a_line_a_token_and_measures_both_ways(
    engine_class: type[FakeEngine], kind: str
):
    result = run("demo", "-n", "8", "--kind", kind, "--runs", "2", "--layer", "2", "--head", "1")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "<s>Anna has aAnna has a red ball"
    assert any(line.startswith("layer 2, head 1") for line in lines)
    assert sum(line.startswith(" ball ") for line in lines) == 1
    table = result.stdout[result.stdout.index("attention of the last token") :]
    assert f"(2, 2, 11) float32, {kind}" in table
    assert "owndata False, writeable False" in table
    assert "176 bytes at 11 tokens" in table
    assert "copied by Python" in table
    assert "0c1e570" in table
    captures = [g.options["capture"] for g in engine_class.made[0].generations]
    plan = Capture(kind)  # pyright: ignore[reportArgumentType]
    assert captures == [plan, None, plan, None, plan, None, plan]
    assert all(g.options["temperature"] == 0 for g in engine_class.made[0].generations)
