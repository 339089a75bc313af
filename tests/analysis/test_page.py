"""The analysis page, drawn from analysis.json: every section, its sentences, escaping."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from browsing import PHONE, brightness, opened_in, serious_findings
from logpast.analysis.page import draw

PLOTS = 6


def text_of(page: str) -> str:
    """The page as it is read: no markup, single spaces."""
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)).split())


def rows_of(page: str, first_cell: str) -> list[list[str]]:
    """The cells of all table rows that begin with this one."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [row for row in cells if row[0] == first_cell]


def test_page_has_every_section_and_plot(result: dict[str, Any]) -> None:
    page = draw(result)
    assert page.count("<img") == page.count("data:image/png;base64,iVBOR") == PLOTS
    assert "Does not apply" not in page
    for title in (
        "Loss by position in the window", "Loss by frequency", "Tokens where the loss differs most from the control's",
        "Loss by where the token last occurred", "Which slots matter", "How far back the past matters",
        "Perplexity against scoring stride",
    ):  # fmt: skip
        assert f">{title}</h2>" in page
    assert "after the memory's LayerNorm" in page
    assert result["revision"] in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)  # self-contained


@pytest.mark.usefixtures("no_plots")
def test_numbers_of_the_page_are_those_of_the_analysis(result: dict[str, Any]) -> None:
    page, scores = draw(result), result["scores"]
    (model,) = rows_of(page, "model: memory")
    assert model[3:] == [
        "20", f"{scores['all']['model']['nats'][0]:.4f}", f"{scores['model']['ppl_token']:.3f}",
        f"{scores['model']['bits_per_byte']:.4f}",
    ]  # fmt: skip
    own = result["stride"]["control"]
    strides = rows_of(page, "control")
    assert [row[1:4] for row in strides] == [
        [f"{own['stride'][i]:,}", f"{own['cost'][i]:.3g}", f"{own['ppl_token'][i]:.3f}"] for i in range(3)
    ]
    assert strides[0][4] == "–"
    assert strides[2][4].startswith(f"{own['increase'][2]:+.4f} [")
    overlap = (result["model"]["history"] + result["model"]["window"] - 1) / result["data"]["tokens"]
    assert f"{overlap:.1%} of the replacement pasts" in text_of(page)


@pytest.mark.usefixtures("no_plots")
def test_difference_from_the_control_is_in_words_with_its_percentage(result: dict[str, Any]) -> None:
    result["scores"]["all"]["gain"] = {"nats": [0.1], "interval": [[0.05, 0.15]]}
    words = "lower by 0.1000 nats/token (9.5 %), 95 % interval: 0.0500 to 0.1500 lower"
    assert words in text_of(draw(result))


@pytest.mark.usefixtures("no_plots")
def test_text_that_the_model_was_trained_on_is_a_warning(result: dict[str, Any]) -> None:
    assert "this is not unseen text: it is the training text" in text_of(draw(result))
    del result["data"]["training_overlap"]  # older analyses do not have it
    assert "unseen text" not in text_of(draw(result))


@pytest.mark.usefixtures("no_plots")
def test_page_without_intervals(result: dict[str, Any]) -> None:
    for part in (result["slots"], *(result["lags"][way] for way in ("cut", "replaced", "shuffled"))):
        part["interval"] = [None] * len(part["interval"])
    text = text_of(draw(result))
    assert "with an interval that excludes zero" not in text
    assert "by no more than chance" not in text


@pytest.mark.usefixtures("no_plots")
def test_names_and_tokens_of_users_are_escaped(result: dict[str, Any]) -> None:
    result["model"]["run"] = "<script>run</script>"
    result["data"]["name"] = "<script>data</script>"
    result["frequency"]["counted_in"] = "<script>counted</script>"
    result["slots"] = {"absent": "<script>why</script>"}
    result["by_token"]["gained"][0]["token"] = "<script>token</script>"
    page = draw(result)
    assert page.count("<script>") == 1  # the theme's
    for name in ("run", "data", "counted", "why", "token"):
        assert f"&lt;script&gt;{name}&lt;/script&gt;" in page


