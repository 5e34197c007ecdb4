"""Golden files: a difference fails with the lines and the command that renews, and each file belongs to a test."""

import pytest

from tests.kit.golden import FOLDER, Golden, error_of, sections
from tests.packages import ROOT

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@pytest.fixture
def files(tmp_path, monkeypatch) -> Golden:
    """A folder with one golden file."""
    monkeypatch.delenv("REPLAY_GOLDEN", raising=False)
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    return Golden(tmp_path)


def test_the_same_text_is_no_failure(files):
    files("a.txt", "one\ntwo\n")


@pytest.mark.parametrize("text", ["one\nTwo\n", "one\ntwo", "one\ntwo\n\n", "one\r\ntwo\n", "one \ntwo\n", ""])
def test_any_other_text_fails_with_its_lines_and_the_command_that_renews(files, text):
    with pytest.raises(pytest.fail.Exception) as failure:
        files("a.txt", text)
    said = str(failure.value)
    assert said.startswith("tests/golden/a.txt differs. If this run is right: `make golden`")
    assert "\n-" in said.partition("+++")[2] or "\n+" in said.partition("+++")[2]


def test_a_file_that_is_missing_fails_with_the_command_that_writes_it(files):
    with pytest.raises(pytest.fail.Exception, match=r"there is no tests/golden/b\.txt: `make golden`"):
        files("b.txt", "text")
    assert not (files.folder / "b.txt").exists()


def test_files_are_written_only_if_the_environment_asks_for_it(files, monkeypatch):
    monkeypatch.setenv("REPLAY_GOLDEN", "renew")
    files("a.txt", "three\n")
    files("below/b.txt", "ü\r\n")
    assert (files.folder / "a.txt").read_bytes() == b"three\n"
    assert (files.folder / "below/b.txt").read_bytes() == "ü\r\n".encode()


def test_ci_never_writes_them(files, monkeypatch):
    monkeypatch.setenv("REPLAY_GOLDEN", "renew")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI only compares"):
        files("a.txt", "three\n")
    assert (files.folder / "a.txt").read_text() == "one\ntwo\n"


def test_a_test_with_golden_files_has_the_mark_by_which_make_golden_finds_it(golden, request):
    assert request.node.get_closest_marker("golden") is not None


def test_sections_stand_under_their_names():
    assert sections({"a": "one\ntwo\n", "b": ""}) == "a\n    one\n    two\n\nb\n    (nothing)\n"


def test_a_call_without_an_error_says_so_and_an_error_of_another_kind_is_none_of_ours():
    assert error_of(int, "x") == "invalid literal for int() with base 10: 'x'"
    assert error_of(int, "1") == "(no error)"
    with pytest.raises(KeyError):
        error_of({}.__getitem__, "x")


@pytest.mark.parametrize("name", FILES)
def test_each_golden_file_is_named_in_a_test(name):
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if f'"{name}"' in path.read_text()]
    assert len(tests) == 1, "remove a file that no test compares with; two tests cannot share one"
