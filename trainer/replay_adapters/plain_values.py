"""Packs values of other frameworks into bytes without pickle, and unpacks them. Unpacking runs no code from the data.

What can be packed: None, numbers, texts, bytes, lists, tuples and dicts of these, arrays and numbers of numpy, tensors,
and images of PIL. The types come back as they were. A tensor is a header and its raw bytes:

    kind (1 byte) | dtype (1 byte) | dimensions (1 byte) | size of each dimension (8 bytes) | bytes of the elements

Any other value is a byte for its kind, and then msgpack. A subclass of `ValueCodec` can add classes of its own.
"""

from __future__ import annotations

import math
import reprlib
import struct
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "uint32", "uint64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
"""The names of the dtypes of tensors. The position of a name is the code of the dtype: only append names."""
_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
_TORCH_DTYPES = [getattr(torch, name) for name in DTYPES]
_TENSOR, _PACKED = 0, 1
"""The kinds of values."""
_HEADER = struct.Struct("<BBB")
_ARRAY, _INNER_TENSOR, _TUPLE, _OBJECT, _IMAGE, _ARRAY_OF_OBJECTS = range(1, 7)
"""The codes of msgpack's extension types. An object is of a class that a subclass of the codec has added."""
_KINDS = "biufcSU"
"""The kinds of numpy's dtypes that are bytes without references."""
_IMAGE_MODES = ("L", "RGB", "RGBA")
"""The modes of images that are stored. In these modes the pixels describe the image completely."""
MOST_NESTED = 32
"""Tuples, arrays of objects, and objects may lie in each other this deep. msgpack itself bounds lists and dicts."""


