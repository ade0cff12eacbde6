"""An object store that speaks S3's protocol: moto's, in this process."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def s3_bucket() -> Generator[str]:
    """URL of a new bucket, for this process and those it starts; skips without the packages."""
    client = pytest.importorskip("s3fs").S3FileSystem
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "any")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            bucket = f"corpora-{os.urandom(4).hex()}"
            client.clear_instance_cache()  # of another server
            client().mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        server.stop()
