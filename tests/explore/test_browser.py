"""The page in a real browser: what it computes, shows and lets the reader do, and that it asks nobody for anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browsing import DESKTOP, PHONE, Opened, brightness, opened_in, serious_findings
from explore.conftest import index_of
from logpast.data import TokenStore
from logpast.explore.compute import Text, details_of, score_text
from logpast.explore.explore import explore
from logpast.models import LogMemoryConfig
from logpast.recall import naive
from logpast.training.checkpoint import find_checkpoint

READY = "html[data-ready=true]"


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Opened]:
    with opened_in(browser, page, ready=READY) as found:
        yield found


def panel(opened: Opened) -> str:
    return " ".join(opened.tab.inner_text("#panel").split())


# --- what it computes, against Python


def test_numbers_are_those_that_were_packed(opened: Opened, runs: dict[str, Path], store: TokenStore) -> None:
    model, control = (find_checkpoint(runs[name]).load_model() for name in ("both", "control"))
    text = Text(store, len(store), "document", 16, torch.device("cpu"), "float32")
    scores = score_text(model, control, text, lambda name, done: None)
    assert opened("Array.from(data.ids)") == store.tokens.tolist()
    for name in index_series(opened):
        found = np.array(opened(f"Array.from(data.losses['{name}'])"))
        np.testing.assert_allclose(found, scores[name], rtol=1e-3, err_msg=name)
    weights = np.array(opened("Array.from(data.weights)")).reshape(-1, len(store)).T
    np.testing.assert_allclose(weights, scores["weights"], rtol=1e-3, atol=1e-7)
    details = details_of(model, text, np.array(opened("Array.from(data.detailed)")), lambda name, done: None)
    assert details.mixed is not None
    assert details.attention is not None
    number = len(details.tokens)
    for source, likeliest in (("own", details.own), ("mixed", details.mixed)):
        pair = "({ piece, probability }) => [pieces.id[piece], probability]"
        script = f"Array.from(data.detailed, (_, i) => likeliest('{source}', i).map({pair}))"
        ids, probabilities = np.moveaxis(np.array(opened(script)), -1, 0)
        assert ids.tolist() == likeliest.ids.tolist()
        np.testing.assert_allclose(probabilities, likeliest.probabilities, rtol=1e-3)
    attention = np.array(opened("Array.from(data.detailed, (_, i) => attentionOf(i))"))
    assert attention.shape == (number, 17)
    np.testing.assert_allclose(attention, details.attention, rtol=1e-3, atol=1e-6)


def index_series(opened: Opened) -> list[str]:
    series: list[str] = opened("index.series")
    return series


def test_details_are_of_the_tokens_that_gain_or_lose_most(opened: Opened) -> None:
    least, most = opened("""(() => {
      const gains = index.comparisons.map(([name]) => gainOver(name));
      const size = Array.from(data.ids, (_, i) => Math.max(...gains.map((gain) => Math.abs(gain[i]))));
      const has = new Set(data.detailed);
      return [Math.min(...Array.from(data.detailed, (i) => size[i])), Math.max(...size.filter((_, i) => !has.has(i)))];
    })()""")
    assert most <= least + 0.01


@pytest.mark.parametrize(("document", "offset"), [(0, 0), (0, 1), (0, 40), (0, 150), (1, 2), (1, 30), (1, 99), (2, 9)])
def test_recall_finds_what_its_definition_says(document: int, offset: int, opened: Opened, store: TokenStore) -> None:
    """Also that no match crosses the border of a document."""
    start = int(store.documents.start[document])
    token = start + offset
    expected = naive.distribution(store.tokens[start:token].tolist(), 3, [16, 64], store.tokenizer.size)
    found = np.zeros_like(expected)
    for each in opened(f"componentsOf({token}).components.map((e) => ({{ ...e, copies: [...e.copies] }}))"):
        assert each["matches"] == expected[each["length"], each["bin"]].sum()
        for copied, hits in each["copies"]:
            found[each["length"], each["bin"], copied] = hits
    assert (found == expected).all()


def test_passages_and_the_model_add_up_to_the_mixture(opened: Opened) -> None:
    """The mixture's probability of a candidate is that of the model and of the passages that it followed."""
    worst, compared = opened("""(() => {
      let worst = 0, compared = 0;
      for (const [detail, token] of data.detailed.entries()) {
        const found = componentsOf(token);
        const own = new Map(likeliest("own", detail).map((e) => [pieces.id[e.piece], e.probability]));
        const { own: part, copied } = sourcesOf(token, found), all = part + copied.reduce((a, b) => a + b, 0);
        worst = Math.max(worst, Math.abs(all / Math.exp(-data.losses.model[token]) - 1));
        const passages = passagesOf(found), bins = recall.edges.length;
        for (const { piece, probability } of likeliest("mixed", detail)) {
          const id = pieces.id[piece];
          if (!own.has(id)) continue;
          let sum = own.get(id) * data.weights[token];
          for (const each of passages) if (data.ids[each.at] === id) sum += each.weight;
          for (const each of found.components.slice(0, bins)) { // passages of no equal token are not listed
            const listed = passages.filter((e) => data.ids[e.at] === id && e.bin === each.bin).length;
            if (each.matches) sum += each.weight * ((each.copies.get(id) || 0) - listed) / each.matches;
          }
          worst = Math.max(worst, Math.abs(sum - probability));
          compared++;
        }
      }
      return [worst, compared];
    })()""")
    assert compared > 500
    assert worst < 0.01  # numbers are in half precision


