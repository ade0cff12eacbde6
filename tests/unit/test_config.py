"""Configuration files: what is read, from where, what is refused, and what is printed."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from kqview.cli.main import app
from kqview.demo import MODEL_PATH
from kqview.server import Settings
from kqview.server.config import (
    ChatSessions,
    Config,
    Flags,
    Llm,
    ModelConfig,
    Persona,
    SystemPrompt,
    Ui,
)
from kqview.server.config_file import WrongConfig, load
from kqview.server.config_text import all_keys
from kqview.server.settings_table import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration file."""

    def written(text: str) -> Path:
        path = tmp_path / "kqview.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def errors_of(path: Path, **given: Any) -> list[str]:
    """The text of each error."""
    with pytest.raises(WrongConfig) as caught:
        load(path, **given)
    assert all(one.where.startswith(str(path)) for one in caught.value.problems)
    return [one.text for one in caught.value.problems]


# ---- what is read


def test_file_has_every_table(write: Write, tmp_path: Path):
    path = write("""
[server]
n_slots = 2
rate_limit = 5
aliases = []
sampling = ["temperature=0.5"]
[models.big]
path = "big.gguf"
capabilities = ["chat", "plan"]
n_ctx = 4096
lora = ["a.gguf:0.5"]
flags = {experimental = true}
system_prompt = {text = "Be brief."}
[models.big.passport]
version = 3
sampling.temperature = 0.3
[models."small one"]
path = "/models/small.gguf"
[llm]
stop = ["END"]
postproc.reasoning.marker = "###"
[llm.reasoning_presets.fast]
reasoning_max_tokens = 16
[sessions]
ttl_s = 60
[ui]
mode = "admin"
[persona]
file = "persona.md"
""")
    config = load(path).config
    assert config.settings == Settings(n_slots=2, rate_limit=5, sampling=("temperature=0.5",))
    assert list(config.models) == ["big", "small one"]
    big = config.models["big"]
    assert (big.path, big.n_ctx, big.flags) == (
        str(tmp_path / "big.gguf"), 4096, Flags(experimental=True),
    )  # fmt: skip
    assert big.lora == (str(tmp_path / "a.gguf:0.5"),)
    assert (big.passport.version, big.passport.sampling) == (3, {"temperature": 0.3})
    assert big.system_prompt == SystemPrompt(text="Be brief.")
    assert config.models["small one"] == ModelConfig(path="/models/small.gguf")
    assert config.llm.postproc.reasoning.marker == "###"
    assert config.llm.reasoning_presets == {"fast": {"reasoning_max_tokens": 16}}
    assert config.sessions == ChatSessions(ttl_s=60)
    assert config.ui == Ui(mode="admin")
    assert config.persona == Persona(file=str(tmp_path / "persona.md"))


def test_without_a_file_a_configuration_is_that_of_its_settings():
    loaded = load(environ={"KQVIEW_MODEL": "m.gguf"}, flags={"n_slots": 3, "port": None})
    assert loaded.config == Config.of(Settings(model="m.gguf", n_slots=3))
    assert load().config.models == {}


def test_flag_wins_over_environment_over_file_over_default(write: Write):
    path = write("[server]\nport = 1\nn_slots = 2\nmax_tokens = 3\n")
    loaded = load(
        path,
        environ={"KQVIEW_PORT": "10", "KQVIEW_N_SLOTS": "20", "KQVIEW_N_CTX": "30"},
        flags={"port": 100, "n_ctx": 512, "kv_type": "q8_0", "n_threads": 7},
        variables={"n_ctx": "LLAMA_ARG_CTX_SIZE", "n_threads": "LLAMA_ARG_THREADS"},
    )
    expected = {
        "port": (100, "flag --port"),
        "n_slots": (20, "environment KQVIEW_N_SLOTS"),
        "max_tokens": (3, f"{path}"),
        "n_ctx": (30, "environment KQVIEW_N_CTX"),  # wins over another program's variable
        "n_threads": (7, "environment LLAMA_ARG_THREADS"),
        "kv_type": ("q8_0", "flag --kv-type"),
        "host": ("127.0.0.1", "default"),
    }
    settings = loaded.config.settings
    assert {
        name: (getattr(settings, name), str(loaded.origin("server", name))) for name in expected
    } == expected


