"""The terminal heat map and the rule that chooses a head."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from kqview.viz.heads import N_LATEST, probabilities, select_head
from kqview.viz.terminal import RAMP, HeatMap, heat_map


def rendered(picture: HeatMap, *, width: int = 60, color: str | None = None) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=color, force_terminal=color is not None, no_color=False
    )
    console.print(picture)
    return file.getvalue()


def growing_rows(n_rows: int, n_first: int) -> list[np.ndarray]:
    return [np.full(n_first + i, 1.0 / (n_first + i), np.float32) for i in range(n_rows)]


def labels(n: int) -> list[str]:
    return [f"t{i}" for i in range(n)]


def test_heat_map_without_colour_draws_levels_as_characters():
    picture = heat_map([np.array([0.0, 1.0, 0.25])], ["row"], labels(3), width=60)
    lines = rendered(picture).splitlines()
    assert lines[1] == f"row   {RAMP[-1] * 2}{RAMP[5] * 2}"


def test_heat_map_row_ends_at_its_own_context():
    picture = heat_map(growing_rows(3, 4), labels(3), labels(6), width=60)
    lines = rendered(picture).splitlines()[1:4]
    assert [len(line) for line in lines] == [3 + 2 * n for n in (4, 5, 6)]


def test_heat_map_with_colour_gives_each_level_its_own_background():
    picture = heat_map([np.array([0.0, 0.5, 1.0])], ["r"], labels(3), width=60)
    backgrounds = re.findall(r"48;2;(\d+;\d+;\d+)m", rendered(picture, color="truecolor"))
    assert backgrounds == ["12;8;38", *backgrounds[1:2], "252;255;164"]
    assert len(set(backgrounds)) == 3


def test_heat_map_wider_than_the_terminal_shows_the_most_attended_columns():
    row = np.full(200, 0.1 / 197, np.float32)
    row[[3, 120, 199]] = 0.3
    picture = heat_map([row], ["row"], labels(200), width=20)
    output = rendered(picture, width=200)
    assert {3, 120, 199} <= set(picture.shown)
    assert len(picture.shown) == 20 - len("row ")
    assert "16 of 200 context tokens fit" in output
    for column in (3, 120, 199):
        assert f'"t{column}" at {column} (30%)' in output


@pytest.mark.parametrize("width", [10, 40, 80])
def test_heat_map_lines_stay_within_the_width(width: int):
    picture = heat_map(growing_rows(4, 50), labels(4), labels(53), width=width)
    assert max(map(len, rendered(picture, width=width).splitlines())) <= width


def test_heat_map_marks_sit_above_their_columns():
    row = np.array([0.0, 0.9, 0.0, 0.1])
    header, line, legend = rendered(heat_map([row], ["r"], labels(4), width=60)).splitlines()
    assert line[header.index("a")] == RAMP[9]
    assert line[header.index("b")] == RAMP[3]
    assert legend.startswith('a = "t1" at 1 (90%)')


def test_heat_map_labels_cannot_steer_the_terminal():
    output = rendered(heat_map([np.array([1.0])], ["\x1b[2J\n"], ["[bold]\t"], width=60))
    assert "\x1b" not in output
    assert r"\x1b[2J\n" in output
    assert r"[bold]\t" in output


def test_heat_map_refuses_too_few_labels():
    with pytest.raises(ValueError, match="1 row and 2 column labels, 1 rows and 3 columns"):
        heat_map([np.ones(3)], ["r"], labels(2), width=60)


def test_heat_map_of_no_rows_prints_nothing():
    assert rendered(heat_map([], [], [], width=60)).strip() == ""


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


def test_select_head_prefers_sharp_over_spread():
    rows = attention(12, {(0, 2): 3})
    rows[0, 0] = 1 / 12
    assert select_head([rows]) == (0, 2)


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