def header_of(tensor: torch.Tensor, shape: tuple[int, ...]) -> bytes:
    """The header of a value with the dtype of `tensor` and this shape. Raises TypeError for another kind of tensor."""
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.is_sparse or tensor.is_quantized:
        raise TypeError(f"a tensor of {tensor.dtype} and layout {tensor.layout}")
    return _HEADER.pack(_TENSOR, code, len(shape)) + struct.pack(f"<{len(shape)}q", *shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor, in the order of its dimensions. The view shares memory with a contiguous CPU tensor."""
    plain = tensor.detach().cpu().contiguous()
    array: npt.NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return array.data


def pack(value: Any) -> bytes:
    """The bytes of a value. Raises TypeError or ValueError if it has a part that cannot be packed."""
    if isinstance(value, torch.Tensor):
        return b"".join((header_of(value, tuple(value.shape)), bytes_of(value)))
    return bytes((_PACKED,)) + ValueCodec().pack(value)


def unpack(data: memoryview) -> Any:
    """The value of these bytes. It shares no memory with them. Raises ValueError if the bytes are not from `pack`."""
    try:
        if data[0] == _TENSOR:
            return _tensor_of(data)
        if data[0] == _PACKED:
            return ValueCodec().unpack(data[1:])
    except (IndexError, TypeError, KeyError, struct.error, RuntimeError, msgpack.UnpackException) as error:
        raise ValueError(f"{len(data)} bytes are not a packed value: {error}") from None
    raise ValueError(f"{len(data)} bytes are not a packed value: they begin with {data[0]}")


def _tensor_of(data: memoryview) -> torch.Tensor:
    """The tensor of a header and its elements."""
    _, code, dimensions = _HEADER.unpack_from(data)
    shape = struct.unpack_from(f"<{dimensions}q", data, _HEADER.size)
    dtype = _TORCH_DTYPES[code]
    count = math.prod(shape)
    start = _HEADER.size + 8 * dimensions
    if len(data) - start != count * dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} and shape {shape} with {len(data) - start} bytes")
    if not count:  # torch takes no empty buffer
        return torch.empty(shape, dtype=dtype)
    # A copy, because received bytes are read-only, and a tensor can be changed.
    flat = torch.frombuffer(bytearray(data[start:]), dtype=dtype)
    return flat if dimensions == 1 else flat.view(shape)


class ValueCodec:
    """Packs or unpacks one value, and counts how deep its parts lie in each other. Make a new codec for each value.

    A subclass that packs objects of further classes overrides `content_of` and `object_of`.
    """

    def __init__(self) -> None:
        self._depth = 0

    def pack(self, value: Any) -> bytes:
        """The bytes of a value. Raises TypeError or ValueError if it has a part that cannot be packed."""
        # msgpack calls `_packed` for each part that it does not know.
        return bytes(msgpack.packb(value, default=self._packed, strict_types=True))

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value that `pack` packed. Other bytes raise ValueError, or another error of a wrong value or type."""
        return msgpack.unpackb(data, ext_hook=self._unpacked, strict_map_key=False)

    def content_of(self, value: Any) -> list[Any] | None:
        """The content from which `object_of` makes an object of a further class; None: its class cannot be packed."""
        return None

    def object_of(self, content: list[Any]) -> Any:
        """The object with this content. Raises ValueError if its class is unknown."""
        raise ValueError("objects of classes are not unpacked")

    def _packed(self, value: Any) -> msgpack.ExtType:
        """An extension type for a value that msgpack does not know. Raises TypeError if there is none."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return msgpack.ExtType(_INNER_TENSOR, pack(value))
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            return self._nested(_ARRAY_OF_OBJECTS, [list(value.shape), value.reshape(-1).tolist()])
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
            is_number = isinstance(value, np.generic)
            array = np.asarray(value)  # an empty text of numpy has no bytes, and gets room for a character
            return self._nested(_ARRAY, [is_number, array.dtype.str, list(array.shape), array.tobytes()])
        if kind is tuple:
            return self._nested(_TUPLE, list(value))
        if kind.__module__.startswith("PIL.") and value.mode in _IMAGE_MODES:
            return self._nested(_IMAGE, [value.mode, list(value.size), value.tobytes()])
        content = self.content_of(value)
        if content is not None:
            return self._nested(_OBJECT, content)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")

    def _nested(self, code: int, content: list[Any]) -> msgpack.ExtType:
        """An extension type whose data is the packed `content`."""
        self._enter()
        data = self.pack(content)
        self._depth -= 1
        return msgpack.ExtType(code, data)

    def _unpacked(self, code: int, data: bytes) -> Any:
        """The value of an extension type."""
        if code == _INNER_TENSOR:
            return unpack(memoryview(data))
        self._enter()
        content = self.unpack(data)
        self._depth -= 1
        if code == _TUPLE:
            return tuple(content)
        if code == _ARRAY:
            return _array_of(*content)
        if code == _ARRAY_OF_OBJECTS:
            return _array_of_objects(*content)
        if code == _IMAGE:
            return _image_of(*content)
        if code == _OBJECT:
            return self.object_of(content)
        raise ValueError(f"the extension type {code} is unknown")

    def _enter(self) -> None:
        """Counts one level more. Raises ValueError if values lie too deep in each other."""
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise ValueError(f"tuples, objects or arrays of objects lie more than {MOST_NESTED} deep in each other")


def _array_of(is_number: bool, dtype: str, shape: list[int], raw: bytes) -> Any:
    """The array or the number of these bytes. Raises ValueError for a dtype whose elements are references."""
    named = np.dtype(dtype)
    if named.kind not in _KINDS or not named.itemsize:
        raise ValueError(f"arrays of {dtype} are not unpacked")
    # Checked before memory is taken for the array, which the bytes may say is very large.
    if len(raw) != math.prod(shape) * named.itemsize:
        raise ValueError(f"an array of {dtype} and shape {shape} with {len(raw)} bytes")
    if raw:
        array = np.frombuffer(raw, named).reshape(shape).copy()  # a copy, because `raw` is read-only
    else:
        array = np.zeros(shape, named)  # numpy takes no empty buffer
    return array[()] if is_number else array


def _array_of_objects(shape: list[int], members: list[Any]) -> npt.NDArray[Any]:
    """The array of these objects."""
    array = np.empty(len(members), object)
    for index, member in enumerate(members):  # numpy would make a matrix of lists of the same length
        array[index] = member
    return array.reshape(shape)


def _image_of(mode: str, size: list[int], raw: bytes) -> Any:
    """The image of these pixels. Raises ValueError for another number of bytes, before it takes memory for them."""
    from PIL import Image

    if mode not in _IMAGE_MODES or len(raw) != math.prod(size) * len(mode):  # a byte for each letter of the mode
        raise ValueError(f"an image of mode {mode} and size {size} with {len(raw)} bytes")
    return Image.frombytes(mode, (size[0], size[1]), raw)


def shown(value: Any) -> str:
    """The value as an error shows it: short, with its type."""
    return f"{type(value).__module__}.{type(value).__qualname__} {reprlib.repr(value)}"
