"""The page of `logpast analyze`: drawn from analysis.json alone, with a sentence or two under every plot."""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.reporting.html import COLOURS, html_image, html_page, html_table
from logpast.reporting.plots import remove_frame

Part = dict[str, Any]

LINEAR = 0.01  # nats up to which an axis with both small and large ones is linear
RARE = 0.001  # bins with a smaller share of the tokens have intervals that would dwarf the others
SHARES = "Above: the share of the tokens in each bin."
LEFT_OUT = "Bins with less than a thousandth of the tokens are only in analysis.json."
LOOKS = {
    "cut": ("cut off beyond lag d", "#b3282d", "o"),
    "replaced": ("another past beyond lag d", "#5b7f95", "^"),
    "shuffled": ("shuffled beyond lag d", "#c98a1b", "s"),
}


def draw(result: Part) -> str:
    """The whole page."""
    sections = [
        _opening(result),
        _documents(result.get("documents", {})),  # which analyses of before do not have
        _position(result["position"], result["model"], result["control"]),
        _frequency(result["frequency"]),
        _by_token(result.get("by_token", {}), result["scores"]["all"]),  # nor this
        _last_seen(result["last_seen"], result["model"], result["control"]),
        _slots(result["slots"], result["model"]),
        _lags(result["lags"], result["model"], result["data"]["tokens"]),
        _stride(result["stride"]),
        "<p class='note'>All figures are in <code>analysis.json</code> beside this page, which can be drawn from it "
        "again (<code>logpast analyze FOLDER</code>); nats of single tokens are in <code>nats.safetensors</code>.</p>",
    ]
    return html_page(f"{result['model']['run']} on {result['data']['name']}", "\n".join(sections))


def _opening(result: Part) -> str:
    scores, everything, data = result["scores"], result["scores"]["all"], result["data"]
    rows = []
    for name in ("model", "control"):
        about, own = result[name], scores[name]
        if about:
            what = f"{about['system']}, window {about['window']:,}"
            what += f", {about['slots']} slots" if about["slots"] else ""
            what += f", history {about['history']:,}" if about["history"] else ""
            rows.append([
                f"{name}: {html.escape(about['run'])}", what, f"{about['parameters'] / 1e6:.4g}M", f"{about['step']:,}",
                f"{everything[name]['nats'][0]:.4f}", f"{own['ppl_token']:.3f}", _number(own["bits_per_byte"], ".4f"),
            ])  # fmt: skip
    head = ["", "system", "weights", "steps", "nats per token", "ppl_token", "bits per byte"]
    gain = ""
    if "gain" in everything:
        gain = (
            f"<p>The model's <b>gain</b> over the control is {_signed(everything['gain'], 0)} nats per token: positive "
            "is better, here and below.</p>"
        )
    return (
        f"<h1>{html.escape(result['model']['run'])} on {html.escape(data['name'])}</h1>"
        f"<p>{data['tokens']:,} tokens in {data['documents']:,} documents, each token scored once "
        f"({result['settings']['precision']}, streams by {result['settings']['streams']}).</p>"
        f"{html_table(head, rows)}{gain}"
        f"<p class='note'>Intervals: {result['intervals']}, unless a part says otherwise. Differences are between the "
        f"nats of the same tokens. Code at revision {html.escape(result['revision'])}, {result['recorded']}, on "
        f"{html.escape(result['hardware']['name'])}, {result['seconds']:,.0f} s.</p>"
    )


def _documents(part: Part) -> str:
    kinds = {name: part[name] for name in ("familiar", "others") if name in part}
    if not kinds:
        return ""
    sides = [name for name in ("model", "control") if name in kinds["familiar"]["all"]]
    head = ["", "documents", "tokens", *(f"{side}, nats per token" for side in sides)]
    rows = []
    for name, kind in kinds.items():
        of_both = [f"{kind['all'][side]['nats'][0]:.4f}" for side in sides]
        rows.append([name, f"{kind['documents']:,}", f"{kind['all']['tokens'][0]:,}", *of_both])
        if "gain" in kind["all"]:
            rows[-1].append(_signed(kind["all"]["gain"], 0))
    if "gain" in kinds["familiar"]["all"]:
        head.append("gain")
    past = ""
    for way, (label, *_) in LOOKS.items():
        changed = {name: kind[way] for name, kind in kinds.items() if way in kind}
        if changed:
            heads = [f"{name}, {each['tokens']:,} tokens" for name, each in changed.items()]
            lost = [
                [f"{lag:,}", *(signed(each["increase"][i], each["interval"][i]) for each in changed.values())]
                for i, lag in enumerate(next(iter(changed.values()))["lag"])
            ]
            past += f"<p>Nats lost per token, {label}, of the first tokens of the text:</p>"
            past += html_table(["d", *heads], lost)
    return (
        "<h2>Familiar documents, and others</h2>"
        f"<p>Others are documents of which more than {part['most_unseen']:.0%} of the tokens never stand in "
        f"{html.escape(part['counted_in'])}: what models make of such tokens was never learned, so that chance weighs "
        f"more there.</p>{html_table(head, rows)}{past}"
    )


