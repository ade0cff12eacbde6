"""Commands on the demo model: what they print and write is what the Python API returns."""

from __future__ import annotations

import io
import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("typer")

from typer.main import get_command
from typer.testing import CliRunner

import kqview
from kqview import Capture, Edit, Engine
from kqview.cli.main import app
from tests.support import tiny_gguf
from tests.support.rows import near

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Anna has a ball. Anna has a"
ONE = ("-t", "1")


def run(command: str, *words: object, stdin: str | bytes | None = None, status: int = 0) -> Any:
    arguments = [command, "--demo", *ONE, *map(str, words)]
    result = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    return result


def json_of(command: str, *words: object, stdin: str | None = None) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    text = run(command, *words, "--json", stdin=stdin).stdout
    return json.loads(text, parse_constant=refuse)


# ---- attend


def test_attend_draws_a_line_for_each_token_and_fits_the_terminal(demo: Engine) -> None:
    lines = run("attend", TEXT, "--layer", "1", "--head", "0").stdout.splitlines()
    assert lines[0].startswith("layer 1, head 0:")
    texts = [demo.token_text(i) for i in demo.tokenize(TEXT)]
    for line, text in zip(lines[2:], texts, strict=False):
        assert line.startswith(text)
    for line in run("attend", TEXT * 8).stdout.splitlines():
        assert len(line) <= 100


def test_attend_json_and_files_hold_what_the_engine_returns(demo: Engine, tmp_path: Path) -> None:
    found = demo.attend(TEXT, Capture("scores", layers=[1, 3], heads=[0]))
    expected = found.array()
    options = (TEXT, "--capture", "scores", "--layers=1,-1", "--heads", "0")
    content = json_of("attend", *options)
    assert content["tokens"] == found.column_texts
    assert (content["kind"], content["layers"], content["heads"]) == ("scores", [1, 3], [0])
    shown = np.array(content["attention"], np.float64)  # null becomes NaN
    assert np.array_equal(np.isnan(shown), np.isinf(expected))
    seen = np.isfinite(expected)
    assert np.allclose(shown[seen], expected[seen], atol=near(1e-5))
    for name in ("rows.npz", "rows.npy", "rows.safetensors"):
        path = tmp_path / name
        run("attend", *options, "--output", path)
        if name.endswith(".npy"):
            values = np.load(path)
        elif name.endswith(".npz"):
            with np.load(path) as members:
                values = members["attention"]
                assert members["texts"].tolist() == found.column_texts
                assert members["layers"].tolist() == [1, 3]
        else:
            from safetensors.numpy import load_file

            values = load_file(path)["attention"]
        assert np.array_equal(np.isfinite(values), seen)
        assert np.allclose(values[seen], expected[seen], atol=near(1e-5))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("options", [(), ("--top-values", "3"), ("--reduce", "mean_heads")])
def test_files_of_commands_are_read_by_load(
    demo: Engine, tmp_path: Path, suffix: str, options: tuple[str, ...]
) -> None:
    pytest.importorskip("safetensors")
    capture = Capture(
        "probs", layers=[1, 3], top_k=3 if "--top-values" in options else None,
        reduce="mean_heads" if "--reduce" in options else None,
    )  # fmt: skip
    path = tmp_path / f"rows{suffix}"
    asked = ("--layers=1,3", *options, "--output", path)
    run("generate", TEXT, "-n", "5", "--temperature", "0", *asked)
    saved = kqview.load(path)
    generation = demo.generate(TEXT, max_tokens=5, temperature=0, capture=capture)
    for token, read in zip(generation, saved.tokens(), strict=True):
        assert (read.id, read.text, read.index) == (token.id, token.text, token.index)
        assert np.allclose(read.rows, token.rows, atol=near(1e-5))
        assert read.column_texts == token.column_texts
        assert (read.capture, read.heads) == (token.capture, token.heads)
    assert (saved.text, saved.prompt_ids) == (generation.text, generation.prompt_ids)
    assert (saved.finish_reason, saved.usage.completion_tokens) == ("length", 5)
    assert saved.model["architecture"] == demo.model.architecture

    run("attend", TEXT, *asked)
    saved = kqview.load(path)
    found = demo.attend(TEXT, capture)
    assert (saved.prompt_ids, saved.capture) == (found.column_ids, found.capture)
    assert saved.prompt_attention is not None
    rows = found.top_k()[0] if capture.top_k else found.array()
    assert np.allclose(saved.prompt_attention.rows, rows, atol=near(1e-5))


