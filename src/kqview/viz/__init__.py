"""Pictures of attention. Importing this package pulls in no drawing library."""

from kqview.viz.figures import heatmap, overhead_plot

__all__ = ["heatmap", "overhead_plot"]
