"""Ray: corpora and servers on a cluster. Ray places, restarts and scales; kqview evaluates.

`extract` writes a corpus with actors of Ray Data; `kqview.ray.serve` has the deployment of the
server. Needs ray, the extra ``kqview[ray]``.
"""

from kqview.ray.extraction import extract

__all__ = ["extract"]