@pytest.mark.usefixtures("no_plots")
def test_white_space_of_tokens_is_visible_and_shares_are_only_of_a_positive_gain(result: dict[str, Any]) -> None:
    token = {"token": " <b>\n\t", "places": 3, "documents": 2, "gain": 1.5}
    for gain, share in ((0.3, "+50.0%"), (-0.3, "–")):
        result["by_token"] = {"gained": [token], "lost": []}
        result["scores"]["all"] |= {"tokens": [10], "gain": {"nats": [gain], "interval": [None]}}
        page = draw(result)
        assert rows_of(page, "<code>␣&lt;b&gt;⏎\\x09</code>") == [
            ["<code>␣&lt;b&gt;⏎\\x09</code>", "3", "2", "-1.5", share]
        ]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("above_chance", "sentence"),
    [
        (
            [1, 1, 1, 0],
            "by +0.5000 [+0.4000, +0.6000], beyond lag 2 still by +0.5020 [+0.4020, +0.6020]. Shuffling",
        ),
        ([1, 1, 0, 0], "beyond lag 1 still by +0.5010 [+0.4010, +0.6010], beyond lag 2 by no more than chance."),
        (
            [1, 0, 1, 0],
            "Cutting off the whole past raises the loss by +0.5000 [+0.4000, +0.6000], beyond lag 1 by no more",
        ),
        ([0, 1, 1, 0], "Cutting off the whole past raises the loss by no more than chance."),
    ],
)
def test_how_far_back_the_past_matters_ends_at_the_first_lag_that_is_chance(
    above_chance: list[int], sentence: str, result: dict[str, Any]
) -> None:
    increase = [0.5 + lag / 1000 for lag in range(4)]
    interval = [
        [value - 0.1 if real else -0.1, value + 0.1] for value, real in zip(increase, above_chance, strict=True)
    ]
    curve = {"increase": increase, "interval": interval}
    result["lags"] = {"tokens": 9, "intervals": "none", "permutations": 64, "lag": [0, 1, 2, 4],
                      "cut": curve, "shuffled": curve}  # fmt: skip
    text = text_of(draw(result))
    assert sentence in text
    assert "Replacing" not in text  # older analyses do not have it


@pytest.mark.usefixtures("no_plots")
def test_number_of_slots_that_would_matter_by_chance(result: dict[str, Any]) -> None:
    result["slots"] |= {"increase": [0.0] * 40, "interval": [[-1.0, 1.0]] * 38 + [[0.1, 0.2], [-0.2, -0.1]],
                        "lag": list(range(1, 41))}  # fmt: skip
    expected = "Of 40 slots, 1 raise the loss and 1 lower it with an interval that excludes zero; 2 would by chance."
    assert expected in text_of(draw(result))


@pytest.mark.usefixtures("no_plots")
def test_share_of_the_total_gain_by_last_occurrence(result: dict[str, Any]) -> None:
    both = {"nats": [1.0, 1.0], "interval": [None, None]}
    result["last_seen"]["where"] = {"kinds": ["near", "far"], "tokens": [4, 4], "model": both, "control": both,
                                    "gain": {"nats": [0.5, -0.25], "interval": [None, None]}}  # fmt: skip
    page = draw(result)
    assert rows_of(page, "near")[0][1:] == ["4 (50.0%)", "1.000", "1.000", "-0.5000", "200%"]
    assert rows_of(page, "far")[0][1:] == ["4 (50.0%)", "1.000", "1.000", "+0.2500", "-100%"]


@pytest.mark.usefixtures("no_plots")
def test_control_with_other_windows_is_explained(result: dict[str, Any]) -> None:
    assert "The control has windows of" not in text_of(draw(result))
    result["control"]["window"] = 16
    assert "The control has windows of 16 tokens" in text_of(draw(result))


