"""Packs values of other frameworks into bytes without pickle, and unpacks them. Unpacking runs no code from the data.

What can be packed: None, numbers, texts, bytes, lists, tuples and dicts of these, arrays and numbers of numpy, tensors,
and images of PIL. The types come back as they were. A tensor is a header and its raw bytes:

    kind (1 byte) | dtype (1 byte) | dimensions (1 byte) | size of each dimension (8 bytes) | bytes of the elements

Any other value is a byte for its kind, and then msgpack.
"""

from __future__ import annotations

import math
import reprlib
import struct
import warnings
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

# A tensor that shares the memory of a received message is read by one process, and nobody else has that memory.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

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
_ARRAY, _NUMBER, _TUPLE, _INNER_TENSOR, _IMAGE, _OBJECTS = range(1, 7)
"""The codes of msgpack's extension types."""
_KINDS = "biufcSU"
"""The kinds of numpy's dtypes that are bytes without references."""
_IMAGE_MODES = ("L", "RGB", "RGBA")
"""The modes of images that are stored. In these modes the pixels describe the image completely."""
MOST_NESTED = 32
"""Tuples and arrays of objects may lie in each other this deep."""


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
    return bytes((_PACKED,)) + _Packer().pack(value)


def unpack(data: memoryview, *, copy: bool = True) -> Any:
    """The value of these bytes. With `copy=False` a tensor may share the memory of `data`, which nobody may change.

    Raises ValueError if the bytes are not from `pack`.
    """
    try:
        if data[0] == _TENSOR:
            return _tensor_of(data, copy)
        if data[0] == _PACKED:
            return _Packer().unpack(data[1:])
    except (IndexError, TypeError, KeyError, struct.error, RuntimeError, msgpack.UnpackException) as error:
        raise ValueError(f"{len(data)} bytes are not a packed value: {error}") from None
    raise ValueError(f"{len(data)} bytes are not a packed value: they begin with {data[0]}")


def _tensor_of(data: memoryview, copy: bool) -> torch.Tensor:
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
    if copy:
        flat = torch.frombuffer(bytearray(data[start:]), dtype=dtype)
    else:
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start)
    return flat if dimensions == 1 else flat.view(shape)


class _Packer:
    """Packs or unpacks one value. Counts how deep extension types lie in each other."""

    def __init__(self) -> None:
        self._depth = 0

    def pack(self, value: Any) -> bytes:
        """The bytes of a value. msgpack calls `_packed` for each part that it does not know."""
        return bytes(msgpack.packb(value, default=self._packed, strict_types=True))

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value that `pack` packed."""
        return msgpack.unpackb(data, ext_hook=self._unpacked, strict_map_key=False)

    def _packed(self, value: Any) -> msgpack.ExtType:
        """An extension type for a value that msgpack does not know. Raises TypeError if there is none."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return msgpack.ExtType(_INNER_TENSOR, pack(value))
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            return self._nested(_OBJECTS, [list(value.shape), value.reshape(-1).tolist()])
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return self._nested(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return self._nested(_NUMBER, [value.dtype.str, value.tobytes()])
        if kind is tuple:
            return self._nested(_TUPLE, list(value))
        if kind.__module__.startswith("PIL.") and value.mode in _IMAGE_MODES:
            return self._nested(_IMAGE, [value.mode, list(value.size), value.tobytes()])
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
            dtype, shape, raw = content
            return _array_of(dtype, shape, raw)
        if code == _NUMBER:
            dtype, raw = content
            return _array_of(dtype, [], raw)[()]
        if code == _OBJECTS:
            shape, members = content
            array = np.empty(len(members), object)
            for index, member in enumerate(members):  # numpy would make a matrix of lists of the same length
                array[index] = member
            return array.reshape(shape)
        if code == _IMAGE:
            from PIL import Image

            mode, size, raw = content
            return Image.frombytes(mode, tuple(size), raw)
        raise ValueError(f"the extension type {code} is unknown")

    def _enter(self) -> None:
        """Counts one level more. Raises ValueError if values lie too deep in each other."""
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise ValueError(f"tuples or arrays of objects lie more than {MOST_NESTED} deep in each other")


def _array_of(dtype: str, shape: list[int], raw: bytes) -> Any:
    """The array of these elements. Raises ValueError for a dtype whose elements are references."""
    named = np.dtype(dtype)
    if named.kind not in _KINDS:
        raise ValueError(f"arrays of {dtype} are not unpacked")
    if not raw or not named.itemsize:
        return np.zeros(shape, named)
    return np.frombuffer(raw, named).reshape(shape).copy()  # a copy, because numpy's array of bytes is read-only


def shown(value: Any) -> str:
    """The value as an error shows it: short, with its type."""
    return f"{type(value).__module__}.{type(value).__qualname__} {reprlib.repr(value)}"
