"""Prints the stub of the extension module, src/kqview/_core.pyi, with one line for each field.

nanobind's own generator writes a property for each, and another one for its setter.
"""

import sys
from typing import Any

from nanobind.stubgen import StubGen

from kqview import _core


class FieldStub(StubGen):
    """Writes ``name: type``, which is Final unless Python may set it."""

    def put_property(self, prop: Any, name: str | None) -> None:
        signature, doc, *_ = prop.fget.__nb_signature__[0]
        kind = self.simplify_types(signature.partition(" -> ")[2])
        if prop.fset is None:
            kind = f"{self.bind('typing', 'Final')}[{kind}]"
        self.write_ln(f"{name}: {kind}")
        if doc:
            self.put_docstr(doc)

    def put_docstr(self, docstr: str) -> None:
        if "\n" in docstr or len(docstr) > 86:
            super().put_docstr(docstr)
        else:
            self.write_ln(f'"""{docstr}"""')


stub = FieldStub(_core, include_private=True)
stub.put(_core)
sys.stdout.write(stub.get())
