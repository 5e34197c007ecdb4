"""Labels: what an item may have beside its payload, and that messages and records give back what went in."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_protos import replay_pb2 as pb
from replay_protos.label_columns import columns_message, labels_of_rows, tags_message
from replay_protos.labels import NO_LABELS, labels_of, pack_labels, unpack_labels

names = st.text(min_size=1, max_size=8)
values = st.one_of(st.text(max_size=8), st.integers(-(1 << 63), (1 << 63) - 1))
any_labels = st.builds(labels_of, st.frozensets(names, max_size=3), st.dictionaries(names, values, max_size=3))


@given(st.lists(any_labels, max_size=5))
def test_the_rows_of_a_message_have_the_labels_that_were_put_into_it(rows):
    back = labels_of_rows(columns_message(rows), tags_message(rows), len(rows))
    assert (back or [NO_LABELS] * len(rows)) == rows


@given(any_labels.filter(lambda labels: labels != NO_LABELS))
def test_a_record_gives_back_the_labels(labels):
    assert unpack_labels(pack_labels(labels)) == labels


def test_items_without_labels_cost_no_byte():
    assert columns_message([NO_LABELS] * 3) == []
    assert tags_message([NO_LABELS] * 3) == []
    assert pack_labels(NO_LABELS) == b""
    assert labels_of_rows([], [], 3) is None


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ({"a" * 65: 1}, "a name of 65 bytes: 1 to 64"),
        ({"": 1}, "a name of 0 bytes"),
        ({1: 1}, "the name of a tag must be a string, not 1"),
        ({"a": "ä" * 129}, "tag 'a' has a value of 258 bytes, more than 256: put it into meta"),
        ({"a": 1.0}, "tag 'a' is 1.0: a tag is a string, or an integer of 64 bits"),
        ({"a": True}, "tag 'a' is True: a tag is a string"),
        ({"a": None}, "tag 'a' is None: a tag is a string"),
        ({"a": 1 << 63}, "tag 'a' is 9223372036854775808: a tag is a string, or an integer of 64 bits"),
        ({"a": "\ud800"}, "tag 'a' is no text"),
        ({str(n): n for n in range(9)}, "an item has at most 8 tags, not 9: put the others into meta"),
        (["a"], "tags must be values by name"),
    ],
)
def test_a_tag_that_no_item_can_have_is_refused_with_its_name_and_the_remedy(tags, says):
    labels_of((), {"a": 1})  # to a cache, 1.0 and True are this one
    with pytest.raises(ValueError, match=says):
        labels_of((), tags)


def test_an_integer_of_numpy_is_a_tag():
    labels = labels_of((), {"level": np.int64(3)})
    assert unpack_labels(pack_labels(labels)).tags == {"level": 3}


def test_columns_that_no_item_can_have_are_refused():
    with pytest.raises(ValueError, match="at most 1024 columns, not 1025"):
        labels_of(map(str, range(1025)), None)
    with pytest.raises(ValueError, match="a name of 257 bytes: 1 to 256"):
        labels_of(["x" * 257], None)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (pb.Tags(name="a", texts=["x"], numbers=[1]), "tag 'a' has texts and numbers in one message"),
        (pb.Tags(name="a", texts=["x"]), "tag 'a' has 1 values for 2 rows"),
        (pb.Tags(name="a", texts=["x"], rows=[2]), "row 2 of tag 'a' in a message of 2 rows"),
        (pb.Tags(name="a", texts=["x", "y"], rows=[1, 1]), "tag 'a' comes twice for row 1"),
    ],
)
def test_a_message_that_does_not_say_which_row_has_a_tag_is_refused(message, says):
    with pytest.raises(ValueError, match=says):
        labels_of_rows([], [message], 2)


def test_columns_of_a_row_come_in_one_entry_so_that_a_small_message_is_little_work():
    entries = [pb.Columns(names=["a"]), pb.Columns(names=["b"], rows=[1])]
    with pytest.raises(ValueError, match="columns of row 1 come twice: name all that a row has in one entry"):
        labels_of_rows(entries, [], 2)
    with pytest.raises(ValueError, match="columns of row 0 come twice"):
        labels_of_rows([pb.Columns(names=["a"], rows=[0, 0])], [], 1)


def test_the_names_of_very_many_columns_are_not_kept_for_other_items():
    names = frozenset(f"{number:0256d}" for number in range(1024))
    kept = weakref.ref(names)
    pack_labels(labels_of(names, None))
    del names
    gc.collect()
    assert kept() is None
