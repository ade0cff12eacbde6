"""Join one object per level of the processor, so that one module can hold them all.

cpu_variants.cmake compiles the same sources once for each level. Here each level's objects become
one object that defines only functions that the rest of the module calls, under names of that level;
all else becomes local. The linker then cannot mix levels: of the templates and inline functions
that several objects define it keeps any one, which might be the one with instructions that this
processor lacks. The functions' own names become jumps through a table (cpp/base/cpu_variant.h).

    cpu_variants.py OUT PROCESSOR LD NM OBJCOPY OUTSIDE LEVEL...

OUTSIDE is a file that lists the rest's objects and archives, one a line. LEVEL is a name, a
condition in C, and a file that lists the level's objects, joined by "|"; the lowest comes first.
Writes OUT/<name>.o for each and OUT/cpu_variants.c.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# A jump through entry %d of the table, which keeps all arguments and the place to return to.
JUMPS = {
    "x86_64": "jmp *kqview_cpu_functions+%d(%%rip)",
    "aarch64": (
        r"adrp x16, kqview_cpu_functions+%d\n"
        r"ldr x16, [x16, :lo12:kqview_cpu_functions+%d]\n"
        r"br x16"
    ),
}
POINTER_BYTES = 8

HEADER = r"""/* Written by vendor/cpu_variants.py. */
#if defined(__aarch64__)
#include <sys/auxv.h>
static int kqview_has_hwcap(unsigned long word, unsigned long bit) {
    return (getauxval(word) & bit) != 0;
}
#else
#include <cpuid.h>
static int kqview_has_cpuid(unsigned leaf, unsigned subleaf, int i, unsigned bits, unsigned saved) {
    unsigned found[4] = {0}, xcr0 = 0;
    if (saved) {
        if (!kqview_has_cpuid(1, 0, 2, 1u << 27, 0)) return 0; /* XGETBV */
        __asm__("xgetbv" : "=a"(xcr0) : "c"(0) : "edx");
    }
    return __get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3]) &&
           (found[i] & bits) == bits && (xcr0 & saved) == saved;
}
#endif
typedef void (*function)(void);
struct kqview_cpu_level {
    const char* name;
    int (*is_supported)(void);
    const function* functions;
};
"""


@dataclass(frozen=True)
class Level:
    """The sources as compiled for one level of the processor."""

    name: str
    condition: str
    objects: list[str]

    @classmethod
    def read(cls, text: str) -> Level:
        """Read one argument of the command line."""
        name, condition, listing = text.split("|")
        return cls(name, condition, listed(listing))

    def own(self, symbol: str) -> str:
        """The level's own name of *symbol*."""
        return f"{symbol}.{self.name}"


def listed(path: str) -> list[str]:
    """The lines of a file that names files."""
    return Path(path).read_text("utf-8").split()


def run(*command: object) -> str:
    """Run a tool of the compiler; return what it prints."""
    return subprocess.run(list(map(str, command)), check=True, text=True, stdout=-1).stdout


def symbols(nm: str, kinds: str, files: list[str], *options: str) -> set[str]:
    """The symbols of *files* that nm prints with one of the letters *kinds*."""
    lines = (line.split() for line in run(nm, *options, *files).splitlines())
    return {fields[-1] for fields in lines if len(fields) >= 2 and fields[-2] in kinds}


def join(level: Level, called: list[str], out: Path, tools: tuple[str, str, str]) -> None:
    """Write the level's one object."""
    ld, nm, objcopy = tools
    joined, target = out / f"{level.name}.joined.o", out / f"{level.name}.o"
    # Without groups: a group's name stays the same however its symbols are renamed.
    run(ld, "-r", "--force-group-allocation", "-o", joined, *level.objects)
    renamed, kept = out / f"{level.name}.renamed", out / f"{level.name}.kept"
    renamed.write_text("".join(f"{name} {level.own(name)}\n" for name in called))
    # GNU's objcopy looks for the new names, LLVM's for the old ones.
    kept.write_text("".join(f"{name}\n{level.own(name)}\n" for name in called))
    run(objcopy, f"--redefine-syms={renamed}", f"--keep-global-symbols={kept}", joined, target)
    joined.unlink()
    # What runs when the module is loaded would run on every processor.
    if b".init_array" in target.read_bytes():
        raise SystemExit(f"{target}: an object is constructed before main; no level may have one")
    visible = symbols(nm, "ABCDGRSTVWiu", [str(target)], "--defined-only", "--extern-only")
    if visible != (wanted := {level.own(name) for name in called}):
        raise SystemExit(f"{target}: {sorted(visible ^ wanted)} should not be, or be, visible")


def table(levels: list[Level], called: list[str], jump: str) -> str:
    """The functions' own names, and what each level has for them, in C."""
    parts = [HEADER]
    for level in levels:
        name = level.name
        parts += [
            f'void {name}_{i}(void) __asm__("{level.own(symbol)}");\n'
            for i, symbol in enumerate(called)
        ]
        functions = ", ".join(f"{name}_{i}" for i in range(len(called)))
        parts.append(f"static const function {name}_functions[] = {{{functions}}};\n")
        parts.append(f"static int has_{name}(void) {{ return {level.condition}; }}\n")
    first = ", ".join(f"{levels[0].name}_{i}" for i in range(len(called)))
    rows = "".join(f'    {{"{x.name}", has_{x.name}, {x.name}_functions}},\n' for x in levels)
    parts += [
        f"function kqview_cpu_functions[] = {{{first}}};\n",
        f"const int kqview_n_cpu_functions = {len(called)};\n",
        f"const struct kqview_cpu_level kqview_cpu_levels[] = {{\n{rows}}};\n",
        f"const int kqview_n_cpu_levels = {len(levels)};\n",
    ]
    for i, symbol in enumerate(called):
        at = jump.replace("%d", str(i * POINTER_BYTES)).replace("%%", "%")
        parts.append(
            f'__asm__(".text\\n.p2align 4\\n.globl {symbol}\\n.hidden {symbol}\\n"\n'
            f'        ".type {symbol}, %function\\n{symbol}:\\n{at}\\n"\n'
            f'        ".size {symbol}, .-{symbol}\\n");\n'
        )
    return "".join(parts)


def main(argv: list[str]) -> None:
    """Run the command line."""
    out, processor, ld, nm, objcopy, outside, *rest = argv
    levels = [Level.read(text) for text in rest]
    Path(out).mkdir(parents=True, exist_ok=True)
    wanted = symbols(nm, "U", listed(outside), "--undefined-only")
    called = sorted(wanted & symbols(nm, "T", levels[0].objects, "--defined-only"))
    for level in levels:
        join(level, called, Path(out), (ld, nm, objcopy))
    text = table(levels, called, JUMPS[processor])
    (Path(out) / "cpu_variants.c").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