@pytest.mark.usefixtures("no_plots")
def test_older_analyses_without_documents_and_tokens_are_drawn(result: dict[str, Any]) -> None:
    del result["documents"], result["by_token"]
    page = draw(result)
    assert ">In-vocabulary" not in page
    assert ">Tokens where" not in page


@pytest.mark.usefixtures("no_plots")
def test_recall_has_a_section_with_its_numbers(result_recall: dict[str, Any]) -> None:
    page, part = draw(result_recall), result_recall["recall"]
    assert ">Recall</h2>" in page
    assert "recall 32</td>" in page
    everything = part["gain"]["all"]
    (row,) = rows_of(page, "all tokens")
    assert row[2:4] == [f"{everything[name]['nats'][0]:.4f}" for name in ("model", "control")]
    assert row[4].startswith(f"{-everything['gain']['nats'][0]:+.4f} [")
    orders, lags = rows_of(page, "length of the match"), rows_of(page, "lag of the match")
    assert [row[1] for row in orders + lags] == ["0", "1", "2", "1–8", "9–32"]
    assert orders[1][3] == f"{part['components']['by_order']['weight'][1]:.2%}"
    best = part["passages"]["gained"][0]
    assert f"length {best['order']}, lag {('1–8', '9–32')[best['lag_bin']]}" in page
    assert f"<td>{-best['gain']:+.2f}</td>" in page
    assert "Recall is not changed" in text_of(page)


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("closed", "opened", "warning"),
    [(0.995, 0.0, "practically never opens"), (0.0, 0.995, "is practically always open"), (0.9, 0.1, None)],
)
def test_gate_of_recall_that_is_always_the_same_is_a_warning(
    closed: float, opened: float, warning: str | None, result_recall: dict[str, Any]
) -> None:
    result_recall["recall"]["gate"] |= {"closed": closed, "open": opened}
    text = text_of(draw(result_recall))
    assert f"below 1 % at {closed:.1%} of the tokens, above 99 % at {opened:.1%}" in text
    assert ("Warning: the gate" in text) == (warning is not None)
    assert warning is None or warning in text


@pytest.mark.usefixtures("no_plots")
def test_texts_of_recalls_passages_are_escaped(result_recall: dict[str, Any]) -> None:
    result_recall["recall"]["passages"]["lost"][0] |= {"before": "a <script>\n", "token": " <b>"}
    page = draw(result_recall)
    assert page.count("<script>") == 1  # the theme's
    assert "a &lt;script&gt;⏎" in page
    assert "<code>␣&lt;b&gt;</code>" in page


@pytest.mark.usefixtures("no_plots")
def test_contents_lead_to_the_sections_that_there_are(result: dict[str, Any]) -> None:
    page = draw(result)
    assert re.findall(r'<a href="#(\w+)">', page) == re.findall(r'<h2 id="(\w+)">', page)
    result["by_token"] = {}
    assert "#by_token" not in draw(result)


def test_page_in_a_browser_fits_a_phone_and_has_two_themes(
    result_recall: dict[str, Any], tmp_path: Path, browser: Any
) -> None:
    page = tmp_path / "page.html"
    page.write_text(draw(result_recall), encoding="utf-8")
    with opened_in(browser, page, viewport=PHONE, color_scheme="dark") as opened:
        assert opened("document.documentElement.scrollWidth") == 360
        assert brightness(opened) < 128
        opened.tab.click("#theme")
        assert brightness(opened) > 128
        assert opened("[...document.images].every((image) => image.naturalWidth > 100)")


def test_axe_finds_nothing_serious(result_recall: dict[str, Any], tmp_path: Path, browser: Any, axe: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(draw(result_recall), encoding="utf-8")
    assert serious_findings(browser, page, axe, viewport=PHONE) == []
