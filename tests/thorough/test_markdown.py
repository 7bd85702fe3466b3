"""Names chosen by other people in a card and a report: they are shown unchanged, and never act as Markdown or HTML or
leak a secret.
"""

import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from full_report import full_report, renamed
from markdown_it import MarkdownIt
from markdown_it.token import Token
from test_report import of_rows, shown

from decoding.measure.markdown import code, fenced, one_line, text, visible
from decoding.measure.redact import published_command, without_local_paths
from decoding.measure.report.page import write_html
from decoding.measure.report.tables import markdown_table
from decoding.measure.results import Report, report_from_json

HOSTILE = [
    "a\n\n# heading",
    "a\n- item\n\n| a | b |\n|---|---|",
    "![x](http://evil.example/x.png)",
    "[x](javascript:alert(1))",
    "a`](http://evil.example)`b",
    "`` ` ``",
    "``",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a | b | c",
    "a\\| b",
    "*a* _b_ **c** ~~d~~ &lt;b&gt;",
    "http://evil.example www.evil.example <http://evil.example>",
    "```\n# heading\n```",
    "a\x1b[31mred\u202edetrever",
    "$x^$ \\(y\\)",
    "a\n---\nlicense: mit",
    "a</summary></details>",
]
FEW_HOSTILE = ["<script>alert(1)</script>", "a\n\n# heading", "![x](http://evil.example/x.png)", "$x^$ \\(y\\)"]
"""In `make check`, these represent all hostile texts in tests of pages and pictures."""
READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
HARMLESS = {"inline", "text", "softbreak", "code_inline", "text_special"}


def tokens(markdown: str) -> list[Token]:
    """Return all tokens of a text, including those inside paragraphs."""
    found = READER.parse(markdown)
    return [token for block in found for token in (block, *(block.children or []))]


def kinds(markdown: str) -> list[str]:
    return [token.type for token in tokens(markdown)]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_is_shown_as_it_is_and_makes_nothing(hostile: str) -> None:
    for written in (text(hostile), code(hostile)):
        assert set(kinds(f"Target: {written}, and more")) <= HARMLESS | {"paragraph_open", "paragraph_close"}
        shown = "".join(token.content for token in tokens(f"Target: {written}, and more") if token.type != "inline")
        assert "".join(shown.split()) == "".join(f"Target: {one_line(hostile)}, and more".split())
    row = kinds(f"| {text(hostile)} | b |\n|---|---|\n| {text(hostile)} | d |")
    assert row.count("td_open") == row.count("th_open") == 2
    assert not {"image", "link_open", "html_inline", "em_open", "s_open"} & set(row)


