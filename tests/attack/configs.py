"""Hostile configuration files: numbers, tables and texts that TOML allows and a reader trips over.

A file is read, or refused with a `WrongConfig` that is no longer than a screen or two; what was
read can be shown. Nothing else may come of it, and it does not take long.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path

from kqview.server.config import Config
from kqview.server.config_file import ENVIRONMENT, WrongConfig, load
from kqview.server.config_text import effective, effective_values
from kqview.server.settings import PREFIX, Settings
from tests.attack.summary import Summary, main

WITHIN_S = 20.0
MOST_MESSAGE = 100_000
SETTINGS = tuple(one.name for one in dataclasses.fields(Settings))
TABLES = (
    "server", *Config.__struct_fields__[1:], "models.a", "models.a.passport.sampling",
    "models.a.system_prompt", "llm.prompt.harmony", "llm.reasoning_presets.fast", "x",
)  # fmt: skip
KEYS = (
    *SETTINGS, "path", "role", "lora", "text", "file", "ttl_s", "mode", "temperature", "top_k",
    "max_tokens", "analysis_tag", "capabilities", "",
)  # fmt: skip
SIZES = (1, 19, 20, 40, 300, 4299, 4300, 4301, 20_000)


def number(rng: random.Random) -> str:
    """A number as TOML writes it, most of them beyond what something can hold."""
    n = rng.choice(SIZES)
    sign = rng.choice(["", "", "-", "+"])
    return rng.choice(
        [
            sign + "9" * n,
            sign + "1" + "_1" * n,
            "0x" + "f" * n,
            "0b" + "1" * n,
            "0o" + "7" * n,
            sign + "9" * n + ".5",
            f"{sign}1e{'9' * n}",
            f"{sign}1e-{n}",
            sign + rng.choice(["inf", "nan", "0", "0.0", "2147483648", "9223372036854775808"]),
        ]
    )


def value(rng: random.Random, depth: int = 0) -> str:
    """Anything, right or wrong."""
    kind = rng.randrange(12)
    if kind < 4:
        return number(rng)
    if kind == 4:
        texts = ["", "a", "\0", "a\0b", "~nobody/x", "/", ".", "é", "x" * 5000, "\x7f", "demo"]
        return json.dumps(rng.choice(texts))
    if kind == 5:
        dates = ["0000-01-01", "9999-12-31", "2024-02-30", "2024-01-01T00:00:00+23:59", "25:00:00"]
        return rng.choice([*dates, "1979-05-27T00:32:00.999999999999-07:00", "00:00:60"])
    if kind == 6:
        n = rng.choice([10, 63, 64, 65, 300, 2000])
        return rng.choice(["[" * n + "]" * n, "{a=" * n + "1" + "}" * n, "[" * n])
    if kind == 7:
        return "{file = " + value(rng, 9) + "}"
    if kind == 8 and depth < 3:
        return "[" + ",\n".join(value(rng, depth + 1) for _ in range(rng.randrange(4))) + "]"
    return rng.choice(["true", "false", "", '"""', "'''a'''", '"\\ud800"', '"\\U00110000"', "#"])


def document(rng: random.Random) -> bytes:
    """One file."""
    lines: list[str] = []
    for _ in range(rng.randrange(1, 5)):
        table = rng.choice(TABLES) + ".a" * rng.choice([0, 0, 0, 0, 1, 70, 1500])
        lines.append(rng.choice(["[{}]", "[{}]", "[{}]", "[[{}]]", "{} = 1"]).format(table))
        for _ in range(rng.choice([0, 1, 2, 5])):
            key = rng.choice(KEYS) or json.dumps(rng.choice(["", "\0", "a.b", "é"]))
            lines.append(f"{key}{'.a' * rng.choice([0] * 9 + [70])} = {value(rng)}")
    if rng.random() < 0.05:
        lines += [f"k{i} = {i}" for i in range(2000)]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        noise = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        data = bytes(noise)
    return data


def read(path: Path, rng: random.Random, summary: Summary) -> None:
    """Read one file, sometimes with a variable beside it."""
    name = rng.choice(SETTINGS)
    environ = {PREFIX + name.upper(): number(rng)} if rng.random() < 0.2 else {}
    try:
        loaded = load(path, environ=environ)
        effective(loaded), effective_values(loaded), loaded.problems_of_files()
        summary.count("read")
    except WrongConfig as error:
        summary.count("WrongConfig")
        if len(str(error)) > MOST_MESSAGE:
            summary.fail(f"a message of {len(str(error))} characters: {path.read_bytes()[:300]!r}")
    except Exception as error:
        shown = f"{path.read_bytes()[:300]!r} {environ!r}"
        summary.fail(f"{type(error).__name__}: {str(error)[:200]} of {shown[:600]}")


def run(seconds: float, seed: int) -> Summary:
    """Read for *seconds*."""
    summary = Summary("configs", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{ENVIRONMENT}.toml")
        while time.monotonic() < ends_s:
            path.write_bytes(document(rng))
            started_s = time.monotonic()
            read(path, rng, summary)
            if (took_s := time.monotonic() - started_s) > WITHIN_S:
                summary.fail(f"{took_s:.0f} s for {path.read_bytes()[:300]!r}")
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
