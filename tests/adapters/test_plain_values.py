"""Values and rows of TransferQueue as bytes: what comes back, what is refused, and that no code runs."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image

from replay_adapters.column_rows import Place, items_of, lacks_fields, pack_rows, replace_values
from replay_adapters.plain_values import DTYPES, pack, unpack


def back(value: object) -> object:
    return unpack(memoryview(pack(value)))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -5, 2.5, "é", b"\0", [1, [2]], (1, (2, [3])), {"a": (1,), 3: None}),
        *(np.float32(0.5), np.str_("x"), np.str_("")),
    ],
)
def test_a_plain_value_comes_back_with_its_type(value: object) -> None:
    assert back(value) == value
    assert type(back(value)) is type(value)


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_each_dtype_comes_back_bit_by_bit(name: str) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(2, 32).view(getattr(torch, name))
    got = back(tensor)
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_a_tensor_of_any_shape_comes_back(shape: tuple[int, ...]) -> None:
    assert torch.equal(back(torch.ones(shape)), torch.ones(shape))


def test_a_view_of_a_tensor_comes_back_as_what_it_shows() -> None:
    tensor = torch.arange(12.0).view(3, 4).T[1:, ::2]
    assert torch.equal(back(tensor), tensor)


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.array([b"ab", b"c"]), np.array(["é"]), np.zeros((0, 2))]
)
def test_an_array_comes_back_and_can_be_written(array: np.ndarray) -> None:
    got = back(array)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
    assert got.flags.writeable


def test_an_array_of_objects_comes_back() -> None:
    array = np.empty(2, object)
    array[0] = [1, 2]
    array[1] = [{"a": 1}, None]
    assert back(array).tolist() == [[1, 2], [{"a": 1}, None]]


def test_tensors_and_images_inside_of_dicts_come_back() -> None:
    image = Image.new("RGB", (2, 3), (1, 2, 3))
    got = back({"inputs": {"pixels": torch.ones(2, dtype=torch.bfloat16)}, "images": [image]})
    assert got["inputs"]["pixels"].dtype == torch.bfloat16
    assert got["images"][0].tobytes() == image.tobytes()


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 1, [object()], 1 << 70, np.array([1], "M8[s]")])
def test_any_other_value_is_refused_by_the_name_of_its_field(value: object) -> None:
    with pytest.raises(ValueError, match="the field 'extra' has a value that is not stored"):
        pack_rows({"extra": [value]}, 1)


def test_tuples_that_lie_too_deep_in_each_other_are_refused() -> None:
    value: tuple = ()
    for _ in range(40):
        value = (value,)
    with pytest.raises(ValueError, match="more than 32 deep"):
        pack(value)


def test_tuples_in_the_bytes_that_lie_too_deep_in_each_other_are_refused() -> None:
    data = msgpack.packb([])
    for _ in range(2000):
        data = msgpack.packb(msgpack.ExtType(3, data))
    with pytest.raises(ValueError, match="more than 32 deep"):
        unpack(memoryview(b"\x01" + data))


def test_a_tensor_that_comes_back_can_be_changed_and_shares_nothing() -> None:
    data = bytearray(pack(torch.zeros(3)))
    first = unpack(memoryview(data))
    first += 1
    assert unpack(memoryview(data)).tolist() == [0.0, 0.0, 0.0]


def test_no_warning_about_received_bytes(recwarn: pytest.WarningsRecorder) -> None:
    unpack(memoryview(pack(torch.zeros(3))).toreadonly())
    assert not recwarn.list


@pytest.mark.parametrize("data", [b"", b"\x07", b"\x00\x63\x00", b"\x00\x00\x01" + bytes(8) + b"x", b"\x01\xc1"])
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"packed value|a tensor of"):
        unpack(memoryview(data))


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (1, [False, "<f8", [1 << 40], b""]),
        (1, [False, "<f8", [-1], bytes(8)]),
        (1, [False, "<U0", [1 << 40], b""]),
        (1, [False, "<f8"]),
        (5, ["RGB", [1 << 20, 1 << 20], b""]),
        (5, ["P", [1, 1], b"x"]),
        (4, ["Sample", {}]),
        (9, []),
    ],
)
def test_a_part_with_other_bytes_than_its_size_says_is_refused_before_it_takes_memory(code: int, content: list) -> None:
    evil = msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))
    with pytest.raises(ValueError, match=r"."):
        unpack(memoryview(b"\x01" + evil))


def test_an_array_of_references_in_the_bytes_is_refused() -> None:
    evil = msgpack.packb(msgpack.ExtType(1, msgpack.packb([False, "|O", [1], bytes(8)])))
    with pytest.raises(ValueError, match="arrays of"):
        unpack(memoryview(b"\x01" + evil))


def rows_back(columns: dict, rows: int) -> list[dict]:
    """Each row as a dict of its fields, as their places say."""
    packed = pack_rows(columns, rows)
    keys = [(1 << 63) + row for row in range(rows)]
    places = packed.places(keys)
    read = []
    for row in range(rows):
        payload = memoryview(packed.payloads[row])
        fields = {}
        for name, column in places.items():
            place = Place.decode(column[row])
            assert place.key == keys[row]
            assert place.fields == len(columns)
            fields[name] = unpack(payload[place.offset : place.offset + place.size])
        read.append(fields)
    return read


def test_columns_of_every_kind_come_back_row_by_row() -> None:
    jagged = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(0, 3)], layout=torch.jagged)
    columns = {
        "dense": torch.arange(8, dtype=torch.bfloat16).view(2, 4),
        "jagged": jagged,
        "scalar": torch.tensor([True, False]),
        "strided": torch.nested.nested_tensor([torch.ones(2), torch.ones(1, 3)[0]], layout=torch.strided),
        "plain": ["a", {"b": 1}],
    }
    first, second = rows_back(columns, 2)
    assert torch.equal(first["dense"], columns["dense"][0])
    assert torch.equal(second["dense"], columns["dense"][1])
    assert torch.equal(first["jagged"], torch.ones(2, 3))
    assert second["jagged"].shape == (0, 3)
    assert first["scalar"].shape == ()
    assert bool(first["scalar"])
    assert not bool(second["scalar"])
    assert second["strided"].shape == (3,)
    assert first["plain"] == "a"
    assert second["plain"] == {"b": 1}


def test_a_column_with_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of rows is 2 in the field 'x', and 3 in the batch"):
        pack_rows({"x": torch.ones(2, 1)}, 3)


def test_a_place_comes_back_from_its_bytes() -> None:
    place = Place(key=(1 << 63) + 5, offset=7, size=(1 << 32) - 1, fields=16, others=(3, 4))
    assert Place.decode(place.encode()) == place


def test_bytes_that_are_no_place_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes are not the place"):
        Place.decode(b"abc")


def place(key: int, fields: int, *others: int) -> Place:
    """The place of a value in an item with this number of fields, of a row with these other items."""
    return Place(key=key, offset=0, size=1, fields=fields, others=others)


def encoded(places: dict[str, Place]) -> dict[str, bytes]:
    return {name: place.encode() for name, place in places.items()}


def replaced(new: dict[str, Place], old: dict[str, Place]) -> tuple[dict[str, Place], list[int]]:
    """Calls `replace_values` with these places, and decodes the places that it returns."""
    places, unused = replace_values(encoded(new), encoded(old))
    return {name: Place.decode(data) for name, data in places.items()}, unused


def test_the_first_fields_of_a_row_are_announced_alone() -> None:
    assert replaced({"a": place(1, 1)}, {}) == ({"a": place(1, 1)}, [])


def test_by_the_last_fields_of_a_row_all_its_items_are_found() -> None:
    early = {"early": place(1, 1)}
    late, unused = replaced({"late": place(2, 1)}, early)
    assert unused == []
    assert late == {"late": place(2, 1, 1)}
    last, _ = replaced({"last": place(3, 1)}, late)
    assert last == {"last": place(3, 1, 1, 2)}
    assert items_of(last["last"].encode()) == (3, 1, 2)


def test_an_item_whose_fields_are_all_replaced_is_not_used_any_more() -> None:
    new = {"a": place(2, 2), "b": place(2, 2)}
    assert replaced(new, {"a": place(1, 2), "b": place(1, 2)}) == (new, [1])


def test_an_item_of_which_one_field_is_replaced_leaves_with_the_row() -> None:
    places, unused = replaced({"a": place(2, 1)}, {"a": place(1, 2), "b": place(1, 2)})
    assert unused == []
    assert places == {"a": place(2, 1, 1)}, "another process may have replaced b meanwhile"


def test_an_older_item_stays_noted_when_its_field_is_replaced_again() -> None:
    places, unused = replaced({"a": place(3, 1)}, {"a": place(2, 1, 1)})
    assert unused == [2]
    assert places["a"].others == (1,)


def test_an_item_with_more_fields_than_a_row_names_shows_that_the_row_lacks_fields() -> None:
    whole = encoded({"a": place(1, 2), "b": place(1, 2)})
    assert not lacks_fields(whole.values())
    assert lacks_fields([whole["a"]])


def test_a_row_lacks_no_field_because_one_was_replaced() -> None:
    assert not lacks_fields(encoded({"a": place(1, 2), "b": place(2, 1, 1)}).values())