def test_attend_shows_every_form_of_rows(tmp_path: Path) -> None:
    forms = {
        "mean of all layers": ("--reduce", "mean"),
        "layer 2, mean of heads": ("--reduce", "mean_heads", "--layer", "2"),
        "layer 1, head 1": ("--top-values", "3", "--layer", "1", "--head", "1"),
        "each column a range": ("--spans", "0:4,4:"),
        "layer 3": ("--capture", "qk", "--layer=-1"),
    }
    for title, options in forms.items():
        assert title in run("attend", TEXT, *options).stdout.splitlines()[0]
        assert len(run("attend", TEXT, *options, "--table", "--last", "2").stdout.splitlines()) == 3
    picture, page = tmp_path / "head.png", tmp_path / "heads.html"
    run("attend", TEXT, "--top-values", "3", "-o", page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    pytest.importorskip("matplotlib")
    run("attend", TEXT, "--top-values", "3", "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_attend_table_says_what_a_token_attends_to_most(demo: Engine) -> None:
    rows = demo.attend(TEXT, Capture("probs", layers=[1], heads=[0])).array()[0, 0]
    texts = [demo.token_text(i) for i in demo.tokenize(TEXT)]
    lines = run("attend", TEXT, "--layer", "1", "--head", "0", "--table").stdout.splitlines()[1:]
    for i, line in enumerate(lines):
        best = int(rows[i].argmax())
        assert f"{rows[i, best]:4.0%} {texts[best]}" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layer", "4"), "--layer is 4; choose from 0, 1, 2, 3"),
        (("--head", "8"), "--head is 8"),
        (("--layers", "1", "--layer", "2"), "--layer is 2; choose from 1"),
    ],
)
def test_attend_refuses_a_head_that_is_not_there(options: tuple[str, ...], message: str) -> None:
    assert message in run("attend", TEXT, *options, status=2).stderr


# ---- score


def test_score_prints_what_the_engine_returns(demo: Engine) -> None:
    score = demo.score(TEXT)
    (content,) = json_of("score", TEXT, "--top", "2")
    assert content["ids"] == score.ids
    assert content["logprobs"][0] is None
    assert np.allclose(content["logprobs"][1:], score.logprobs[1:], atol=1e-3)
    assert content["perplexity"] == pytest.approx(score.perplexity, rel=1e-3)
    assert all(len(top) == 2 for top in content["top_logprobs"][1:])
    lines = run("score", TEXT).stdout.splitlines()
    assert len(lines) == 1 + len(score.ids) + 1
    rank = lines[2].split()[-1]
    assert int(rank) == score.ranks[1] + 1
    assert lines[-1].endswith(f"perplexity {content['perplexity']:.3f}")


def test_score_takes_files_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("Anna has a ball.\n\nTom has a box.\n")
    lines = run("score", "--lines", "--summary", "-f", path).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{path}:1", f"{path}:3"]
    whole = json_of("score", "--summary", stdin="Anna has a ball.\n")
    assert [one["name"] for one in whole] == ["standard input"]


def test_text_beyond_the_context_is_scored_in_windows_each_token_once(demo: Engine) -> None:
    text = "Anna has a ball. Tom has a box. " * 6
    ids = demo.tokenize(text)
    n_ctx, half = 32, 16
    assert len(ids) > 2 * n_ctx
    (content,) = json_of("score", text, "-c", n_ctx)
    logprobs = content["logprobs"]
    assert content["n_scored"] == len(ids) - 1
    assert content["perplexity"] == pytest.approx(math.exp(-sum(logprobs[1:]) / (len(ids) - 1)))
    first = demo.score(ids[:n_ctx]).logprobs
    assert np.allclose(logprobs[1:n_ctx], first[1:], atol=2e-2)
    second = demo.score(ids[half : half + n_ctx], last=half).logprobs
    assert np.allclose(logprobs[n_ctx : n_ctx + half], second[half:], atol=2e-2)


