"""Pictures of attention. Importing this package loads no drawing library."""

from kqview.viz.figures import heatmap, overhead_plot

__all__ = ["heatmap", "overhead_plot"]