def _position(part: Part, model: Part, control: Part | None) -> str:
    each, binned = part["each"], part["binned"]
    seen = range(1, len(each["tokens"]) + 1)
    figure, left, right = _panels("gain" in each)
    middles = [math.sqrt((first + 1) * (last + 1)) for first, last in spans(binned)]
    for name in ("model", "control"):
        if name in each:  # a dot is noisy where positions are many: the line goes through the bins
            left.plot(seen, each[name]["nats"], ".", color=_colour(name), alpha=0.35, markersize=3)
            _curve(left, middles, binned[name]["nats"], binned[name]["interval"], name, marker="o")
    left.set(xscale="log", xlabel="tokens of the window in sight (position + 1)", ylabel="nats per token")
    _plain_log(left, seen[-1])
    left.legend(frameon=False)
    if right:
        _bars(right, [span(a + 1, b + 1) for a, b in spans(binned)], binned["gain"], _shares(binned))
        right.set(xlabel="tokens of the window in sight (position + 1)", ylabel="gain, nats per token")
    text = (
        f"Dots: the mean over all tokens that stand at each of the {model['window']:,} positions of their window. "
        "Lines: the same by positions taken together in doubling bins, with intervals. At position 0 the model sees a "
        "single token as it is, and whatever it knows of the past; at the last one the whole window. "
    )
    text += f"Right: the gain, by the same bins. {SHARES}" if right else ""
    if control and control["window"] != model["window"]:
        text += (
            f" The control's own windows are of {control['window']:,} tokens: its tokens, too, stand here at their "
            "position in the model's window, and it had others in sight than the axis says."
        )
    return _section("Loss by position in the window", figure, text)


def _frequency(part: Part) -> str:
    figure, left, right = _panels("gain" in part)
    shown = [i for i, share in enumerate(_shares(part)) if share >= RARE]
    labels = [span(part["from"][i], part["to"][i]) for i in shown]
    for name in ("model", "control"):
        if name in part:
            column = _chosen(part[name], shown)
            _curve(left, range(len(labels)), column["nats"], column["interval"], name, marker="o")
    _ticks(left, labels)
    left.set(xlabel="occurrences of the token", ylabel="nats per token")
    left.legend(frameon=False)
    if right:
        _bars(right, labels, _chosen(part["gain"], shown), [_shares(part)[i] for i in shown])
        right.set(xlabel="occurrences of the token", ylabel="gain, nats per token")
    return _section(
        "Loss by frequency",
        figure,
        f"Tokens in bins by how often they occur among the {part['counted_tokens']:,} tokens of "
        f"{html.escape(part['counted_in'])}; rare ones on the left. {SHARES if right else ''} {LEFT_OUT}",
    )


def _by_token(part: Part, everything: Part) -> str:
    if not part:
        return ""
    total = everything["gain"]["nats"][0] * everything["tokens"][0]
    tables = ""
    for kind, tokens in part.items():
        head = [f"most {kind}", "places", "documents", "nats in all", "of all gain"]
        rows = []
        for each in tokens:
            share = f"{each['gain'] / total:+.1%}" if total > 0 else "–"
            counts = [f"{each[name]:,}" for name in ("places", "documents")]
            rows.append([f"<code>{_visible(each['token'])}</code>", *counts, f"{each['gain']:+,.1f}", share])
        tables += html_table(head, rows)
    return (
        "<h2>Tokens that gain and lose most</h2>"
        "<p>The gain of a token, summed over all places where it stands. Those of few documents are words that a text "
        "is about; those of many belong to the language, or to the form of the text: a sign for headings that the "
        f"training text lacks would show here, too. (␣ is a space, ⏎ the end of a line.)</p>{tables}"
    )


def _visible(token: str) -> str:
    shown = token.replace(" ", "␣").replace("\n", "⏎")
    return html.escape("".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in shown))


