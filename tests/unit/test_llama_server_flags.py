"""Command lines of llama-server as those of ``kqview serve``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kqview.cli.llama_server_flags import translated
from kqview.cli.main import app
from kqview.errors import RequestError
from kqview.server.settings import PREFIX, Settings
from kqview.server.settings_table import rows_of
from kqview.server.web.supervisor import ENVIRONMENT
from tests.engine.conftest import llama_cpp_dir  # noqa: F401, a fixture

if TYPE_CHECKING:
    from pathlib import Path


def of(line: str) -> tuple[str, str]:
    """The command line that *line* becomes, and what is noted."""
    notes: list[str] = []
    return " ".join(translated(line.split(), notes.append)[0]), " ".join(notes)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m a.gguf -c 4096 -np 4", "--model a.gguf --ctx 1024 --slots 4"),
        ("-m a.gguf -c 4096", "--model a.gguf --ctx 4096"),
        ("-c 0 -np -1", "--slots 4"),
        ("--ctx-size=4096 --parallel=2", "--ctx 2048 --slots 2"),
        ("-ngl 99 -t 8", "--ngl 99 --threads 8"),
        ("-ngl all", "--ngl -1"),
        ("--n-gpu-layers auto", "--ngl -1"),
        ("-a one,two --host 0.0.0.0", "--alias one --alias two --host 0.0.0.0"),
        ("--api-key a,b --api-key c", "--api-key a --api-key b --api-key c"),
        ("--admin-key a,b", "--admin-key a --admin-key b"),
        ("--cors-origin=http://a,http://b", "--cors-origin http://a --cors-origin http://b"),
        ("--sampling top_k=3,min_p=0", "--sampling top_k=3 --sampling min_p=0"),
        ("--template-option xs=[1,2],b=c,d", "--template-option xs=[1,2] --template-option b=c,d"),
        ("-fa on -ctk q8_0 -ctv q8_0", "--flash-attn on --kv-type q8_0"),
        ("-fa --port 8080", "--flash-attn on --port 8080"),
        ("--flash-attn auto", "--flash-attn auto"),
        ("--lora a.gguf,b.gguf", "--lora a.gguf --lora b.gguf"),
        ("--lora-scaled a.gguf:0.5", "--lora a.gguf:0.5"),
        ("--reranking --no-slots", "--pooling rank --no-slots"),
        ("--slots --port 0", "--port 0"),
        ("--slots 3 --port 0", "--slots 3 --port 0"),
        ("--slots 4 --slots -c 256", "--slots 4 --ctx 64"),
        (
            "--slot-save-path d --props --context-shift",
            "--slot-save-path d --props --context-shift",
        ),
        ("--ssl-key-file k --ssl-cert-file c", "--ssl-keyfile k --ssl-certfile c"),
        ("-ub 1024 -to 60", "--ubatch-size 1024 --idle-timeout-s 60"),
        ("--temp 0.6 --top-k 20", "--sampling temperature=0.6 --sampling top_k=20"),
        ("-s 42 --seed -1 -n 64 -n -1", "--sampling seed=42 --default-max-tokens 64"),
        ("--kv-unified -c 256 -np 4", "--ctx 256 --slots 4"),
        ("--kv-unified -no-kvu -c 256 -np 4", "--ctx 64 --slots 4"),
        ("-v --log_verbose", "--verbose --verbose"),
        ("--top-nsigma 1.5 --top-n-sigma -1", "--sampling top_n_sigma=1.5"),
        ("--reasoning-budget 256", "--reasoning-budget 256"),
        ("-rea 0 --reasoning=true", "--reasoning off --reasoning on"),
        ("--reasoning auto -rea -1", "--reasoning auto --reasoning auto"),
        ("--reasoning-format none", "--reasoning-format none"),
        ("--reasoning-effort low", "--template-option reasoning_effort=low"),
        ("--reasoning-effort default", ""),
        ("--no-reasoning-preserve", "--template-option preserve_reasoning=false"),
        (
            '--chat-template-kwargs {"a":[1,"b"],"c":null}',
            '--template-option a=[1, "b"] --template-option c=null',
        ),
        ("-md b.gguf --spec-type draft-simple", "--drafter b.gguf"),
        ("--spec-draft-model=b.gguf", "--drafter b.gguf"),
        ("--spec-type none,ngram-simple,ngram-mod", "--drafter prompt-lookup"),
        ("--spec-type ngram-mod,draft-mtp", "--drafter mtp"),
        ("--spec-default -m a.gguf", "--drafter prompt-lookup --model a.gguf"),
        # our own stay as they are
        ("--demo --slots 4 --ctx 512 --ngl 3", "--demo --slots 4 --ctx 512 --ngl 3"),
        ("--max-tokens 5 --allowed-hosts a", "--max-tokens 5 --allowed-hosts a"),
    ],
)
def test_flags_are_written_as_ours(theirs: str, ours: str):
    assert of(theirs) == (ours, "")


def test_flags_that_change_nothing_here_are_left_out_and_named():
    ours, note = of("--metrics --jinja -cb --mlock -tb 4 --cache-ram 0 --embedding -m a.gguf")
    assert ours == "--model a.gguf"
    for name in ("--metrics", "--jinja", "-cb", "--mlock", "-tb", "--cache-ram", "--embedding"):
        assert name in note.split()


def test_how_many_tokens_are_guessed_and_how_fast_is_left_out_and_named():
    line = "-md b.gguf --draft-max 8 --spec-draft-p-min 0.5 -ngld 9 --spec-draft-backend-sampling"
    ours, note = of(f"{line} -td 2 --threads-batch-draft 2 --spec-ngram-mod-n-max 9 --port 0")
    assert ours == "--drafter b.gguf --port 0"
    for name in ("--draft-max", "--spec-draft-p-min", "-ngld", "-td", "--spec-ngram-mod-n-max"):
        assert name in note.split()


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("--spec-type ngram-mod,draft-eagle3", "lacks 'draft-eagle3'"),
        ("-hfd a/b", "downloading"),
        ("--spec-draft-n-cpu-moe 3", "placing"),
        ("-lcd a.bin", "looked up"),
    ],
)
def test_drafter_that_kqview_lacks_is_refused_with_the_reason(line: str, fact: str):
    with pytest.raises(RequestError, match=fact):
        of(line)


def test_worker_does_not_repeat_what_its_supervisor_said():
    line = ["serve", "--metrics", "--no-such-flag"]
    assert "effect here: --metrics" in CliRunner().invoke(app, line).output
    worker = CliRunner().invoke(app, line, env={ENVIRONMENT: "3"})
    assert "--no-such-flag" in worker.output
    assert "--metrics" not in worker.output


def test_unknown_flags_stay_for_the_command_to_refuse():
    assert of("--no-such-flag 2 -zz a.gguf")[0] == "--no-such-flag 2 -zz a.gguf"


def test_every_flag_and_variable_of_llama_server_is_known(llama_cpp_dir: Path):  # noqa: F811
    """Each is translated, left out with a note, or refused by its name."""
    page = (llama_cpp_dir / "tools/server/README.md").read_text("utf-8")
    rows = re.findall(r"^\| `(-.+?)` \|(.*)$", page, re.M)
    assert len(rows) > 200
    for text, about in rows:
        names = re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", text)
        takes_value = not text.endswith(names[-1])
        for name in names:
            if name in ("-h", "--help", "--usage", "--version"):
                continue
            words = [name, "1"] if takes_value else [name]
            if name in ("--api-key-file", "--chat-template-file"):
                continue  # read, not translated
            ours, note = env_of({}, " ".join(words))
            assert name in note.split() or not note, name
            assert note or not ours or ours.split()[0] in OWN, f"{name} becomes {ours}"
        variable = re.search(r"\(env: (LLAMA_\w+)\)", about)
        if variable and takes_value and variable[1] not in FILES:
            assert env_of({variable[1]: "1"}) != ("", ""), variable[1]


FILES = ("LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_CHAT_TEMPLATE_FILE", "LLAMA_ARG_CACHE_TYPE_V")
OWN = {row.flag for row in rows_of(Settings).values()} | {"--no-slots"}
OWN |= {f"--no-{flag[2:]}" for flag in OWN}
OWN_VARIABLES = {row.flag: PREFIX + row.name.upper() for row in rows_of(Settings).values()}


def env_of(environ: dict[str, str], line: str = "") -> tuple[str, str]:
    """The command line that *line* becomes in *environ*, and what is noted or refused."""
    notes: list[str] = []
    try:
        words, _ = translated(line.split(), notes.append, environ, OWN_VARIABLES)
    except RequestError as error:
        return "", str(error)
    return " ".join(words), " ".join(notes)


@pytest.mark.parametrize(
    ("environ", "line", "ours"),
    [
        ({"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_N_PARALLEL": "4"}, "", "--ctx 1024 --slots 4"),
        ({"LLAMA_ARG_CTX_SIZE": "4096"}, "-np 2", "--ctx 2048 --slots 2"),
        ({"LLAMA_ARG_KV_UNIFIED": "1"}, "-c 256 -np 4", "--ctx 256 --slots 4"),
        ({"LLAMA_ARG_KV_UNIFIED": "1"}, "-c 256 -np 4 -no-kvu", "--ctx 64 --slots 4"),
        ({"LLAMA_ARG_CTX_SIZE": "4096"}, "-c 512", "--ctx 512"),
        ({"LLAMA_ARG_CTX_SIZE": "4096"}, "--ctx 512", "--ctx 512"),
        ({"LLAMA_ARG_CTX_SIZE": "4096", "KQVIEW_N_CTX": "99"}, "", ""),
        ({"LLAMA_ARG_MODEL": "a.gguf", "LLAMA_ARG_PORT": "8080"}, "", "--model a.gguf --port 8080"),
        ({"LLAMA_API_KEY": "a,b"}, "", "--api-key a --api-key b"),
        ({"LLAMA_API_KEY": "a,b"}, "--api-key c", "--api-key c"),
        (
            {"LLAMA_ARG_TEMPERATURE": "0.5"}, "--top-k 3",
            "--sampling temperature=0.5 --sampling top_k=3",
        ),
        ({"LLAMA_ARG_TEMPERATURE": "0.5"}, "--temp 1", "--sampling temperature=1"),
        ({"LLAMA_ARG_CONTEXT_SHIFT": "true"}, "", "--context-shift"),
        ({"LLAMA_ARG_CONTEXT_SHIFT": "0"}, "", "--no-context-shift"),
        ({"LLAMA_ARG_NO_CONTEXT_SHIFT": "x"}, "", "--no-context-shift"),
        ({"LLAMA_ARG_NO_CONTEXT_SHIFT": "x"}, "--context-shift", "--context-shift"),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "off"}, "", "--no-slots"),
        ({"LLAMA_ARG_RERANKING": "1"}, "", "--pooling rank"),
        ({"LLAMA_ARG_REASONING": "on"}, "", "--reasoning on"),
        ({"LLAMA_ARG_REASONING": "on"}, "-rea off", "--reasoning off"),
        ({"LLAMA_ARG_THINK": "none"}, "", "--reasoning-format none"),
        ({"LLAMA_ARG_THINK_BUDGET": "9"}, "", "--reasoning-budget 9"),
        ({"LLAMA_ARG_REASONING_PRESERVE": "0"}, "", "--template-option preserve_reasoning=false"),
        (
            {"LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CACHE_TYPE_V": "q8_0"}, "",
            "--kv-type q8_0",
        ),
        ({"LLAMA_ARG_SPEC_DRAFT_MODEL": "b.gguf"}, "", "--drafter b.gguf"),
        ({"LLAMA_ARG_SPEC_DRAFT_MODEL": "b.gguf"}, "--drafter c.gguf", "--drafter c.gguf"),
        ({"LLAMA_ARG_SPEC_TYPE": "ngram-cache"}, "", "--drafter prompt-lookup"),
        ({"LLAMA_ARG_MODEL": "", "PATH": "x", "LLAMA_CACHE": "y"}, "", ""),
    ],
)  # fmt: skip
def test_variables_of_llama_server_count_where_no_flag_is_given(
    environ: dict[str, str], line: str, ours: str
):
    assert env_of(environ, line) == (ours, "")


@pytest.mark.parametrize(
    ("environ", "fact"),
    [
        ({"LLAMA_ARG_ENDPOINT_METRICS": "1"}, "without effect here: LLAMA_ARG_ENDPOINT_METRICS"),
        ({"LLAMA_ARG_MMPROJ": "a.gguf"}, "LLAMA_ARG_MMPROJ is set"),
        ({"LLAMA_ARG_CONTEXT_SHIFT": "maybe"}, "LLAMA_ARG_CONTEXT_SHIFT is 'maybe'"),
        ({"LLAMA_ARG_N_PARALLEL": "many"}, "many"),
    ],
)
def test_variable_without_effect_or_meaning_is_named(environ: dict[str, str], fact: str):
    ours, note = env_of(environ)
    assert ours == ""
    assert fact in note


def test_command_reads_the_variables(tmp_path: Path):
    missing = str(tmp_path / "missing.gguf")
    run = CliRunner().invoke(app, ["serve", "--port", "0"], env={"LLAMA_ARG_MODEL": missing})
    assert missing in run.output
    both = CliRunner().invoke(
        app, ["serve", "--port", "0"], env={"LLAMA_ARG_MODEL": missing, "KQVIEW_MODEL": "mine.gguf"}
    )
    assert "mine.gguf" in both.output


def test_template_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}")
    assert of(f"--chat-template-file {path}")[0] == "--chat-template {{ messages[0].content }}"
    assert of("--chat-template chatml")[0] == "--chat-template chatml"


def test_keys_are_read_from_a_file(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# mine\none\n\n two \n")
    assert of(f"--api-key-file {path}")[0] == "--api-key one --api-key two"


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("-np many", "many"),
        ("-c big", "big"),
        ("-ctk q8_0 -ctv f16", "q8_0"),
        ("-ctv q8_0", "f16"),
        ("--api-key-file /does/not/exist", "/does/not/exist"),
        ("--chat-template-file /does/not/exist", "/does/not/exist"),
        ("--api-key-file /dev/null", "no keys"),
    ],
)
def test_value_that_cannot_be_used_is_named(line: str, fact: str):
    with pytest.raises(RequestError, match=fact):
        of(line)


def test_no_flag_of_ours_is_taken_for_one_that_kqview_lacks():
    flags = [row.flag for row in rows_of(Settings).values()]
    assert [of(f"{flag}=1")[0].split()[0] for flag in flags] == flags