def test_words_of_slots_are_the_sums_of_their_filters(opened: Opened, runs: dict[str, Path], store: TokenStore) -> None:
    config = find_checkpoint(runs["both"]).config.model
    assert isinstance(config, LogMemoryConfig)
    token, slot = int(store.documents.start[1]) + 100, 14
    window = 100 // 8 * 8
    before = store.tokens[token - 100 : token - 100 + window - 1][::-1]  # position 0 is end-of-text
    sums: dict[int, float] = {}
    for lag, word in enumerate(before[: config.bank.horizon].tolist(), start=1):
        sums[word] = sums.get(word, 0) + config.bank.weights[slot, lag - 1]
    best, found = max(sums, key=sums.__getitem__), opened(f"wordsOf({slot}, {token})")
    assert found[0]["id"] == best
    assert found[0]["share"] == pytest.approx(sums[best] / sum(sums.values()), rel=0.02)
    often = (np.asarray(store.tokens) == best).mean()
    assert found[0]["times"] == pytest.approx(found[0]["share"] / often, rel=1e-6)
    assert sum(each["share"] for each in found) == pytest.approx(1)
    peak = config.bank.peaks[slot]
    first, last = opened(f"lagsOf({slot})")
    assert first <= peak <= last


# --- what it shows


def test_strange_text_is_shown_as_text(opened: Opened) -> None:
    shown = opened("Array.from(linesElement.querySelectorAll('.line'), (line) => line.textContent).join('')")
    for part in ("<script>alert(1)</script>", "</script><!--", "&amp;", '"quotes"', "{{", "‹202E›reversed‹202C›",
                 "␀␇␛[31m", "שלום", "مرحبا", "😀", "👩\u200d🚀", "猫", "é⇥"):  # fmt: skip
        assert part in shown, part
    assert opened("document.querySelectorAll('#lines script, #panel script').length") == 0
    opened("select(8)")
    assert opened("textOf(0, 8)").startswith("<scr")
    assert opened("textOf(0, 8)") in panel(opened)


def test_character_of_several_tokens_stands_at_the_last(opened: Opened) -> None:
    token = opened("Array.from(data.place).findIndex((piece) => pieces.text[piece] === '😀')")
    cells = [opened(f"document.getElementById('t{token - back}').textContent") for back in range(3, -1, -1)]
    assert cells == ["", "", "", "😀"]
    opened(f"select({token - 3})")
    assert "\\xf0" in panel(opened)
    assert "a part of a character" in panel(opened)
    opened.tab.keyboard.press("ArrowRight")
    assert "\\x9f" in panel(opened)


def test_lines_fit_the_width_and_hold_all_tokens_once(opened: Opened) -> None:
    for width in (1280, 500):
        opened.tab.set_viewport_size({"width": width, "height": 800})
        opened.tab.wait_for_timeout(100)
        first = opened("Array.from(layout.first)")
        assert first == sorted(first)
        assert first[-1] == opened("count")
        wide = opened("""Array.from(linesElement.querySelectorAll('.line'), (line) => {
          const right = (element) => element.getBoundingClientRect().right;
          return Math.max(...Array.from(line.children, right)) - right(line);
        })""")
        assert max(wide) < 25  # a line break may stand beyond the margin


def test_pointing_at_a_token_shows_its_probabilities(opened: Opened) -> None:
    token = opened("data.detailed.findLast((token) => token < 120)")
    opened.tab.hover(f"#t{token}")
    text = panel(opened)
    losses = {name: opened(f"data.losses['{name}'][{token}]") for name in index_series(opened)}
    for name in ("model", "no recall", "no memory", "neither"):
        assert f"{losses[name]:.2f} nats" in text, name
    assert opened(f"percent({np.exp(-losses['control'])})") in text
    for title in ("Where this probability comes from", "on a logarithmic time axis", "Passages that recall used",
                  "Slots that attention looked at", "Most likely tokens by source", "mixture of all", "the model alone",
                  "copies, "):  # fmt: skip
        assert title in text, title
    opened.tab.hover("#title")
    assert "one by one" in panel(opened)