def test_every_setting_is_a_key_and_its_flag_is_explained(write: Write):
    values = {
        "model": '"m.gguf"', "demo": "false", "cors_origins": '["*"]', "sampling": "[]",
        "allowed_hosts": '["a.org"]', "trusted_proxies": '["10.0.0.1"]', "host": '"::1"',
    }  # fmt: skip
    lines: list[str] = []
    for spec in dataclasses.fields(Settings):
        default = spec.default
        value = json.dumps(list(default) if isinstance(default, tuple) else default)
        lines.append(f"{spec.name} = {values.get(spec.name, value)}")
    given = [line for line in lines if not line.endswith("= null")]
    assert len(given) > 40
    load(write("\n".join(["[server]", *given])))
    for row in rows_of(Settings).values():
        word = row.flag.removeprefix("--")
        if word != row.name:
            [error] = errors_of(write(f"[server]\n{word} = 1"))
            assert error == f'no key "{word}" in [server]; it is {row.name}'


# ---- keys and texts in files


def test_keys_and_templates_are_read_from_files_beside_the_file(write: Write, tmp_path: Path):
    (tmp_path / "keys").write_text("# ours\nfirst\n\n  second \n")
    (tmp_path / "one").write_text("alone\n")
    (tmp_path / "chat.jinja").write_text("{{ messages }}\n")
    path = write(
        '[server]\napi_keys = {file = "keys"}\nadmin_keys = ["x", {file = "one"}]\n'
        'trace_key = {file = "one"}\nchat_template = {file = "chat.jinja"}\n'
        '[models.a]\nchat_template = {file = "chat.jinja"}\n'
    )
    config = load(path).config
    assert config.settings.api_keys == ("first", "second")
    assert config.settings.admin_keys == ("x", "alone")
    assert config.settings.trace_key == "alone"
    assert config.settings.chat_template == "{{ messages }}\n"
    assert config.models["a"].chat_template == "{{ messages }}\n"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('{file = "none"}', "api_keys: {folder}/none cannot be read: No such file or directory"),
        ('{file = "empty"}', "api_keys: {folder}/empty has 0 keys; write one on each line"),
        ('{env = "KEY"}', 'api_keys is no text; write it, or {file = "FILE"}'),
        ('["secret key"]', "api_keys is ***; use printable ASCII without spaces"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_and_not_shown(
    value: str, error: str, write: Write, tmp_path: Path
):
    (tmp_path / "empty").write_text("# none yet\n")
    [found] = errors_of(write(f"[server]\n\napi_keys = {value}\n"))
    assert found.removeprefix("server.") == error.replace("{folder}", str(tmp_path))


# ---- errors


def test_system_prompt_is_read_from_its_file(write: Write, tmp_path: Path):
    path = write('[models.a]\nsystem_prompt = {file = "prompt.txt", version = 4}\n')
    [error] = errors_of(path)
    assert error == (
        f"models.a.system_prompt.file: {tmp_path}/prompt.txt cannot be read: "
        "No such file or directory"
    )
    (tmp_path / "prompt.txt").write_text("Be brief.\n")
    assert load(path).config.models["a"].system_prompt == SystemPrompt(
        text="Be brief.\n", version=4
    )


def test_all_errors_are_named_at_once_with_their_keys(write: Write):
    path = write("""\
port = 3
[server]
n_ctx = 0
max_tokns = 7
rate_limit = "x"
api_keys = ["a b", 3]
[models.big]
n_ctx = "x"
lora = ["a",
  3]
capability = []
system_prompt = {}
[models.big.passport.sampling]
temperature = -4
top_z = 3
[models.Big]
pinned = 3
[llm.prompt.harmony]
analysis_tag = "<a b>"
[llm.reasoning_presets.fast]
reasoning_max_tokens = "x"
[sessions]
ttl_s = -1
[ui]
mode = "root"
[unknown]
""")
    expected = [
        'no key "port" in the file; port belongs in [server]',
        'no key "unknown" in the file; known are server, models, llm, sessions, ui, persona',
        "n_ctx is 0; expected int >= 1",
        'no key "max_tokns" in [server]; is it max_tokens?',
        "rate_limit is 'x'; expected float, got str",
        "api_keys[1] is ***; ",
        "models.big.n_ctx is 'x'; expected int, got str",
        "models.big.lora[1] is 3; expected str, got int",
        'no key "capability" in [models.big]; is it capabilities?',
        "models.big.system_prompt needs text or file, and not both",
        "models.Big.pinned is 3; write true or false",
        "llm.prompt.harmony.analysis_tag is '<a b>'; write the name of a tag",
        "sessions.ttl_s is -1; expected float > 0",
        "ui.mode is 'root'; choose from admin, user",
        "llm.reasoning_presets.fast: reasoning_max_tokens must be a whole number",
        "models.big.passport.sampling: temperature must be a number of at least 0",
        "models.big.passport.sampling: top_z is no field of sampling",
        "models.Big and 'big' differ in case alone; rename one",
    ]
    for text, begin in zip(errors_of(path), expected, strict=True):
        assert text.startswith(begin)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"[server]\nport = \n", "Invalid value (at line 2"),
        (b"[server]\n[server]\n", "Cannot declare"),
        (b'[models.a]\npath = "a"\n[models.a]\n', "Cannot declare"),
        (b"[server]\nhost = '\xff'\n", "the file is no UTF-8"),
        (b"a = " + b"[" * 100_000, "tables are nested"),
        (b"#" * (4 * 2**20 + 1), "the file has more than 4194304 bytes"),
        (b"server = 3", "server is 3; write a table, [server]"),
        (b"[models]\nbig = 3", "models.big is 3; write a table, [models.big]"),
        # What Python's numbers, and its recursion, have limits for.
        (b"[server]\nport = " + b"9" * 4300, "server.port: the number is too large"),
        (b"[server]\nport = " + b"9" * 4301, "the number is too large"),
        (b"[server]\nport = -" + b"9_" * 9000 + b"9", "the number is too large"),
        (b"[ui]\nmode = [\n1,\n" + b"9" * 10**6 + b"]", "the number is too large"),
        (b"[server]\nport = 0x" + b"f" * 5000, "server.port: the number is too large"),
        (b"[server]\nrequest_timeout_s = 0b" + b"1" * 2000, "request_timeout_s: the number is too"),
        (b"[server]\nhost = -9223372036854775809", "server.host: the number is too large"),
        (
            b"[server]\nport = 9223372036854775807",
            "port is 9223372036854775807; expected int <=",
        ),
        (b"[server]\nrequest_timeout_s = 1e999", "request_timeout_s is inf; expected float <="),
        (b"[server]\nport = 0000-01-01T00:00:00Z", "Invalid date or datetime (at line 2"),
        (b"[server]\nport = 9999-12-31", "port is datetime.date(9999, 12, 31); expected int"),
        (b"[server.port" + b".a" * 3000 + b"]", "tables are nested"),
        (b"[server]\nport" + b".a" * 3000 + b" = 1", "tables are nested"),
        (b"[server]\nport = " + b"[" * 300 + b"]" * 300, "tables are nested"),
        (b"a = " + b"[" * 129 + b"]" * 129, "tables are nested too deeply, the limit is 128"),
        (b"[server]\nport = " + b"[" * 120 + b"]" * 120, "port is [[["),
        (b"[server]\nport = " + b"{a=" * 250 + b"1" + b"}" * 250, "tables are nested"),
        (b'[server]\napi_keys = {file = "a\\u0000b"}', "server.api_keys: "),
    ],
    ids=lambda value: value[:60] if isinstance(value, bytes) else None,
)
def test_text_that_is_no_configuration_is_refused(raw: bytes, error: str, tmp_path: Path):
    path = tmp_path / "kqview.toml"
    path.write_bytes(raw)
    [found] = errors_of(path)
    assert error in found


