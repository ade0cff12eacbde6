"""Body: a request's body while it arrives, in memory at first and in a file without a name beyond.

Clients may take their time over megabytes; until the whole is there nothing of it has to be in
memory. It belongs to the event loop, `read` to any thread.
"""

import contextlib
import tempfile
from typing import Final

from kqview.errors import CapacityError

SPILL_BYTES: Final = 2**20
"""More than this goes to the folder for temporary files (``TMPDIR``)."""


class Body:
    """Bytes in the order in which they came; a context manager that lets go of them."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=SPILL_BYTES)  # noqa: SIM115 (closed by `close`)
        self.n_bytes = 0

    def __len__(self) -> int:
        return self.n_bytes

    def add(self, part: bytes) -> None:
        """Put *part* behind what is there.

        Raises:
            CapacityError: There is no room on the disk.
        """
        self.n_bytes += len(part)
        try:
            self._file.write(part)
        except OSError as error:
            raise self._no_room(error) from error

    def read(self) -> bytes:
        """All of it; raises as `add`, for what was written late."""
        try:
            self._file.seek(0)
            return self._file.read()
        except OSError as error:
            raise self._no_room(error) from error

    def close(self) -> None:
        """Let go of it; idempotent."""
        with contextlib.suppress(OSError):  # what was not written does not matter any more
            self._file.close()

    def _no_room(self, error: OSError) -> CapacityError:
        return CapacityError(
            f"request.body: {self.n_bytes} bytes do not fit into the folder for temporary files "
            f"({error.strerror}); make room in it, or set TMPDIR to another one"
        )

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
