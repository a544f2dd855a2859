"""Result files, their tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures, summary
from benchmarks.report import Report, command_line, table

RESULTS = sorted((Path(summary.FOLDER) / "results").glob("*.json"))

DRAWN = [path for path in RESULTS if json.loads(path.read_text())["benchmark"] in figures.BY_BENCHMARK]


def test_the_file_is_complete_json_after_every_row(tmp_path):
    path = tmp_path / "deep" / "result.json"
    report = Report.start(path, "load", {"a": 1})
    for number in (1, 2):
        report.put({"name": f"row{number}", "value": number}, ("name",))
        content = json.loads(path.read_text())
        assert len(content["rows"]) == number and not content["complete"]
    report.finish()
    assert json.loads(path.read_text())["complete"]
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_row_with_the_same_key_is_replaced_in_its_place(tmp_path):
    report = Report.start(tmp_path / "r.json", "load", {})
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        report.put({"name": name, "value": value}, ("name",))
    assert [(row["name"], row["value"]) for row in report.rows] == [("a", 3), ("b", 2)]


def test_another_process_goes_on_where_the_first_ended(tmp_path):
    Report.start(tmp_path / "r.json", "load", {}).put({"name": "a"}, ("name",))
    again = Report.resume(tmp_path / "r.json")
    again.put({"name": "b"}, ("name",))
    assert len(json.loads((tmp_path / "r.json").read_text())["rows"]) == 2


def test_a_result_says_what_it_was_made_on(tmp_path):
    Report.start(tmp_path / "r.json", "load", {})
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["versions"]["torch"] and content["machine"]["num_cpus"] > 0 and content["date"]


def test_a_command_line_names_no_path_of_the_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/opt/x/load.py", "--out", "/home/me/out.json", "--num-ranks", "2"])
    assert "/home" not in command_line() and command_line().endswith("--out out.json --num-ranks 2")


def test_a_table_shows_missing_values_as_missing():
    text = table(
        [{"name": "a", "value": 1234.5}, {"name": "b", "value": None}], {"name": "", "value": ",.0f"}
    )
    assert [line.split() for line in text.splitlines()] == [["name", "value"], ["a", "1,234"], ["b", "-"]]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_are_complete_or_say_where_they_stopped(path):
    content = json.loads(path.read_text())
    assert content["complete"] or content["stopped"]
    assert content["rows"] and content["machine"] and content["versions"]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_committed_results_have_their_picture(path):
    assert path.with_suffix(".png").exists()


def test_every_table_of_the_document_is_that_of_its_result_file():
    assert summary.main(["--check"]) == 0


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_committed_result_is_in_the_document(path):
    assert f"<!-- results/{path.name} -->" in summary.README.read_text()


def test_a_changed_result_changes_the_document(tmp_path):
    (tmp_path / "results").mkdir()
    content = json.loads(RESULTS[0].read_text())
    (tmp_path / "results" / "r.json").write_text(json.dumps(content))
    text = "before\n<!-- results/r.json -->\nold\n<!-- end -->\nafter\n"
    new = summary.rendered(text, tmp_path)
    assert "old" not in new and content["command"] in new and new.endswith("after\n")


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_picture_can_be_drawn_of_every_committed_result(path, tmp_path, capsys):
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    assert figures.main([str(copy)]) == 0
    assert copy.with_suffix(".png").stat().st_size > 0


def test_files_that_are_no_results_are_named_all_at_once(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert figures.main([str(tmp_path / "missing.json"), str(tmp_path / "other.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "missing.json" in lines[0] and "has no picture" in lines[1]