def test_token_without_details_says_so_and_has_the_rest(opened: Opened) -> None:
    token = opened("Array.from(data.ids.keys()).find((token) => token > 60 && detailOf(token) < 0)")
    opened(f"select({token})")
    text = panel(opened)
    assert text.count("kept for the 400 tokens that gain or lose most") == 2
    assert "Passages that recall used" in text
    assert "mixture of all" not in text


def test_time_axis_is_logarithmic_and_its_stems_are_the_passages(opened: Opened) -> None:
    token = opened("ranking('helped').find((token) => passagesOf(componentsOf(token)).length > 8)")
    opened(f"select({token}, true)")
    lags = opened(f"passagesOf(componentsOf({token})).map((each) => each.lag)")
    places = opened("Array.from(document.querySelectorAll('#panel .stem'), (stem) => Number(stem.getAttribute('x1')))")
    rest = opened("document.querySelector('#panel .rest').getAttribute('d')")
    places += [float(stem.split()[0]) for stem in rest.split("M")[1:]]
    assert len(places) == len(lags) > 8
    steps = np.diff(np.array(places)) / -np.diff(np.log(lags))
    assert steps == pytest.approx(np.full(len(steps), steps[0]), rel=0.05)
    at = opened(f"passagesOf(componentsOf({token}))[0].at")
    opened.tab.locator("#panel .dot").first.click()
    assert opened("state.current") == at
    opened.tab.go_back()
    opened.tab.wait_for_function(f"state.current === {token}")


def test_passage_is_marked_in_the_text_and_can_be_visited(opened: Opened) -> None:
    token = opened("ranking('helped').find((token) => passagesOf(componentsOf(token)).length)")
    opened(f"select({token}, true)")
    best = opened(f"passagesOf(componentsOf({token}))[0]")
    assert best["at"] in opened("[...marks.source]")
    opened.tab.locator("#panel .list button").first.click()
    assert opened("state.current") == best["at"]
    assert opened(f"document.getElementById('t{best['at']}').classList.contains('current')")


# --- what the reader does


def test_jumps_visit_the_largest_gains_and_losses(opened: Opened) -> None:
    gain = np.array(opened("Array.from(gainOver('control'))"))
    opened.tab.click("#helped")
    assert gain[opened("state.current")] == gain.max()
    opened.tab.keyboard.press("n")
    assert gain[opened("state.current")] == np.sort(gain)[-2]
    assert opened.tab.inner_text("#position").startswith("gain 2 of ")
    opened.tab.keyboard.press("p")
    opened.tab.keyboard.press("p")
    assert opened("state.at") == opened("state.list.length") - 1
    opened.tab.keyboard.press("l")
    assert gain[opened("state.current")] == gain.min()
    box = opened.tab.locator(".t.current").bounding_box()
    assert 100 < box["y"] < 760


def test_search_marks_all_hits_and_steps_through_them(opened: Opened) -> None:
    opened.tab.keyboard.press("/")
    opened.tab.keyboard.type("god SAID", delay=5)
    text = "".join(opened("Array.from(data.place, (piece) => pieces.text[piece])")).lower().replace("\n", " ")
    assert opened("state.list.length") == text.count("god said") > 1
    assert opened.tab.inner_text("#position") == f"{text.count('god said')} hits"
    opened.tab.keyboard.press("Enter")
    first = opened("state.current")
    assert opened("textOf(state.current, state.current + 8)").lower().lstrip().startswith("god said")
    assert opened(f"document.getElementById('t{first}').classList.contains('hit')")
    opened.tab.keyboard.press("Enter")
    assert opened("state.current") > first
    opened.tab.keyboard.press("Escape")
    assert opened("[$('search').value, state.kind, document.querySelectorAll('.hit').length]") == ["", "", 0]
    opened.tab.fill("#search", "xyzzy")
    assert opened.tab.inner_text("#position") == "0 hits"


def test_arrow_keys_move_from_token_to_token_and_line_to_line(opened: Opened) -> None:
    press = opened.tab.keyboard.press
    press("ArrowRight")
    assert opened("state.current") == 0
    press("ArrowRight")
    assert opened("state.current") == 1
    assert opened("textElement.getAttribute('aria-activedescendant')") == "t1"
    assert percent_in(opened("$('live').textContent"))
    press("ArrowLeft")
    press("ArrowLeft")
    assert opened("state.current") == 0
    press("ArrowDown")
    below = opened("state.current")
    assert opened(f"lineOf({below})") > opened("lineOf(0)")
    press("ArrowUp")
    assert opened("lineOf(state.current)") == opened("lineOf(0)")
    press("Escape")
    assert opened("state.current") is None


