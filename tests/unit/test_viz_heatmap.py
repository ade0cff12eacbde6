"""The heat map as a figure: each value in its cell, each token at its side."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Token
from kqview.errors import KqviewError

pytest.importorskip("matplotlib")

from kqview.viz import heatmap

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    drawn = cells(heatmap(made, PROMPT, layer=1, head=2))
    assert drawn.shape == (3, 9)
    for i, token in enumerate(made):
        assert isinstance(token.attention, np.ndarray)
        np.testing.assert_array_equal(drawn[i, : 7 + i].data, token.attention[1, 2])
        assert drawn.mask[i].tolist() == [column >= 7 + i for column in range(9)]


def test_rows_are_labelled_with_what_was_generated_and_columns_with_the_context():
    rows, columns = labels(heatmap(tokens(3), PROMPT, layer=0, head=0))
    assert rows == ["t0", "t1", "t2"]
    assert columns == ["<s>", "Anna", "has", "a", "red", "ball", ".", "t0", "t1"]


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


def test_title_counts_layers_and_heads_as_the_model_does():
    made = tokens(1, layers=(5, 9), heads=(0, 2, 7), kind="scores")
    figure = heatmap(made, PROMPT, layer=1, head=2)
    assert figure.get_suptitle().startswith("layer 9, head 7")


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
    with pytest.raises(ValueError, match="the rows have none"):
        heatmap(matrix, layer=0)


def test_attention_of_one_token_is_one_row():
    assert cells(heatmap(np.ones((2, 3, 7)), PROMPT, layer=0, head=1)).shape == (1, 7)


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


def test_picture_is_written_and_not_blank(tmp_path: Path):
    from matplotlib.image import imread

    path = tmp_path / "x.png"
    heatmap(tokens(3), PROMPT, layer=0, head=0).savefig(path)
    pixels = imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 200
    assert len(np.unique((pixels.reshape(-1, 3) * 255).astype(int), axis=0)) > 50


@pytest.mark.parametrize(
    ("attention", "texts", "message"),
    [
        ([], None, "no row of attention"),
        ([Token(0, "x", 0)], None, "no row of attention"),
        (np.ones(3), None, r"an array of shape \(3,\)"),
        (np.ones((4, 3)), None, "4 queries and 3 tokens"),
        (np.ones((2, 3)), ["a"], "1 tokens, the rows have 3 columns"),
    ],
)
def test_what_cannot_be_drawn_is_refused(attention: Any, texts: Any, message: str):
    with pytest.raises(ValueError, match=message):
        heatmap(attention, texts)


def test_rows_cut_to_their_largest_values_are_refused():
    token = Token(0, "x", 0, attention=np.ones((1, 1, 2)))
    token.attention_positions = np.zeros((1, 1, 2), np.int32)
    with pytest.raises(ValueError, match="capture without top_k"):
        heatmap([token], PROMPT)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KqviewError, match=r'pip install "kqview\[viz\]"'):
        heatmap(np.ones((2, 2)))


def test_importing_the_package_pulls_in_no_drawing_library():
    import subprocess

    code = "import sys, kqview.viz; print('matplotlib' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