def test_controls_are_left_out() -> None:
    controls = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cs")]
    bidi = [chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
    assert visible("".join((*controls, *bidi))) == "\t\n"
    for kept in ("می\u200cخواهم", "👨\u200d👩\u200d👧", "🏴\U000e0067\U000e0062\U000e007f"):
        assert visible(f"{kept}\n\t") == f"{kept}\n\t" and one_line(kept) == text(kept) == kept


def test_an_address_is_no_link_where_addresses_become_links_by_themselves() -> None:
    for address in ("http://evil.example", "HTTPS://evil.example", "www.evil.example", "zoe@evil.example"):
        assert text(address) != address and text(address).replace("\\", "") == address


@pytest.mark.parametrize("content", ["a ``` b", "a\n```\n# heading\n````\n![x](http://e)", "~~~", ""])
def test_a_block_of_code_ends_where_it_should(content: str) -> None:
    block, paragraph, *_ = tokens(f"{fenced(content, 'json')}\n\nbehind it")
    assert block.type == "fence" and block.content.rstrip("\n") == content and block.info == "json"
    assert paragraph.type == "paragraph_open"


@pytest.mark.parametrize("hostile", FEW_HOSTILE)
def test_a_reports_table_has_the_same_parts_whatever_the_names_are(hostile: str) -> None:
    (row,) = of_rows(None).rows
    table = kinds(markdown_table(Report(rows=(replace(row, method=hostile, setting=hostile),))))
    assert table.count("tr_open") == 2 and table.count("td_open") == 8
    assert not {"image", "link_open", "html_inline", "em_open", "s_open"} & set(table)


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, and the values of attributes that could have an
    effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        active = [f"{name}={value}" for name, value in attributes if name.startswith("on") or name in ("href", "src")]
        self.found.append((tag, *(name for name, _ in attributes), *active))


def elements(page: Path) -> list[tuple[str, ...]]:
    parser = Elements()
    parser.feed(page.read_text())
    return parser.found


def test_the_page_has_the_same_elements_whatever_its_texts_are(tmp_path: Path) -> None:
    """The texts by other people are names of methods, settings, tasks and rules, prompts, answers, and the description
    of questions.
    """
    report = full_report(grid=[row for row in full_report()["grid"] if row["batch_size"] == 4])
    hostile = " ".join([*HOSTILE, "\"'><b onclick=alert(1)>", "</mark></style><script>", "{{ 7 * 7 }}"])
    write_html(report_from_json(renamed(report, "harmless")), tmp_path / "harmless.html")
    write_html(report_from_json(renamed(report, hostile)), tmp_path / "hostile.html")
    found = elements(tmp_path / "hostile.html")
    assert found == elements(tmp_path / "harmless.html") and len(found) > 1000
    page = (tmp_path / "hostile.html").read_text()
    assert "\x1b" not in page and "\u202e" not in page and "{{ 7 * 7 }}" in page
    assert "\x1b" not in shown(report_from_json(renamed(report, hostile)))


# --- secrets --------------------------------------------------------------------------------------------------------

SECRETS = {
    "ghp_0123456789abcdefABCDEF0123456789abcd": "(withheld)",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz": "(withheld)",
    "glpat-abcdefghij0123456789": "(withheld)",
    "AKIAIOSFODNN7EXAMPLE": "(withheld)",
    "https://host/v1?token=swordfish&n=3": "https://host/v1?token=(withheld)&n=3",
    "https://host/v1?n=3&api_key=swordfish": "https://host/v1?n=3&api_key=(withheld)",
    "Authorization: Bearer abc.def-ghi_jkl": "Authorization: Bearer (withheld)",
    "Basic YWJjLmRlZjo=": "Basic (withheld)",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv": "(withheld)",
    "wandb_v1_0123456789abcdef": "(withheld)",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIwMTIzNDU2Nzg5In0.dozjgNryP4J3": "(withheld)",
    "token=swordfish": "token=(withheld)",
}


@pytest.mark.parametrize(("secret", "published"), SECRETS.items())
def test_secrets_are_withheld_from_texts(secret: str, published: str) -> None:
    assert without_local_paths(f"with {secret} in it") == f"with {published} in it"


@pytest.mark.parametrize(
    ("words", "published"),
    [
        (["/opt/bin/headstart", "evaluate", "--target", "org/t"], "headstart evaluate --target org/t"),
        (["x", "--prompts", "/home/zoe/p.jsonl", "--heads=~/h/final"], "x --prompts p.jsonl --heads=final"),
        (["x", "--api-key=swordfish"], "x '--api-key=(withheld)'"),
        (["x", "--drafter", "draft:/home/zoe/d/final,tokens=4"], "x --drafter draft:final,tokens=4"),
        (["x", "--drafter", "eagle3:/home/zoe/e/final"], "x --drafter eagle3:final"),
        (["x", "--drafter", "draft:org/name,tokens=4"], "x --drafter draft:org/name,tokens=4"),
        (["x", "--endpoint", "http://localhost:8000/v1"], "x --endpoint http://localhost:8000/v1"),
        (["x", "ghp_0123456789abcdefABCDEF0123456789abcd"], "x '(withheld)'"),
    ],
)
def test_a_command_is_published_without_paths_and_secrets(words: list[str], published: str) -> None:
    assert published_command(words) == published


def test_a_folder_that_is_here_is_published_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoe" / "heads").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_command(["x", "--heads", "zoe/heads", "zoe/other"]) == "x --heads heads zoe/other"
