"""Pictures of attention. Importing this package loads no drawing library."""

from kqview.viz.figures import head_grid, heatmap, overhead_plot
from kqview.viz.tokens import ColouredText, coloured, to_html

__all__ = ["ColouredText", "coloured", "head_grid", "heatmap", "overhead_plot", "to_html"]
