"""Write what a wheel is made of (CycloneDX, PEP 770): sbom.py OUT NAME VERSION COMPONENT...

NAME and VERSION are the wheel's. COMPONENT is something that is linked into its library, as
cpp/licenses.cmake lists it: name, version, licence (SPDX) and package URL, joined by "|"; version
and URL may be empty. The same arguments give the same bytes: no time of day, no random number.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def component(name: str, version: str, licence: str, purl: str) -> dict[str, object]:
    """One component of CycloneDX."""
    found: dict[str, object] = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "licenses": [{"expression": licence}],
    }
    if version:
        found["version"] = version
    if purl:
        # A version that is none, such as that of a llama.cpp of the user's own, stays out of it.
        found["purl"] = f"{purl}@{version}" if re.fullmatch(r"[\w.+-]+", version) else purl
    return found


def bom(name: str, version: str, linked: list[str]) -> dict[str, object]:
    """The whole document."""
    parts = [component(*one.split("|")) for one in linked]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(name, version, "MIT", f"pkg:pypi/{name}")},
        "components": parts,
        "dependencies": [{"ref": name, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    out, name, version, *linked = argv
    Path(out).write_text(json.dumps(bom(name, version, linked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