# ---- embed


def test_embed_prints_and_writes_what_the_engine_returns(tmp_path: Path) -> None:
    texts = ["Tom found a red ball.", "I am a small model."]
    with Engine.demo(n_threads=1, pooling="mean") as engine:
        expected = engine.embed(texts)
    assert isinstance(expected, np.ndarray)
    printed = np.loadtxt(io.StringIO(run("embed", *texts).stdout))
    assert np.allclose(printed, expected, atol=1e-4)
    content = json_of("embed", "--lines", "--similarity", stdin="\n".join(texts))
    assert content["pooling"] == "mean"
    assert np.allclose(content["similarity"], expected @ expected.T, atol=1e-4)
    run("embed", *texts, "-o", tmp_path / "v.npy")
    assert np.allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-4)
    assert run("embed", *texts, "--similarity").stdout.splitlines()[0].split()[-2] == "1.000"
    long = np.loadtxt(io.StringIO(run("embed", texts[0], "--no-normalize").stdout))
    assert np.linalg.norm(long) > 1.5


# ---- generate


def test_generate_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "rows.html"
    result = run("generate", TEXT, "-n", "4", "-o", page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"written to {page}" in result.stderr


def test_generate_json_is_one_object() -> None:
    content = json_of("generate", TEXT, "-n", "4", "--temp", "0")
    assert "".join(token["text"] for token in content["tokens"]) == content["text"]
    assert content["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 4


STORY = "Mirelda found a silver key near the old bridge. One day, Mirelda"


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("silver key", " found a "),
        ("silver keys", " found a silver key"),
        ("!", " found a silver key"),
    ],
)
def test_generate_shows_no_part_of_a_stop_sequence(stop: str, shown: str) -> None:
    words = ("-n", "4", "--temp", "0", "--stop", stop)
    assert run("generate", STORY, *words).stdout == f"{shown}\n"