def _last_seen(part: Part, model: Part, control: Part | None) -> str:
    where, lags = part["where"], part["by_lag"]
    shares = _shares(lags)
    order = [i for i, share in enumerate(shares) if share >= RARE]
    order.sort(key=lambda i: (lags["from"][i] < 0, lags["from"][i]))  # never comes last
    special = {-1: "never", 0: "in the\nwindow"}
    labels = [special.get(lags["from"][i], span(lags["from"][i], lags["to"][i])) for i in order]
    side = "gain" if "gain" in lags else "model"
    figure, axis, _ = _panels(False)
    _bars(axis, labels, _chosen(lags[side], order), [shares[i] for i in order])
    what = "gain, nats per token" if side == "gain" else "nats per token"
    axis.set(xlabel="how far before the window the token last occurred (lag)", ylabel=what)
    sights = {"model's history": model["history"]}
    if control and control["window"] == model["window"]:  # else its past begins elsewhere
        sights["control's sight"] = control["history"]
    for height, (label, reach) in enumerate(sights.items()):
        for place, i in enumerate(order):
            if 0 < lags["from"][i] <= reach <= lags["to"][i]:
                _mark(axis, place - 0.5 + math.log2((reach + 1) / lags["from"][i]), f"{label} ends", height)
    total = sum(where["tokens"])
    head = ["the token last occurred", "tokens", "model"]
    head += ["control", "gain", "of all gain"] if side == "gain" else []
    rows = []
    for i, name in enumerate(where["kinds"]):
        row = [
            html.escape(name),
            f"{where['tokens'][i]:,} ({where['tokens'][i] / total:.1%})",
            _number(where["model"]["nats"][i]),
        ]
        if side == "gain":
            row += [_number(where["control"]["nats"][i]), _signed(where["gain"], i), _share(where, i)]
        rows.append(row)
    return _section(
        "Loss by where the token last occurred",
        figure,
        "A long memory should pay for tokens that occurred before the window and not in it. Each token is put into the "
        "bin of its latest earlier occurrence in the stream, counted back from the start of the window. A model that "
        "expects words of its past again gains on those that do recur and pays on those that do not: the bins are to "
        f"be read together. {SHARES} {LEFT_OUT}",
        html_table(head, rows),
    )


def _slots(part: Part, model: Part) -> str:
    title = "Which slots matter"
    if "absent" in part:
        return _missing(title, part)
    figure, axis, _ = _panels(False)
    errors = _errors(part["increase"], part["interval"])
    axis.errorbar(part["lag"], part["increase"], errors, fmt="o", color=COLOURS["memory"], markersize=4, linewidth=1)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set(xscale="log", xlabel="lag at which the slot peaks (tokens)", ylabel="increase, nats per token")
    _plain_log(axis, part["lag"][-1])
    most = max(range(len(part["increase"])), key=lambda i: part["increase"][i])
    known = [interval for interval in part["interval"] if interval is not None]
    rise, fall = sum(low > 0 for low, _ in known), sum(high < 0 for _, high in known)
    norm = ", after the memory's LayerNorm," if model["system"] == "log_memory" else ""
    return _section(
        title,
        figure,
        f"One slot at a time is set to a zero vector in the sequence{norm} while its position embedding stays, and "
        f"the first {part['tokens']:,} tokens are scored again: by how much their loss rises. The slot with its peak "
        f"at lag {part['lag'][most]:,.4g} matters most "
        f"({signed(part['increase'][most], part['interval'][most])}); "
        f"of {len(part['lag'])} slots {rise} raise the loss and {fall} lower it by an interval that leaves out zero, "
        f"as {0.05 * len(part['lag']):.0f} would by chance. All slots set to zero: "
        f"{signed(part['all']['increase'], part['all']['interval'])} nats per token. A model is not trained to "
        "miss a slot, and neighbouring slots hold much the same: a small rise does not say that a stretch of the past "
        f"is worth nothing. Intervals: {part['intervals']}.",
    )