def percent_in(text: str) -> bool:
    return "%" in text or "1 in" in text


def test_help_explains_every_key(opened: Opened) -> None:
    opened.tab.keyboard.press("?")
    assert opened("$('help').open")
    explained = set(opened.tab.locator("#help kbd").all_inner_texts())
    assert explained == {*opened("Object.keys(keys).map((key) => key === 'Escape' ? 'Esc' : key)"), *"←→↑↓", "Enter"}
    opened.tab.keyboard.press("Escape")
    assert not opened("$('help').open")


def test_colours_follow_the_probability_or_the_gain(opened: Opened) -> None:
    def classes(token: int) -> set[str]:
        return set(opened(f"[...document.getElementById('t{token}').classList]"))

    visible = range(opened("layout.first[12]"))
    gain, loss = (np.array(opened(f"Array.from({each})")) for each in ("gainOver('control')", "data.losses.model"))
    best, worst = (int(pick(gain[: len(visible)])) for pick in (np.argmax, np.argmin))
    assert "gain" in classes(best)
    assert "harm" in classes(worst)
    opened.tab.select_option("#mode", "loss")
    assert classes(int(np.argmax(loss[: len(visible)]))) >= {"loss", "s3"}
    assert "< 10 %" in opened.tab.inner_text("#legend")
    opened.tab.keyboard.press("Escape")
    opened.tab.keyboard.press("c")
    assert opened("mode") == "control"
    assert "×100" in opened.tab.inner_text("#legend")


def test_map_leads_to_its_place(opened: Opened) -> None:
    box = opened.tab.locator("#map").bounding_box()
    opened.tab.mouse.click(box["x"] + 5, box["y"] + box["height"] - 5)
    opened.tab.wait_for_function("textElement.scrollTop > 100")
    assert opened("firstInView()") > 100
    for _ in range(5):
        opened.tab.mouse.wheel(0, -90)
        opened.tab.wait_for_timeout(50)
    cells = opened("Array.from(linesElement.querySelectorAll('.t'), (cell) => cell.id)")
    assert len(cells) == len(set(cells))
    assert opened("linesElement.children.length") < 80  # only what can be seen exists


def test_address_leads_to_a_token(browser: Any, page: Path) -> None:
    with opened_in(browser, page, "#150", READY) as opened:
        assert opened("state.current") == 150


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_until_it_is_switched(scheme: str, browser: Any, page: Path) -> None:
    with opened_in(browser, page, ready=READY, color_scheme=scheme) as opened:
        before = brightness(opened)
        assert (before > 128) == (scheme == "light")
        opened.tab.keyboard.press("t")
        assert (brightness(opened) > 128) != (scheme == "light")
        opened.tab.click("#theme")
        assert brightness(opened) == before


def test_phone_has_the_whole_page_within_its_width(browser: Any, page: Path) -> None:
    with opened_in(browser, page, ready=READY, viewport=PHONE, has_touch=True, is_mobile=True) as opened:
        assert opened("document.documentElement.scrollWidth") == 360
        assert not opened.tab.is_visible("#panel")
        opened.tab.tap("#t12")
        assert opened.tab.is_visible("#panel")
        assert "nats" in panel(opened)
        box, covered = (opened.tab.locator(each).bounding_box() for each in ("#t12", "#panel"))
        assert box["y"] + box["height"] < covered["y"]
        assert covered["width"] == 360
        for button in ("#mode", "#search", "#helped", "#hurt", "#help-button", "#theme", "#about-button"):
            place = opened.tab.locator(button).bounding_box()
            assert place["x"] >= 0, button
            assert place["x"] + place["width"] <= 360, button
        opened.tab.tap("#close")
        assert not opened.tab.is_visible("#panel")
        opened.tab.tap("#about-button")
        assert "perplexity" in panel(opened)


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_axe_finds_nothing_serious(scheme: str, size: Any, axe: Path, browser: Any, page: Path) -> None:
    acts = "jumpTo('helped')", "setMode('loss')", "$('help').showModal()"
    assert serious_findings(browser, page, axe, acts, ready=READY, viewport=size, color_scheme=scheme) == []


@pytest.mark.parametrize("name", ["memory", "recall", "xl recall"])
def test_pages_of_other_models_open(
    name: str, browser: Any, runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    page = explore(runs[name], str(store.path), out=tmp_path / "page.html", details=100, device="cpu")
    with opened_in(browser, page, ready=READY) as opened:
        opened.tab.keyboard.press("g")
        text = panel(opened)
    assert ("Passages that recall used" in text) == ("recall" in name)
    assert ("Slots that attention looked at" in text) == (index_of(page)["slots"] is not None)
    assert ("without state" in text) == (name == "xl recall")