def test_generate_follows_a_constraint(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["cat", "dog"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for option in (json.dumps(schema), f"@{tmp_path / 'schema.json'}"):
        assert json.loads(run("generate", "A ", "-j", option).stdout) in schema["enum"]
    assert run("generate", "A ", "--regex", "(ab){2}").stdout == "abab\n"
    assert run("generate", "A ", "--grammar", 'root ::= "x" "y"').stdout == "xy\n"
    assert "may be incomplete" in run("generate", "A ", "--regex", "a{9}", "-n", "2").stderr


@pytest.mark.parametrize("command", ["generate", "attend", "embed"])
def test_text_beyond_the_context_is_an_error_that_names_the_option(command: str) -> None:
    error = run(command, TEXT * 4, "-c", "16", status=2).stderr
    assert "raise --ctx or" in error
    assert error.count("\n") == 1


# ---- chat


def chat(*lines: str, words: tuple[object, ...] = (), status: int = 0) -> Any:
    stdin = "".join(f"{line}\n" for line in lines)
    return run("chat", "--temp", "0", "-n", "24", *words, stdin=stdin, status=status)


def messages_in(path: Path) -> list[tuple[str, str]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [(one["role"], one["content"]) for one in content["messages"]]


def test_chat_answers_lines_and_saves_the_conversation(demo: Engine, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    result = chat("Who are you?", "", "Tell me \\", "a story", f"/save {path}")
    saved = messages_in(path)
    questions = [("user", "Who are you?"), ("user", "Tell me \na story")]
    assert saved[::2] == questions
    ask = [{"role": "user", "content": "Who are you?"}]
    assert saved[1] == ("assistant", demo.chat(ask, temperature=0, max_tokens=24).read())
    assert result.stdout == "".join(f"{text}\n" for _, text in saved[1::2])


def test_chat_commands_change_the_conversation(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(6)]
    saves = [f"/save {path}" for path in paths]
    chat(
        "/system Be brief.", "Who are you?", "Hello", saves[0], "/undo", saves[1],
        "/retry", saves[2], "/clear", saves[3], f"/load {paths[0]}", saves[4],
        "//slash", saves[5],
    )  # fmt: skip
    whole = messages_in(paths[0])
    assert [role for role, _ in whole] == ["system", "user", "assistant", "user", "assistant"]
    assert messages_in(paths[1]) == whole[:3]
    assert messages_in(paths[2]) == whole[:3]  # greedy: the same answer
    assert messages_in(paths[3]) == whole[:1]
    assert messages_in(paths[4]) == whole
    assert messages_in(paths[5])[-2] == ("user", "/slash")
    result = chat("/history", words=("--load", paths[1], "--system", "Be kind."))
    assert result.stdout.splitlines()[:2] == ["system: Be kind.", f"user: {whole[1][1]}"]


def test_chat_shows_what_the_last_answer_attended_to() -> None:
    asked = ("/system Be brief.", "Who are you?", "/attention")
    shown = chat(*asked, "/system Be kind, and tell a long story.", "/attention").stdout
    _, before, after = shown.split("The answer's ")
    assert before == after
    lines = shown.splitlines()
    at = next(i for i, line in enumerate(lines) if "attended to" in line)
    shares = [float(line.split("%")[0]) for line in lines[at + 1 : at + 6]]
    assert sum(shares) == pytest.approx(100, abs=0.4)
    assert [line.split()[-3:] for line in lines[at + 3 : at + 4]] == [["Who", "are", "you?"]]


def test_chat_saves_the_attention_that_it_captured(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "answer.safetensors"
    answer = chat("Hello", f"/save {path}", words=("--reduce", "mean")).stdout
    saved = kqview.load(path)
    assert f"{saved.text}\n" == answer
    assert isinstance(saved.rows, np.ndarray)
    assert saved.rows.shape[0] == len(saved.ids)


@pytest.mark.parametrize("command", ["attend", "score"])
def test_empty_text_is_refused(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--demo", "", *ONE])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the text is missing: text 1 is empty\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nope", "there is no command /nope"),
        ("/undo", "there is nothing to take back"),
        ("/retry", "there is no message to answer again"),
        ("/attention", "there is no answer yet"),
        ("/save", "type /save FILE.json"),
        ("/save x.txt", "type /save FILE.json"),
        ("/load none.json", "none.json"),
        ("/set temperature -1", "temperature"),
        ("/set wings 2", "there is no option wings"),
    ],
)
def test_chat_says_what_is_wrong_with_a_command(line: str, message: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--demo", *ONE], input=f"{line}\nHello\n")
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_chat_keeps_a_file_that_is_there_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("mine")
    assert f"/save! {path} replaces it" in chat(f"/save {path}", status=2).stderr
    assert path.read_text() == "mine"
    chat("Hello", f"/save! {path}")
    assert messages_in(path)[0] == ("user", "Hello")


def test_chat_that_outgrows_the_context_says_how_to_go_on() -> None:
    result = chat("Anna has a ball. " * 40, words=("-c", "64"), status=2)
    assert "/undo or /clear shortens it, --ctx allows more" in result.stderr


def test_chat_with_a_model_without_a_template_says_so_before_the_first_message(
    tmp_path: Path,
) -> None:
    model = tiny_gguf.write_model(tmp_path / "bare.gguf", chat_template=None)
    result = CliRunner().invoke(app, ["chat", str(model)], input="Hello\n")
    assert result.exit_code == 3
    assert "--chat-template chatml" in result.stderr


def test_chat_answers_one_message_of_the_command_line() -> None:
    one = run("chat", "Who are you?", "--temp", "0", "-n", "24").stdout
    assert one == chat("Who are you?").stdout
    assert run("chat", "-", "--temp", "0", "-n", "24", stdin="Who are you?\n").stdout == one


def test_chat_takes_a_template_of_a_file(demo: Engine, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    words = ("Tom found", "--temp", "0", "-n", "8", "--chat-template", f"@{template}")
    expected = demo.generate("Tom found", temperature=0, max_tokens=8).read()
    assert run("chat", *words).stdout == expected + "\n"


# ---- readers that leave

COMMANDS: Any = get_command(app)


def status_without_reader(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Exit status of a command whose reader has gone before it writes its first line."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            app(list(words), prog_name="kqview")
    return ended.value.code


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("--help",),
        *((name, "--help") for name in COMMANDS.commands),
        ("info",),
        ("info", "--json"),
        ("config", "show"),
        *(
            (name, "--demo", *options)
            for name, *options in (
                ("info",),
                ("tokenize", TEXT),
                ("attend", TEXT, *ONE),
                ("attend", TEXT, "--json", *ONE),
                ("embed", TEXT, *ONE),
                ("score", TEXT, *ONE),
                ("generate", TEXT, "-n", "2", *ONE),
                ("chat", "Who?", "-n", "2", *ONE),
                ("bench", "--quick", "--pairs", "1", "--tokens", "6", "--contexts", "16",
                 "--captures", "probs", "--flash-attn", "on", "--threads", "1"),
            )
        ),
        ("demo", "--runs", "1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_reader_that_has_gone_ends_every_command_quietly(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_without_reader(monkeypatch, *words) == 141
    assert "rror" not in capfd.readouterr().err


# ---- edits


@pytest.mark.needs("host layers")
def test_edits_of_files_act_on_each_command(demo: Engine, tmp_path: Path) -> None:
    n_embd = demo.model.n_embd
    rng = np.random.default_rng(0)
    directions = np.float32(rng.normal(size=(2, n_embd)))
    kqview.ControlVector((1, 2), directions, "llama").save(tmp_path / "v.gguf")
    objects = [
        {"type": "scale_heads", "factors": [[1, 1, 0.0]]},
        {"type": "control_vector", "name": "v.gguf", "scale": 0.5},
    ]
    (tmp_path / "edits.json").write_text(json.dumps(objects))
    edits = [
        Edit.scale_heads({(1, 1): 0.0}),
        Edit.add(directions, [1, 2], 0.5),
        Edit.add(directions, [1, 2], 2.0),
    ]
    given = ("--edits", tmp_path / "edits.json", "--control-vector", f"{tmp_path}/v.gguf=2")
    found = json_of("attend", TEXT, *given)["attention"]
    np.testing.assert_allclose(found, demo.attend(TEXT, edits=edits).array(), atol=near(1e-5))
    found = json_of("score", TEXT, *given)[0]["logprob"]
    assert found == pytest.approx(demo.score(TEXT, edits=edits).total, abs=1e-3)
    assert found != pytest.approx(demo.score(TEXT).total, abs=1e-1)
    greedy = ("--max-tokens", "8", "--temperature", "0")
    want = demo.generate(TEXT, max_tokens=8, temperature=0.0, edits=edits).read()
    assert json_of("generate", TEXT, *greedy, *given)["text"] == want
    assert want != demo.generate(TEXT, max_tokens=8, temperature=0.0).read()
    want = demo.chat(
        [{"role": "user", "content": TEXT}], max_tokens=8, temperature=0.0, edits=edits
    )
    assert run("chat", TEXT, *greedy, *given).stdout.strip() == want.read().strip()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "is not JSON"),
        ("3", "list of objects"),
        ('[{"type": "hook"}]', r"edits[0].type is 'hook'"),
        ('[{"type": "control_vector", "name": "../v.gguf"}]', "control vectors are none"),
        ('[{"type": "scale_heads", "factors": [[99, 0, 1]]}]', "layer 99"),
    ],
)
def test_a_file_without_edits_is_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "edits.json").write_text(content)
    result = CliRunner().invoke(
        app, ["generate", "--demo", "a", "--edits", str(tmp_path / "edits.json")]
    )
    assert result.exit_code != 0
    assert says in result.output + str(result.exception)
