"""Pictures of attention: heat maps as a figure and in a terminal, the plot of overheads."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from kqview import Capture, Token
from kqview.bench.pairs import Pairs
from kqview.bench.records import SweepRow
from kqview.errors import InvalidCapture, KqviewError, RequestError
from kqview.viz import head_grid, heatmap, overhead_plot
from kqview.viz.source import N_LATEST, probabilities, select_head
from kqview.viz.terminal import RAMP, TerminalHeatmap

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

pytestmark = pytest.mark.full

PROMPT = ["<s>", "Anna", " has", " a", " red", " ball", "."]


def tokens(n: int, n_prompt: int = len(PROMPT), **capture: Any) -> list[Token]:
    """Tokens whose attention is (2 layers, 3 heads, context) of distinct values."""
    made: list[Token] = []
    for i in range(n):
        shape = (2, 3, n_prompt + i)
        attention = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * i
        made.append(Token(id=i, text=f" t{i}", index=i, attention=attention / 1000))
        if capture:
            made[-1].capture = Capture(**capture)
    return made


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def cells(figure: Figure) -> np.ma.MaskedArray[Any, Any]:
    return np.ma.asarray(axes_of(figure).images[0].get_array())


def labels(figure: Figure) -> tuple[list[str], list[str]]:
    axes = axes_of(figure)
    return [t.get_text() for t in axes.get_yticklabels()], [
        t.get_text() for t in axes.get_xticklabels()
    ]


def test_every_value_of_the_chosen_head_is_in_its_cell():
    made = tokens(3)
    figure = heatmap(made, PROMPT, layer=1, head=2)
    drawn = cells(figure)
    assert labels(figure) == (
        ["t0", "t1", "t2"], ["<s>", "Anna", "has", "a", "red", "ball", ".", "t0", "t1"]
    )  # fmt: skip
    assert drawn.shape == (3, 9)
    for i, token in enumerate(made):
        assert isinstance(token.attention, np.ndarray)
        np.testing.assert_array_equal(drawn[i, : 7 + i].data, token.attention[1, 2])
        assert drawn.mask[i].tolist() == [column >= 7 + i for column in range(9)]


def test_columns_without_texts_show_their_positions():
    _, columns = labels(heatmap(tokens(2), layer=0, head=0))
    assert columns == ["0", "1", "2", "3", "4", "5", "6", "t0"]


def test_texts_of_the_whole_sequence_are_taken_as_they_are():
    _, columns = labels(heatmap(tokens(2), [*PROMPT, "own", "own"], layer=0, head=0))
    assert columns[-1] == "own"


def test_sharpest_head_is_drawn_unless_one_is_named():
    made = tokens(6)
    for token in made:
        assert isinstance(token.attention, np.ndarray)
        token.attention[:] = 0.0
        token.attention[..., 0] = 1.0
        token.attention[1, 0] = 0.0
        token.attention[1, 0, 2] = 1.0
    figure = heatmap(made, PROMPT)
    assert cells(figure)[:, 2].tolist() == [1.0] * 6
    assert figure.get_suptitle().startswith("layer 1, head 0")
    assert cells(heatmap(made, PROMPT, layer=0))[:, 0].tolist() == [1.0] * 6


def test_layers_and_heads_are_those_of_the_model_not_of_the_rows():
    made = tokens(2, layers=(5, 9), heads=(0, 2, 7), kind="probs")
    figure = heatmap(made, PROMPT, layer=9, head=2)
    assert figure.get_suptitle().startswith("layer 9, head 2")
    drawn = cells(figure)
    np.testing.assert_array_equal(drawn[0, :7], made[0].rows[1, 1])
    np.testing.assert_array_equal(cells(heatmap(made, PROMPT, layer=-1, head=2)), drawn)
    for place in ({"layer": 1}, {"head": 1}, {"layer": -3}):
        with pytest.raises(InvalidCapture, match=r"not captured; there are \[(5, 9|0, 2, 7)\]"):
            heatmap(made, PROMPT, **place)  # pyright: ignore[reportArgumentType]
    array = np.ones((2, 3, 4, 7))
    for place in ({"layer": 2}, {"head": 3}, {"layer": -3}, {"layer": 0, "head": -4}):
        with pytest.raises(InvalidCapture, match=r"out of range; there are [23]"):
            heatmap(array, **place)  # pyright: ignore[reportArgumentType]
    for wrong in ("x", 1.5, True):
        with pytest.raises(RequestError, match="layer must be the index"):
            heatmap(array, layer=wrong)  # pyright: ignore[reportArgumentType]


def test_first_column_can_be_hidden_from_the_picture_and_its_scale():
    array = np.full((2, 4), 0.1)
    array[:, 0] = 0.7
    drawn = heatmap(array, causal=False, hide_first=True)
    assert cells(drawn).mask[:, 0].all()
    assert not cells(drawn).mask[:, 1:].any()
    assert axes_of(drawn).images[0].get_clim() == (0.0, 0.1)


def test_heat_map_can_be_drawn_into_axes_of_another_figure():
    from matplotlib.figure import Figure

    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert heatmap(tokens(2), PROMPT, layer=0, head=1, ax=second, title="T") is figure
    assert second.get_title(loc="left") == "T"
    assert (len(first.images), len(second.images)) == (0, 1)


def test_viz_is_reachable_after_importing_the_package_alone():
    code = "import sys, kqview; print('kqview.viz' in sys.modules, kqview.viz.heatmap.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False heatmap\n"


def test_array_of_a_prompt_shows_its_last_queries_and_nothing_beyond_them():
    array = np.random.default_rng(0).random((2, 3, 4, 7))
    figure = heatmap(array, PROMPT, layer=1, head=0)
    drawn = cells(figure)
    np.testing.assert_array_equal(drawn.data[~drawn.mask], array[1, 0][~drawn.mask])
    assert drawn.mask.tolist() == [[c > 3 + r for c in range(7)] for r in range(4)]
    assert labels(figure)[0] == ["a", "red", "ball", "."]
    assert not cells(heatmap(array, PROMPT, layer=1, head=0, causal=False)).mask.any()


def test_matrix_has_no_head_to_choose():
    matrix = np.tril(np.random.default_rng(0).random((3, 3)))
    drawn = cells(heatmap(matrix))
    np.testing.assert_array_equal(drawn.filled(0.0), matrix)
    with pytest.raises(ValueError, match="omit both"):
        heatmap(matrix, layer=0)
    with pytest.raises(RequestError, match="use heatmap"):
        head_grid(matrix)


def test_object_with_an_array_is_drawn_like_its_array():
    array = np.random.default_rng(0).random((2, 3, 4, 7))

    class Rows:
        def array(self) -> Any:
            return array

    class Layers:
        def array(self) -> Any:
            return tuple(array)

    expected = cells(heatmap(array, PROMPT, layer=1, head=2))
    for source in (Rows(), Layers()):
        drawn = cells(heatmap(source, PROMPT, layer=1, head=2))
        np.testing.assert_array_equal(drawn.filled(-1), expected.filled(-1))


def test_reduced_rows_are_drawn_as_they_are():
    made = tokens(2)
    for token in made:
        assert isinstance(token.attention, np.ndarray)
        token.attention = token.attention.mean(axis=(0, 1))
    np.testing.assert_array_equal(cells(heatmap(made, PROMPT))[0, :7], made[0].attention)
    made = tokens(2)
    for token in made:
        assert isinstance(token.attention, np.ndarray)
        token.attention = token.attention.mean(axis=1)
    assert isinstance(made[0].attention, np.ndarray)
    drawn = cells(heatmap(made, PROMPT, layer=1, head=0))
    np.testing.assert_array_equal(drawn[0, :7], made[0].attention[1])


def test_layers_with_different_heads_are_found_by_their_index():
    token = Token(0, "x", 0, attention=(np.zeros((1, 7)), np.full((4, 7), 0.5)))
    assert cells(heatmap([token], PROMPT, layer=1, head=3)).tolist() == [[0.5] * 7]


def test_probabilities_are_white_at_zero_and_others_are_white_between_the_signs():
    def colour(figure: Figure, value: float) -> tuple[float, ...]:
        image = axes_of(figure).images[0]
        return tuple(np.round(image.to_rgba(value)[:3], 2))

    made = tokens(2)
    assert colour(heatmap(made, PROMPT, layer=0, head=0), 0.0) == (1.0, 1.0, 1.0)
    signed = heatmap(np.array([[-2.0, 0.0, 1.0]]), kind="logits")
    assert axes_of(signed).images[0].get_clim() == (-2.0, 2.0)
    assert min(colour(signed, 0.0)) > 0.95
    own = heatmap(tokens(1, kind="logits"), PROMPT, layer=0, head=0)
    assert axes_of(own).images[0].get_clim()[0] < 0


def test_labels_are_short_on_one_line_and_never_formulas(tmp_path: Path):
    texts = ["\n", " $x_1$", "\x1b[2J", "a" * 40, " "]
    figure = heatmap(np.eye(5), texts)
    assert labels(figure)[1] == ["↵", "$x_1$", r"\x1b[2J", "a" * 13 + "…", "␣"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("attention", "texts", "message"),
    [
        # What both kinds of pictures refuse: test_coloured.py.
        ([Token(0, "x", 0)], None, "no rows"),
        (np.ones((2, 3)), ["a"] * 4, "tokens has 4 .* 3 columns"),
    ],
)
def test_what_cannot_be_drawn_is_refused(attention: Any, texts: Any, message: str):
    with pytest.raises(ValueError, match=message):
        heatmap(attention, texts)


def test_sums_over_spans_are_refused():
    capture = Capture("probs", spans=[(0, 2)])
    token = Token(0, "x", 0, attention=np.ones((1, 1, 1)), capture=capture)
    with pytest.raises(ValueError, match="capture without spans"):
        heatmap([token], PROMPT)


def test_rows_cut_to_their_largest_values_are_refused():
    token = Token(0, "x", 0, attention=np.ones((1, 1, 2)))
    token.attention_positions = np.zeros((1, 1, 2), np.int32)
    with pytest.raises(ValueError, match="capture without top_k"):
        heatmap([token])


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KqviewError, match=r'pip install "kqview\[viz\]"'):
        heatmap(np.ones((2, 2)))


# ---- grid of heads


def squares(figure: Figure, n_layers: int, n_heads: int) -> np.ndarray[Any, Any]:
    """Brightness of the pixels of each head, ``(n_layers, n_heads, height, width)``; 1 is white."""
    picture = np.asarray(axes_of(figure).images[0].get_array())
    high, wide = picture.shape[0] // n_layers, picture.shape[1] // n_heads
    assert picture.shape[:2] == (n_layers * high, n_heads * wide)
    grey = np.where(picture[..., 3] > 0, picture[..., :3].mean(axis=-1), np.nan)
    return grey.reshape(n_layers, high, n_heads, wide).swapaxes(1, 2)


def heads_that_look(array: np.ndarray[Any, Any]) -> None:
    """Let head h of layer l look at column l + h + 1 in every row."""
    array[..., 0] = 1.0
    for layer in range(array.shape[0]):
        for head in range(array.shape[1]):
            array[layer, head, :, layer + head + 1] = 0.5


def test_grid_has_a_square_for_each_head_with_its_own_pattern():
    array = np.zeros((2, 3, 4, 8))
    heads_that_look(array)
    figure = head_grid(array)
    seen = squares(figure, 2, 3)
    assert labels(figure) == (["0", "1"], ["0", "1", "2"])
    for layer in range(2):
        for head in range(3):
            square = seen[layer, head]
            inside = square[~np.isnan(square).all(axis=1)][:, ~np.isnan(square).all(axis=0)]
            assert inside.shape == (4, 8)
            darkest = np.argwhere(inside < 0.3)
            assert {tuple(at) for at in darkest} == {(row, layer + head + 1) for row in range(4)}


def test_grid_draws_the_layers_and_heads_of_the_model_that_are_named():
    made = tokens(2, layers=(5, 9), heads=(0, 2, 7), kind="probs")
    figure = head_grid(made, layers=[9], heads=[7, 0])
    assert labels(figure) == (["9"], ["7", "0"])
    assert squares(figure, 1, 2).shape[:2] == (1, 2)
    with pytest.raises(InvalidCapture, match=r"layer 1 was not captured; there are \[5, 9\]"):
        head_grid(made, layers=[1])
    with pytest.raises(InvalidCapture, match="head 3 is out of range; there are 3"):
        head_grid(np.ones((2, 3, 4, 7)), heads=[3])
    with pytest.raises(ValueError, match="layers is empty"):
        head_grid(made, layers=[])


def test_squares_have_a_scale_each_unless_they_share_one():
    array = np.zeros((1, 2, 1, 3))
    array[0, 0, 0, 1] = 0.9
    array[0, 1, 0, 1] = 0.1
    own, shared = head_grid(array), head_grid(array, shared_scale=True)
    assert np.nanmin(squares(own, 1, 2)[0, 1]) < 0.3
    assert np.nanmin(squares(shared, 1, 2)[0, 1]) > 0.8
    assert len(own.axes) == 1
    bar = shared.axes[1]
    assert bar.get_ylim() == pytest.approx((0.0, 0.9))


def test_long_rows_keep_their_lines_in_a_small_square():
    array = np.zeros((1, 1, 300, 1000))
    for row in range(300):
        array[0, 0, row, 500 + row] = 1.0
    square = squares(head_grid(array, causal=False), 1, 1)[0, 0]
    inside = square[~np.isnan(square).all(axis=1)][:, ~np.isnan(square).all(axis=0)]
    assert inside.shape == (64, 64)
    assert all((line < 0.3).any() for line in inside)


def test_layers_with_fewer_heads_leave_squares_empty():
    token = Token(0, "x", 0, attention=(np.zeros((1, 7)), np.full((4, 7), 0.5)))
    seen = squares(head_grid([token]), 2, 4)
    assert [np.isnan(one).all() for one in seen[0]] == [False, True, True, True]
    assert not any(np.isnan(one).all() for one in seen[1])


def test_scores_are_drawn_around_white():
    array = np.array([[[[-2.0, 0.0, 1.0, -np.inf]]]])
    square = squares(head_grid(array, kind="scores", causal=False, hide_first=False), 1, 1)[0, 0]
    low, middle, high, _ = square[~np.isnan(square)]
    assert middle > 0.95 > max(low, high)


# ---- overhead plot


def record(capture: str, n_context: int, ratio: float, *, flash: bool = True) -> dict[str, Any]:
    pairs = Pairs([10.0] * 5, [10.0 * ratio] * 5)
    return {"cpu": "chip", **SweepRow(capture, flash, n_context, 0, pairs).to_record()}


RECORDS = [
    record("off", 256, 1.01), record("off", 1024, 1.0), record("logits", 256, 1.03),
    record("logits", 1024, 1.05), record("probs", 1024, 1.07),
    record("logits", 256, 1.2, flash=False),
]  # fmt: skip


def heights(figure: Any, panel: int, capture: str) -> list[float]:
    (bars,) = [c for c in figure.axes[panel].containers if c.get_label() == capture]
    return [round(float(y), 6) for y in bars.lines[0].get_ydata()]


def test_line_has_the_median_of_each_context_in_percent():
    figure = overhead_plot(RECORDS)
    assert heights(figure, 0, "logits") == [3.0, 5.0]
    assert heights(figure, 0, "probs") == [7.0]
    assert heights(figure, 1, "logits") == [20.0]
    assert [axes.get_title("left") for axes in figure.axes] == [
        "flash attention on", "flash attention off",
    ]  # fmt: skip


def test_records_without_a_sweep_are_refused():
    with pytest.raises(ValueError, match="none of 1 records is a row of a sweep"):
        overhead_plot([{"row": "decode-flash-logits"}])


# ---- terminal


def rendered(picture: TerminalHeatmap, *, width: int = 60, color: str | None = None) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=color, force_terminal=color is not None, no_color=False
    )
    console.print(picture)
    return file.getvalue()


def growing_rows(n_rows: int, n_first: int) -> list[np.ndarray]:
    return [np.full(n_first + i, 1.0 / (n_first + i), np.float32) for i in range(n_rows)]


def numbered(n: int) -> list[str]:
    return [f"t{i}" for i in range(n)]


def test_terminal_heatmap_without_colour_draws_levels_as_characters():
    picture = TerminalHeatmap([np.array([0.0, 1.0, 0.25])], ["row"], numbered(3), width=60)
    lines = rendered(picture).splitlines()
    assert lines[1] == f"row   {RAMP[-1] * 2}{RAMP[5] * 2}"


def test_terminal_heatmap_row_ends_at_its_own_context():
    picture = TerminalHeatmap(growing_rows(3, 4), numbered(3), numbered(6), width=60)
    lines = rendered(picture).splitlines()[1:4]
    assert [len(line) for line in lines] == [3 + 2 * n for n in (4, 5, 6)]


def test_terminal_heatmap_with_colour_gives_each_level_its_own_background():
    picture = TerminalHeatmap([np.array([0.0, 0.5, 1.0])], ["r"], numbered(3), width=60)
    backgrounds = re.findall(r"48;2;(\d+;\d+;\d+)m", rendered(picture, color="truecolor"))
    assert backgrounds == ["12;8;38", *backgrounds[1:2], "252;255;164"]
    assert len(set(backgrounds)) == 3


def test_terminal_heatmap_wider_than_the_terminal_shows_the_most_attended_columns():
    row = np.full(200, 0.1 / 197, np.float32)
    row[[3, 120, 199]] = 0.3
    picture = TerminalHeatmap([row], ["row"], numbered(200), width=20)
    output = rendered(picture, width=200)
    assert {3, 120, 199} <= set(picture.shown)
    assert len(picture.shown) == 20 - len("row ")
    assert "16 of 200 context tokens fit" in output
    for column in (3, 120, 199):
        assert f'"t{column}" at {column} (30%)' in output


@pytest.mark.parametrize("width", [10, 40, 80])
def test_terminal_heatmap_lines_stay_within_the_width(width: int):
    picture = TerminalHeatmap(growing_rows(4, 50), numbered(4), numbered(53), width=width)
    assert max(map(len, rendered(picture, width=width).splitlines())) <= width


def test_terminal_heatmap_marks_sit_above_their_columns():
    row = np.array([0.0, 0.9, 0.0, 0.1])
    header, line, legend = rendered(
        TerminalHeatmap([row], ["r"], numbered(4), width=60)
    ).splitlines()
    assert line[header.index("a")] == RAMP[9]
    assert line[header.index("b")] == RAMP[3]
    assert legend.startswith('a = "t1" at 1 (90%)')


def test_terminal_heatmap_labels_cannot_steer_the_terminal():
    output = rendered(TerminalHeatmap([np.array([1.0])], ["\x1b[2J\n"], ["[bold]\t"], width=60))
    assert "\x1b" not in output
    assert r"\x1b[2J\n" in output
    assert r"[bold]\t" in output


def test_terminal_heatmap_refuses_too_few_labels():
    with pytest.raises(
        ValueError, match=r"1 row_labels and 2 column_labels .*1 rows and 3 columns"
    ):
        TerminalHeatmap([np.ones(3)], ["r"], numbered(2), width=60)


def attention(n_context: int, peaks: dict[tuple[int, int], int]) -> np.ndarray:
    """Rows of 2 layers x 3 heads that look at the first token, except where *peaks* says."""
    rows = np.zeros((2, 3, n_context), np.float32)
    for layer in range(2):
        for head in range(3):
            rows[layer, head, peaks.get((layer, head), 0)] = 1.0
    return rows


def test_select_head_prefers_the_one_that_looks_into_the_middle():
    rows = [attention(n, {(0, 1): n - 1, (1, 2): 5}) for n in range(12, 20)]
    assert select_head(rows) == (1, 2)


@pytest.mark.parametrize("n_back", range(1, N_LATEST + 1))
def test_select_head_ignores_the_latest_columns(n_back: int):
    rows = [attention(n, {(0, 0): n - n_back, (1, 1): n - N_LATEST - 1}) for n in range(12, 20)]
    assert select_head(rows) == (1, 1)


def test_select_head_keeps_to_the_layer_or_head_asked_for():
    rows = [attention(12, {(0, 1): 4, (1, 2): 5})]
    rows[0][0, 1] *= 0.5
    assert select_head(rows) == (1, 2)
    assert select_head(rows, layer=0) == (0, 1)
    assert select_head(rows, head=1) == (0, 1)
    assert select_head(rows, layer=1, head=0) == (1, 0)


def test_select_head_reads_layers_with_different_numbers_of_heads():
    sharp = np.zeros((4, 12), np.float32)
    sharp[3, 5] = 1.0
    assert select_head([(np.zeros((2, 12), np.float32), sharp)]) == (1, 3)


def test_select_head_of_short_rows_is_the_first_or_the_one_asked_for():
    rows = [attention(3, {})]
    assert select_head(rows) == (0, 0)
    assert select_head(rows, layer=1, head=2) == (1, 2)


def test_probabilities_of_probs_are_the_same_array():
    row = np.array([0.25, 0.75], np.float32)
    assert probabilities(row, "probs", 0.5) is row


@pytest.mark.parametrize(("kind", "factor"), [("logits", 0.5), ("scores", 1.0)])
def test_probabilities_of_logits_and_scores_are_their_softmax(kind: str, factor: float):
    values = np.array([[1.0, 2.0, -np.inf], [800.0, 0.0, 0.0]], np.float32)
    scores = values.astype(np.float64) * factor
    expected = np.exp(scores - 800 * factor * np.array([[0.0], [1.0]]))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities(values, kind, 0.5), expected, rtol=1e-12)