def test_brackets_in_comments_and_texts_are_no_nesting(write: Write):
    texts = ["'%s'", '"\\"%s"', "'''\n'%s'''", '"""\n"%s\\""""']
    for text in texts:
        [found] = errors_of(write(f"[server]\nport = {text % ('[' * 200)}  # don't {'[' * 200}\n"))
        assert found.startswith("port is "), found


def test_first_of_very_many_errors_are_named_and_the_others_counted(write: Write):
    found = errors_of(write("[server]\n" + "".join(f"key_{i} = 1\n" for i in range(3000))))
    assert 50 < len(found) < 200
    assert found[0].startswith('no key "key_0" in [server]; ')
    assert f"and {3000 - len(found) + 1} more errors" in found[-1]


def test_home_of_a_user_that_there_is_not_is_a_name_like_any_other(write: Write):
    path = write('[server]\ndemo = true\nmodels_dir = "~no-such-user/models"\n')
    assert load(path).config.settings.models_dir == str(path.parent / "~no-such-user/models")


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ('model = "c"', "model is 'c', which is no id in [models]: a, b; name one of them"),
        ("demo = true", "demo and [models] both say what to serve; leave demo out"),
        ('aliases = ["x"]', "aliases are names of a single model"),
        ('host = "0.0.0.0"', "0.0.0.0 can be reached from other machines"),
    ],
)
def test_settings_that_contradict_the_models_are_refused(server: str, error: str, write: Write):
    [found] = errors_of(write(f"[server]\n{server}\n[models.a]\n[models.b]\n"))
    assert found.startswith(error)