def _lags(part: Part, model: Part, tokens: int) -> str:
    title = "How far back the past matters"
    if "absent" in part:
        return _missing(title, part)
    figure, axis, _ = _panels(False)
    sentences = []
    places, other = [max(lag, 0.5) for lag in part["lag"]], "replaced" in part  # older ones have no other pasts
    own = min(1, (model["history"] + model["window"] - 1) / tokens)  # places that are drawn of all the text alike
    for way, (label, colour, marker) in ((way, look) for way, look in LOOKS.items() if way in part):
        _curve(axis, places, part[way]["increase"], part[way]["interval"], label, colour, marker)
        sentences.append(_told_apart(part, way))
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set(xscale="log", xlabel="lag d (tokens before the window)", ylabel="increase, nats per token")
    _plain_log(axis, part["lag"][-1], first=0.5)
    values = [value for way in LOOKS if way in part for value in _ends(part[way])]
    axis.set_yscale("symlog", linthresh=LINEAR)  # what is cut off may cost a hundred times what is shuffled
    axis.set_ylim(min(1.5 * min(values), -LINEAR / 5), max(1.5 * max(values), LINEAR))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False)
    return _section(
        title,
        figure,
        f"The {model['history']:,} tokens before each window are left as they are up to lag d; those farther back are "
        f"taken away (no token: a zero vector){', replaced by tokens from elsewhere in the text' if other else ''} or "
        f"put into random order, and the loss of the first {part['tokens']:,} tokens rises by so much. At d = 0 all of "
        f"the past is changed. {' '.join(sentences)} Cut off, slots that look beyond d are empty, which a model knows "
        "only from the first windows of a stream"
        f"{'; replaced, they hold a past that may mislead: both' if other else ': that'} may overstate what the past "
        "beyond d is worth. "
        "Shuffled, they hold the same words, near and far mixed: that is what it is worth where each stands. "
        f"({part['permutations']} seeded orders{' and other pasts' if other else ''} are dealt to windows by their "
        f"ids{f'; by chance some {own:.1%} of other pasts hold tokens of the window itself' if other else ''}.) "
        f"The axis is linear up to {LINEAR:g}, then logarithmic. Intervals: {part['intervals']}.",
    )


def _ends(curve: Part) -> list[float]:
    """All heights of a curve and its intervals."""
    return [*curve["increase"], *(end for interval in curve["interval"] if interval for end in interval)]


def _mark(axis: Any, place: float, label: str, height: int) -> None:
    """A line with its label above the axes and the shares, at a height of its own: two may be near each other."""
    axis.axvline(place, color="0.4", linestyle=":", linewidth=1)
    how = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.3"}
    above = {"xytext": (0, 10 + 10 * height), "textcoords": "offset points"}
    axis.annotate(label, (place, 1), xycoords=("data", "axes fraction"), **above, **how)


def _told_apart(part: Part, way: str) -> str:
    """From which lag on a change can no longer be told from none."""
    intervals = part[way]["interval"]
    matters = [interval is None or interval[0] > 0 for interval in intervals]
    action = {"cut": "Cutting off", "replaced": "Replacing", "shuffled": "Shuffling"}[way]
    first = matters.index(False) if False in matters else len(matters)
    if first == 0:
        return f"{action} all of it raises the loss by no more than chance."
    if first == len(matters):
        return ""
    costs = [signed(part[way]["increase"][i], intervals[i]) for i in (0, first - 1)]
    text = f"{action} all of it costs {costs[0]}"
    if first > 1:
        text += f", what lies beyond lag {part['lag'][first - 1]:,} still {costs[1]}"
    return text + ("." if first == len(matters) - 1 else f", beyond lag {part['lag'][first]:,} no more than chance.")


def _stride(part: Part) -> str:
    title = "Perplexity against scoring stride"
    if "absent" in part:
        return _missing(title, part)
    figure, axis, _ = _panels(False)
    sides = {name: part[name] for name in ("model", "control") if name in part}
    for name, own in sides.items():
        axis.plot(own["stride"], own["ppl_token"], marker="o", color=_colour(name), label=name)
        for *place, cost in zip(own["stride"], own["ppl_token"], own["cost"], strict=True):
            axis.annotate(f"{cost:.3g}×", place, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axis.set(xscale="log", xlabel="stride s (tokens scored per window)", ylabel="perplexity per token")
    axis.margins(y=0.15)
    strides = sorted({stride for own in sides.values() for stride in own["stride"]})
    axis.set_xticks(strides, [f"{stride:,}" for stride in strides])
    axis.minorticks_off()
    axis.legend(frameon=False)
    rows = [
        [name, f"{own['stride'][i]:,}", f"{own['cost'][i]:.3g}", f"{own['ppl_token'][i]:.3f}", _change(own, i)]
        for name, own in sides.items()
        for i in range(len(own["stride"]))
    ]
    return _section(
        title,
        figure,
        f"Windows that start s tokens apart; of each only the last s predictions count, of the first all, so that each "
        f"of {part['tokens']:,} tokens is scored once and, but for the first of a stream, has at least window − s + 1 "
        "tokens of its window in sight. The numbers say how many times as many windows are read. Every other figure of "
        f"this page is at the largest stride. Intervals: {part['intervals']}."
        + (f" The control is not shown: {html.escape(part['control_absent'])}." if "control_absent" in part else ""),
        html_table(["", "stride", "cost", "ppl_token", "change, nats per token"], rows),
    )


def _section(title: str, figure: Any, text: str, more: str = "") -> str:
    return f"<h2>{title}</h2>\n{html_image(figure, title)}\n<p>{text}</p>{more}"


def _missing(title: str, part: Part) -> str:
    return f"<h2>{title}</h2>\n<p>Does not apply: {html.escape(part['absent'])}.</p>"


def _panels(two: bool) -> tuple[Any, Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.7), layout="constrained")
    axes = figure.subplots(1, 2 if two else 1, squeeze=False)[0]
    remove_frame(*axes)
    return figure, axes[0], axes[1] if two else None


