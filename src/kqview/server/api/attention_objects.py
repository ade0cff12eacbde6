"""The ``attention`` object of both attention protocols, its bytes kept apart from its fields.

Pure. The values of an object may be megabytes of base64, so they stay a piece of their own from
the encoder to the transport: `event_pieces` puts an event together without joining them.
"""

from typing import Any

import msgspec

from kqview.server.attention import AttentionWanted, Dense, Shaped, Sparse, Viz
from kqview.server.wire import DATA_HERE, Encoder, split_json
from kqview.types import ModelInfo

Object = dict[str, Any]


def layers_of(wanted: AttentionWanted, model: ModelInfo) -> tuple[int, ...] | None:
    """Layers in the order of the object's axis of layers; None where that says nothing new.

    It does where the object has such an axis, and the layers are not all of the model's.
    """
    if wanted.format == "aggregated":
        return None
    layers = model.attention_layers if wanted.layers is None else wanted.layers
    return None if layers == tuple(range(model.n_layer)) else layers


def attention_object(
    shaped: Shaped,
    encoder: Encoder,
    *,
    as_list: bool = False,
    layers: tuple[int, ...] | None = None,
) -> tuple[Object, bytes | None]:
    """The object for JSON, and the base64 of its values where it has some.

    Args:
        shaped: What `kqview.server.attention.shaped` returned.
        encoder: Of the run.
        as_list: Write the values of "aggregated" as a list of numbers, in place of base64.
        layers: As `layers_of` says.

    Returns:
        The object, in which ``data`` is `DATA_HERE` where the second value stands for it; None as
        the second value where the object is whole.
    """
    if isinstance(shaped, Dense):
        fields = _dense(shaped, layers)
        if as_list and shaped.format == "aggregated":
            return {**fields, "data": encoder.numbers(shaped.values)}, None
        fields |= {"encoding": "base64", "dtype": shaped.values.dtype.name, "data": DATA_HERE}
        return fields, encoder.base64(shaped.values)
    return _small(shaped, encoder, layers), None


def attention_frame(
    shaped: Shaped, encoder: Encoder, *, layers: tuple[int, ...] | None = None
) -> tuple[Object, bytes]:
    """The object without ``data``, and its values as little-endian bytes for a frame of their own.

    Formats that have no array of values are whole in the object; their frame is empty.
    """
    if isinstance(shaped, Dense):
        fields = _dense(shaped, layers)
        fields |= {"encoding": "binary", "dtype": shaped.values.dtype.name}
        return fields, encoder.raw(shaped.values)
    return _small(shaped, encoder, layers), b""


def event_pieces(event: Any, data: bytes | None) -> list[bytes]:
    """JSON of *event* in pieces; *data* stands where *event* says `DATA_HERE`."""
    return [msgspec.json.encode(event)] if data is None else split_json(event, data)


def _dense(dense: Dense, layers: tuple[int, ...] | None) -> Object:
    fields: Object = {
        "format": dense.format,
        "shape": list(dense.values.shape),
        "context_length": dense.n_context,
    }
    if dense.heads_by_layer is not None:
        fields["heads_by_layer"] = dense.heads_by_layer
    if layers is not None:
        fields["layers"] = layers
    return fields


def _small(shaped: Sparse | Viz, encoder: Encoder, layers: tuple[int, ...] | None) -> Object:
    fields: Object = {} if layers is None else {"layers": layers}
    if isinstance(shaped, Sparse):
        by_layer = encoder.numbers(shaped.by_layer)
        positions = shaped.positions.tolist()
        return {
            "format": "sparse",
            "top_k": len(positions),
            "context_length": shaped.n_context,
            "data": [
                {"position": position, "layers": values}
                for position, values in zip(positions, by_layer, strict=True)
            ],
            **fields,
        }
    return {
        "format": "viz",
        "context_length": shaped.n_context,
        "mean_by_layer": encoder.numbers(shaped.mean_by_layer),
        "max_by_layer": encoder.numbers(shaped.max_by_layer),
        "entropy": shaped.entropy,
        **fields,
    }