def test_model_setting_names_the_default_of_several(write: Write):
    path = write("[models.a]\n[models.b]\n")
    assert list(load(path).config.models) == ["a", "b"]
    for given in ({"flags": {"model": "b"}}, {"environ": {"KQVIEW_MODEL": "b"}}):
        config = load(path, **given).config
        assert list(config.models) == ["b", "a"]
        assert config.settings.model is None
    with pytest.raises(WrongConfig, match=r"--model: model is 'other\.gguf', which is no id"):
        load(path, flags={"model": "other.gguf"})


def test_wrong_variables_and_flags_are_named_beside_the_errors_of_the_file(write: Write):
    path = write("[server]\nport = -1\n")
    with pytest.raises(WrongConfig) as caught:
        load(path, environ={"KQVIEW_N_SLOTS": "x"}, flags={"max_tokens": 0})
    assert [str(one) for one in caught.value.problems] == [
        f"{path}: port is -1; expected int >= 0",
        "KQVIEW_N_SLOTS: n_slots is 'x'; expected int, got str",
        "--max-tokens: max_tokens is 0; expected int >= 1",
    ]


# ---- commands


def run(*words: str, **environ: str):
    return CliRunner().invoke(app, ["config", *words], env={"COLUMNS": "200", **environ})


def test_check_says_what_is_wrong_with_files(write: Write, tmp_path: Path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF?")
    (tmp_path / "persona").write_bytes(b"\xff")
    (tmp_path / "right.txt").write_text("Be brief.")
    path = write(f"""\
[server]
models_dir = "none"
mods_dir = "no.gguf"
ssl_certfile = "no.gguf"
[models.demo]
path = "{MODEL_PATH}"
system_prompt.file = "right.txt"
lora = ["no.gguf:0.5", "none.gguf"]
[models.broken]
path = "no.gguf"
[sessions]
database = "folder/db"
[persona]
file = "persona"
""")
    load(path)  # what is there when a server starts may differ
    result = run("check", str(path))
    assert result.exit_code == 1
    lines = [line.replace(f"{tmp_path}/", "") for line in result.stdout.splitlines()]
    assert [line.partition(" ")[0] for line in lines] == ["kqview.toml:"] * 7
    text = "\n".join(lines)
    assert "server.models_dir: none is no folder" in text
    assert "models.demo.lora[1]: there is no file none.gguf" in text
    assert "models.broken.path: " in text
    assert "sessions.database: folder/db: there is no folder folder" in text
    assert "persona.file: persona is no UTF-8" in text
    assert "ssl_certfile" in lines[2]


def test_check_of_a_right_file_exits_with_0_and_of_a_wrong_one_with_1(write: Write):
    result = run("check", str(write("[models.demo]\n")))
    assert (result.exit_code, result.stdout.endswith(": no errors\n")) == (0, True)
    result = run("check", str(write("[server]\nslots = 1\nports = 2\n")))
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 2
    assert run("check", "/nowhere/kqview.toml").exit_code == 1
    result = run("check", str(write("")), KQVIEW_LORA="none.gguf,none.gguf:2")
    assert result.stdout.splitlines() == [
        f"KQVIEW_LORA: server.lora[{i}]: there is no file none.gguf{scale}"
        for i, scale in enumerate(["", ":2"])
    ]


def test_show_has_origins_and_masks_keys(write: Write):
    path = write(
        '[server]\nn_slots = 2\napi_keys = ["s3cret", "0ther"]\n'
        '[models.demo]\n[llm.reasoning_presets."a b"]\ntemperature = 0.5\n'
    )
    words = ("--config", str(path), "--port", "8080", "-ub", "64")
    environ = {"KQVIEW_TRACE_KEY": "s3cret", "LLAMA_ARG_CTX_SIZE": "2048", "KQVIEW_MAX_MODS": "3"}
    result = run("show", *words, **environ)
    assert result.exit_code == 0, result.output
    assert "s3cret" not in result.output
    lines = [re.sub(" +", " ", line) for line in result.stdout.splitlines()]
    for line in (
        f"n_slots = 2 # {path}", f'api_keys = ["***", "***"] # {path}',
        'trace_key = "***" # environment KQVIEW_TRACE_KEY', "port = 8080 # flag --port",
        "ubatch_size = 64 # flag --ubatch-size",
        "max_mods = 3 # environment KQVIEW_MAX_MODS", "#n_threads = # default",
        "[models.demo]", '[llm.reasoning_presets."a b"]', f"temperature = 0.5 # {path}",
    ):  # fmt: skip
        assert line in lines
    [ctx] = [line for line in lines if line.startswith("n_ctx")]
    assert ctx.endswith("# environment LLAMA_ARG_CTX_SIZE")
    values = {
        one["key"]: one for one in json.loads(run("show", *words, "--json", **environ).stdout)
    }
    assert values["server.n_slots"] == {
        "key": "server.n_slots", "value": 2, "origin": "file", "where": str(path),
    }  # fmt: skip
    assert values["server.trace_key"]["value"] == "***"
    assert "s3cret" not in json.dumps(list(values.values()))


def test_shown_values_are_a_file_of_the_same_configuration(write: Write):
    text = '[server]\nn_slots = 2\n[models.demo]\nsystem_prompt.text = "a\\n\\"b\\" \\u007f"\n'
    shown = run("show", "--config", str(write(text))).stdout
    first = load(write(text)).config
    assert load(write(shown)).config == first


def test_init_prints_every_key_with_its_help_and_changes_nothing(write: Write):
    text = run("init").stdout
    assert text == all_keys()
    assert load(write(text)).config == Config(settings=Settings(), models={})
    for spec in dataclasses.fields(Settings):
        assert re.search(rf"^#{spec.name} =", text, re.M)
        assert " ".join(spec.metadata["help"].split())[1:40] in re.sub(r"\n# ", " ", text)


def test_init_uncommented_is_the_defaults(write: Write):
    text = all_keys()
    keys = re.sub(r"^#(?=\[|\w+ = )", "", text, flags=re.M)
    assert len(re.findall(r"^\w+ = ", keys, re.M)) > 60
    expected = Config(
        settings=Settings(), models={"ID": ModelConfig()}, llm=Llm(reasoning_presets={"ID": {}})
    )
    assert load(write(keys)).config == expected
    # Keys without a value are those whose default is none.
    left_out = set(re.findall(r"^#(\w+) =$", text[: text.index("[models.ID]")], re.M))
    assert left_out == {spec.name for spec in dataclasses.fields(Settings) if spec.default is None}