def _colour(name: str) -> str:
    return COLOURS["control" if name == "control" else "memory"]


def _curve(
    axis: Any, x: Any, y: list[float], intervals: list[Any], label: str, colour: str = "", marker: str = ""
) -> None:
    """A line and the band of its intervals."""
    colour, (low, high) = colour or _colour(label), _errors(y, intervals)
    axis.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
    axis.fill_between(x, y - low, y + high, color=colour, alpha=0.18, linewidth=0)


def _bars(axis: Any, labels: list[str], column: Part, shares: list[float]) -> None:
    for place, share in enumerate(shares):
        text = f"{share:.0%}" if share >= 0.01 else "<1%"
        at = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axis.annotate(text, (place, 1.0), fontsize=7, color="0.45", **at)
    errors = _errors(column["nats"], column["interval"])
    axis.bar(range(len(labels)), column["nats"], color=COLOURS["memory"], alpha=0.75, width=0.75)
    axis.errorbar(range(len(labels)), column["nats"], errors, fmt="none", ecolor="0.15", elinewidth=1, capsize=2)
    axis.axhline(0, color="0.3", linewidth=0.8)
    _ticks(axis, labels)


def _errors(values: list[float], intervals: list[Any]) -> NDArray[np.float64]:
    """(2, values): lengths below and above each; 0 where there is no interval."""
    low, high = np.array([interval or [value, value] for value, interval in zip(values, intervals, strict=True)]).T
    return np.maximum(0, [values - low, high - values])


def _ticks(axis: Any, labels: list[str]) -> None:
    crowded = len(labels) > 7 or sum(map(len, labels)) > 45  # half a page has room for so many letters
    axis.set_xticks(range(len(labels)), labels, rotation=45 if crowded else 0, ha="right" if crowded else "center",
                    rotation_mode="anchor" if crowded else None, fontsize=8)  # fmt: skip


def _plain_log(axis: Any, last: float, first: float = 1) -> None:
    """Powers of two, or of four, as plain numbers; 0 stands at one half."""
    step = 1 if last <= 10_000 else 2
    ticks = [2**power for power in range(0, round(last).bit_length(), step)]
    labels = [f"{tick:,}" for tick in ticks]
    if first < 1:
        ticks, labels = [first, *ticks], ["0", *labels]
    axis.set_xticks(ticks, labels)
    axis.minorticks_off()


def _shares(part: Part) -> list[float]:
    return [tokens / sum(part["tokens"]) for tokens in part["tokens"]]


def _chosen(column: Part, places: list[int]) -> Part:
    return {name: [column[name][i] for i in places] for name in ("nats", "interval")}


def spans(part: Part) -> list[tuple[int, int]]:
    return list(zip(part["from"], part["to"], strict=True))


def span(first: int, last: int) -> str:
    return _short(first) if first == last else f"{_short(first)}–{_short(last)}"


def _short(number: int) -> str:
    """1,023 is 1,023, 1,048,575 is 1.05M."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1e3:.3g}k" if number < 999_500 else f"{number / 1e6:.3g}M"


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _signed(column: Part, i: int) -> str:
    return signed(column["nats"][i], column["interval"][i])


def signed(value: float | None, interval: list[float] | None) -> str:
    between = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
    return "–" if value is None else f"{value:+.4f}{between}"


def _change(own: Part, i: int) -> str:
    return signed(own["increase"][i], own["interval"][i]) if i else "–"


def _share(where: Part, i: int) -> str:
    """How much of the whole gain lies in a kind of tokens."""
    parts = [n * (gain or 0.0) for n, gain in zip(where["tokens"], where["gain"]["nats"], strict=True)]
    return f"{parts[i] / sum(parts):.0%}" if sum(parts) > 0 else "–"
