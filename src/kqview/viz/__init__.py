"""Pictures of attention. Importing this package pulls in no drawing library."""

from kqview.viz.heatmap import heatmap
from kqview.viz.overhead import overhead_plot

__all__ = ["heatmap", "overhead_plot"]
