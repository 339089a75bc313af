"""What stands on our pages, made from the files in results/: one function a table or a phrase."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from logpast.analysis.page import signed, span, spans
from logpast.analysis.saved import WAYS, read_analysis
from logpast.comparison import table as comparison_table
from logpast.ledger import documents as by_document
from logpast.ledger import row as ledger
from logpast.ledger.curves import above, read_curve
from logpast.paper import ours as beside
from logpast.paper import printed
from logpast.paper.accounting import accounting_table
from logpast.reporting.tables import Table, as_markdown
from logpast.util.errors import UserError

View = Callable[[Path], str]  # from results/ to what stands on a page
COMPARISONS = ("rivals-toy", "rivals-pg19", "rivals-pg19-time", "rivals-wiki", "rivals-pg19-pilot")


def read_table(results: Path, file: str) -> dict[str, Any]:
    """A benchmark's table, as its file has it; a comparison's, system -> column -> the figure before any spread."""
    if file in COMPARISONS:
        heads, lines, *_ = comparison_table.table(_rows(results, file))
        return {
            line[0]: {
                head: float(text.split()[0].replace(",", ""))
                for head, text in zip(heads[2:], line[2:], strict=True)
                if text
            }
            for line in lines
        }
    place = results / f"{file}.json"
    with ledger.reading(f"{place} is not a table of results"):
        found: dict[str, Any] = ledger.parse_json(place.read_text(encoding="utf-8"))
    return found


def _scores(results: Path, file: str) -> dict[str, list[dict[str, Any]]]:
    """system -> the scores of its seeds, in their order, which is the same for all systems."""
    rows = sorted(ledger.read(results / f"{file}.jsonl"), key=lambda row: row["seed"])
    found: dict[str, list[dict[str, Any]]] = {}
    seeds: dict[str, list[int]] = {}
    for row in rows:
        system = row["recipe"]["model"]["system"]
        found.setdefault(system, []).append(row["scores"])
        seeds.setdefault(system, []).append(row["seed"])
    if any(ours != list(range(len(ours))) for ours in seeds.values()) or len(set(map(len, seeds.values()))) != 1:
        raise UserError(f"{file}.jsonl should hold seeds 0, 1, … once for each system, and has {seeds}; mend it")
    return found


def _spread(values: list[float], form: str) -> str:
    """mean (standard deviation)"""
    return f"{statistics.mean(values):{form}} ({statistics.stdev(values):{form.lstrip('+')}})"


def _demo_text(results: Path) -> str:
    scores = _scores(results, "demo-text")
    memory, control = scores["log_memory"], scores["recent"]
    heads = ["seed", "memory ppl_token", "control ppl_token", "memory bits/byte", "control bits/byte",
             "difference, nats per token [95 % over chapters]", "better on"]  # fmt: skip
    rows = []
    for seed, (ours, theirs) in enumerate(zip(memory, control, strict=True)):
        apart = ours["against"]
        low, high = apart["interval"]
        rows.append([
            str(seed), f"{ours['ppl_token']:.2f}", f"{theirs['ppl_token']:.2f}", f"{ours['bits_per_byte']:.4f}",
            f"{theirs['bits_per_byte']:.4f}", f"{apart['nats_per_token']:+.4f} [{low:+.4f}, {high:+.4f}]",
            f"{apart['documents_better']} of {apart['documents']}",
        ])  # fmt: skip
    means = [
        _spread([one[name] for one in group], form)
        for name, form in (("ppl_token", ".2f"), ("bits_per_byte", ".4f"))
        for group in (memory, control)
    ]
    apart = _spread([one["against"]["nats_per_token"] for one in memory], "+.4f")
    return as_markdown(Table(heads, [*rows, ["mean (standard deviation over seeds)", *means, apart, ""]]))


def topics(results: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The two optima, and the nats per token of each system's seeds."""
    scores = _scores(results, "demo-topics")
    nats = {system: [math.log(one["ppl_token"]) for one in group] for system, group in scores.items()}
    return read_table(results, "demo-topics-optima"), nats


def _demo_topics(results: Path) -> str:
    optima, nats = topics(results)
    seeds = len(nats["recent"])

    def trained(name: str, system: str) -> list[str]:
        error = statistics.stdev(nats[system]) / seeds**0.5
        above = statistics.mean(nats[system]) - optima["optimum_given_recent"]
        return [name, *(f"{value:.4f}" for value in nats[system]), f"{above:+.4f} ({error:.4f})"]

    rows = [
        ["best possible, knowing the whole past", f"{optima['optimum_given_all']:.4f}", *[""] * seeds],
        trained("memory", "log_memory"),
        ["best possible, seeing what the control sees", f"{optima['optimum_given_recent']:.4f}", *[""] * seeds],
        trained("control", "recent"),
    ]
    last = "mean − second optimum (standard error over seeds)"
    return as_markdown(Table(["", *(f"seed {seed}" for seed in range(seeds)), last], rows))


def _demo_summary(results: Path) -> str:
    text, (optima, nats) = _scores(results, "demo-text"), topics(results)
    above = {s: [each - optima["optimum_given_recent"] for each in nats[s]] for s in ("log_memory", "recent")}
    chapters = text["recent"][0]["documents"]
    rows = [
        [f"King James text, {chapters} unseen chapters, perplexity per token ({len(text['recent'])} seeds)",
         *(_spread([one["ppl_token"] for one in text[system]], ".2f") for system in above)],
        [f"drifting topics, nats above the best that the control's view allows ({len(nats['recent'])} seeds)",
         *(_spread(values, "+.4f").replace("-", "−") for values in above.values())],
    ]  # fmt: skip
    return as_markdown(Table(["small models, equal size, text and steps", "memory", "control"], rows))


CASES = {
    "memory": "memory: 53 slots, a past of 8,192",
    "delta": "control: the 53 preceding tokens",
    "nanogpt": "nanoGPT (loss at all 309 positions)",
    "plain": "no slots",
    "memory-65k": "memory: 65 slots, 65,536",
    "memory-1m": "memory: 81 slots, 1,048,576",
    "memory-1m-consecutive": "the same, consecutive windows",
    "memory-einsum": "memory by gather + einsum",
    "memory-conv1d": "memory by conv1d, gradient by one product",
}


def _train_gpu(results: Path) -> str:
    rows = [
        [CASES.get(row["case"]) or f"full attention over {row['positions']:,}",
         f"{row['windows']} × {row['positions']:,}", f"{row['ms']:.1f} [{row['ms_10']:.1f}, {row['ms_90']:.1f}]",
         f"{row['loss_tokens_per_s']:,}", f"{row['share']:.1%}", f"{row['peak_gib']:.1f}"]
        for row in read_table(results, "train_gpu")["rows"]
    ]  # fmt: skip
    return as_markdown(Table(["", "positions", "ms", "loss tokens/s", "share", "GiB"], rows))


def _train_gpu_ratios(results: Path) -> str:
    ratio = read_table(results, "train_gpu")["step_time_ratios"]
    return (
        f"memory ÷ control {ratio['memory / delta']:.3f}; nanoGPT ÷ memory {ratio['nanogpt / memory']:.3f}; a past of "
        f"65,536 ÷ 8,192 {ratio['memory-65k / memory']:.3f}; of 1,048,576 {ratio['memory-1m / memory']:.3f} shuffled, "
        f"{ratio['memory-1m-consecutive / memory']:.3f} consecutive"
    )


def _price_of_memory(results: Path) -> str:
    table = read_table(results, "train_gpu")
    ms, ratio = {row["case"]: row["ms"] for row in table["rows"]}, table["step_time_ratios"]["memory / delta"]
    return (
        f"{100 * (ratio - 1):.1f} % longer than the control's of the same length, and "
        f"{100 * (ms['memory'] / ms['plain'] - 1):.0f} % longer than the window's alone"
    )


def _price_of_attention(results: Path) -> str:
    price = {row["case"]: row["ms"] / row["loss_tokens"] for row in read_table(results, "train_gpu")["rows"]}
    longer, long = (price[case] / price["memory"] for case in ("full-8448", "full-4096"))
    return f"over 8,448 tokens {longer:.1f} times, over 4,096 {long:.1f} times"


def _memory_gpu(results: Path) -> str:
    rows = [
        [row["way"], f"{row['text'].split()[0].split(':')[0].replace('wiki22k', 'text')}, {row['horizon']:,} "
         f"({row['distinct_per_history']:,})", f"{row['forward_ms']:.3f}",
         f"{row['both_ms']:.3f}" if "both_ms" in row else "", str(row.get("extra_gib", ""))]
        for row in read_table(results, "memory_gpu")["rows"]
    ]  # fmt: skip
    return as_markdown(Table(["way", "tokens, past (distinct)", "forward", "forward + backward", "GiB"], rows))


def _score_gpu(results: Path) -> str:
    seconds = {
        row["precision"]: row["seconds"] for row in read_table(results, "score_gpu")["rows"] if row["batch_size"] == 64
    }
    return f"{seconds['bfloat16']:.2f} s in bf16 and {seconds['float32']:.2f} s in float32"


def _fast_step(results: Path) -> str:
    losses = {
        name: [row["loss"] for row in ledger.read(results / "logs" / "fast-step" / f"{name}.jsonl")]
        for name in ("fast0", "plain0", "plain1")
    }

    def apart(one: str, other: str) -> tuple[float, float]:
        differences = [abs(a - b) for a, b in zip(losses[one], losses[other], strict=True)]
        return statistics.mean(differences), max(differences)

    (ours, most), (seeds, most_of_seeds) = apart("fast0", "plain0"), apart("plain0", "plain1")
    return (
        f"fast and plain with seed 0 differ by {ours:.4f} nats in the mean and {most:.4f} at most; plain with seeds 0 "
        f"and 1 by {seeds:.4f} and {most_of_seeds:.4f}"
    )


def _comparison(name: str) -> View:
    """The table of a comparison whose rows are kept under this name."""
    return lambda results: as_markdown(comparison_table.table(_rows(results, name)))


def _speeds(results: Path) -> str:
    speed = {system: figures["tokens/s"] for system, figures in read_table(results, "rivals-pg19").items()}
    return " and ".join(
        f"{speed[system] / speed['plain window']:.2f}" for system in ("Transformer-XL", "Compressive Transformer")
    )


def _rows(results: Path, name: str) -> list[dict[str, Any]]:
    if rows := ledger.read(results / f"{name}.jsonl"):
        return rows
    raise UserError(f"{results / name}.jsonl has no rows; bring them back")


def _paper_best(results: Path) -> str:
    row = printed.sweep("A1").rows[-1]
    k, best = row.best
    control = f"against {row.delta.raw:.2f} for the control"
    return f"{best.raw:.2f} (L = {row.slots}, k = {k}) {control}, and {best.word:.2f} per word"


def _paper_all_counted(results: Path) -> str:
    table = printed.sweep("A1")
    best = table.rows[-1].best[1]
    return f"{best.word:.2f} would read {printed.if_all_counted(table, best.raw):.2f} on all {table.words:,} words"


def _paper_line_ends(results: Path) -> str:
    table = printed.sweep("A1")
    row = table.rows[-1]
    best, control = (printed.if_all_counted(table, cell.raw, line_ends=True) for cell in (row.best[1], row.delta))
    return f"it would read {best:.2f}, and the control's {row.delta.word:.2f} would read {control:.2f}"


def _accounting(results: Path) -> str:
    return as_markdown(accounting_table())


def _ours(results: Path) -> str:
    """What we measured beside the paper's two tables, or that there is nothing yet."""
    parts = []
    for name, corpus in (("A1", "WikiText-103 test"), ("A2", "PG-19 test")):
        table = beside.ours(name, results)
        if table is None:
            parts.append(f"{corpus}: not measured yet.")
        else:
            parts += [f"{corpus}, perplexity per token/per word:", as_markdown(table), "  \n".join(table.notes)]
    return "\n\n".join(parts)


def _pairs(results: Path, file: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A sweep's rows of the memory, each with its control's; by training text (first that which came first), width,
    k, L and seed.
    """
    rows = _rows(results, file)
    texts = list(dict.fromkeys(row["train_data"]["name"] for row in rows))

    def place(row: dict[str, Any]) -> tuple[int, int, float, int, int]:
        model, text = row["recipe"]["model"], texts.index(row["train_data"]["name"])
        return text, model["width"], model.get("sharpness", 0.0), model["slots"], row["seed"]

    found: dict[tuple[int, int, float, int, int], dict[str, Any]] = {}
    for row in rows:
        if found.setdefault(place(row), row)["scores"]["ppl_token"] != row["scores"]["ppl_token"]:
            raise UserError(
                f"{file}.jsonl has two rows of {row['sweep']['cell']} with other scores; remove one of the two"
            )
    controls = {where: found.get((*where[:2], 0.0, *where[3:])) for where in sorted(found) if where[2]}
    return [(found[where], control) for where, control in controls.items() if control]


def _gain(memory: dict[str, Any], control: dict[str, Any]) -> float:
    """Nats per token of a pair on the test text, below 0 where the memory is better."""
    return math.log(memory["scores"]["ppl_token"] / control["scores"]["ppl_token"])


def _familiar_gain(memory: dict[str, Any], control: dict[str, Any]) -> float | None:
    """The same over the familiar documents, where there are others."""
    seeds = [{row["seed"]: row["scores"]} for row in (memory, control)]
    of = by_document.documents(*seeds)
    if not of.tell_apart:
        return None
    ours, theirs = (by_document.familiar_perplexity(each, of)[memory["seed"]] for each in seeds)
    return math.log(ours / theirs)


def _pair(results: Path, file: str, text: str) -> str:
    """What a sweep's last pair on a training text has in figures."""
    memory, control = [pair for pair in _pairs(results, file) if pair[0]["train_data"]["name"] == text][-1]
    ours, theirs = (row["scores"]["ppl_token"] for row in (memory, control))
    return f"{ours:.2f} against {theirs:.2f}, {_gain(memory, control):+.3f} nats per token".replace("-", "−")


def _gains_of_sweep(results: Path, text: str, gain: Callable[..., float | None]) -> str:
    """A figure an L, the mean of its seeds, with k = 100."""
    found = defaultdict[int, list[float]](list)
    for memory, control in _pairs(results, "sweep-small"):
        model = memory["recipe"]["model"]
        gained = gain(memory, control)
        if (memory["train_data"]["name"], model["sharpness"]) == (text, 100) and gained is not None:
            found[model["slots"]].append(gained)
    gains = [f"{statistics.mean(each):+.3f} at L = {slots}" for slots, each in found.items()]
    return ", ".join(gains).replace("-", "−")


def _on_the_way(results: Path, file: str) -> str:
    """What lay between the losses of each pair: in training, where both had the same batches, in parts of it; on the
    validation text in the end; and on the test text with the weights that did best on that.
    """
    rows, parts, millions = [], 4, 0.0
    for memory, control in _pairs(results, file):
        logs = [results / "logs" / file / f"{row['sweep']['cell']}.jsonl" for row in (memory, control)]
        if lost := [log for log in logs if not log.exists()]:
            raise FileNotFoundError(None, None, str(lost[0]))
        ours, theirs = map(read_curve, logs)
        apart, last, model = above(ours.training, theirs.training), max(ours.training), memory["recipe"]["model"]
        means = [
            statistics.mean(value for step, value in apart.items() if (step - 1) * parts // last == part)
            for part in range(parts)
        ]
        millions = ours.tokens[last] / parts / 1e6
        in_the_end = above(ours.validation, theirs.validation).get(last)
        gains = [*means, in_the_end, _gain(memory, control), _familiar_gain(memory, control)]
        text = memory["train_data"]
        rows.append([
            text["name"], f"{ours.tokens[last] / text['tokens']:.1f}", f"{memory['parameters'] / 1e6:.3g}M",
            f"{model['sharpness']:g}", str(model["slots"]), str(memory["seed"]),
            *("" if gain is None else f"{gain:+.4f}" for gain in gains),
        ])  # fmt: skip
    digits = 0 if millions > 1 else 1
    quarters = [f"{part * millions:.{digits}f}–{(part + 1) * millions:.{digits}f}M tokens" for part in range(parts)]
    heads = ["trained on", "times", "weights", "k", "L", "seed", *quarters, "validation", "test", "test, familiar"]
    filled = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return as_markdown(Table([heads[place] for place in filled], [[row[place] for place in filled] for row in rows]))


def _analyses(results: Path, name: str) -> dict[str, dict[str, Any]]:
    """Kept analyses of a pair, a seed each."""
    found = [read_analysis(folder) for folder in sorted((results / "analyses").glob(f"{name}-seed*"))]
    if not found:
        raise FileNotFoundError(None, None, str(results / "analyses" / f"{name}-seed*"))
    return {f"seed {each['model']['seed']}": each for each in found}


def _where_gained(results: Path, name: str) -> str:
    """The gain over the control by where a token stands in its window, and by where it last occurred."""
    seeds = _analyses(results, name)

    def rows(labels: list[str], *keys: str) -> list[tuple[str, ...]]:
        parts = [reduce(getitem, keys, each) for each in seeds.values()]
        shares = [f"{tokens / sum(parts[0]['tokens']):.1%}" for tokens in parts[0]["tokens"]]
        return [*zip(labels, shares, *(_column(each["gain"], "nats") for each in parts), strict=True)]

    first = next(iter(seeds.values()))
    places = [span(a + 1, b + 1) for a, b in spans(first["position"]["binned"])]
    kinds = first["last_seen"]["where"]["kinds"]
    lines = [
        *rows(["all"], "scores", "all"),
        *rows([f"position in the window: {place}" for place in places], "position", "binned"),
        *rows([f"last occurrence: {kind}" for kind in kinds], "last_seen", "where"),
    ]
    return as_markdown(Table(["tokens", "share", *(f"gain, {seed}" for seed in seeds)], lines))


def _how_far_back(results: Path, name: str) -> str:
    """By how much the loss rises where the past beyond a lag is changed in one way or another."""
    seeds = _analyses(results, name)
    lags = next(iter(seeds.values()))["lags"]["lag"]
    columns = {
        f"{way}, {seed}": _column(each["lags"][way], "increase")
        for way in WAYS
        for seed, each in seeds.items()
        if way in each["lags"]  # older ones have no other pasts
    }
    return as_markdown(Table(["beyond lag", *columns], [*zip(map(str, lags), *columns.values(), strict=True)]))


def _column(part: dict[str, Any], what: str) -> list[str]:
    return [signed(*at) for at in zip(part[what], part["interval"], strict=True)]


VIEWS: dict[str, View] = {
    "demo-summary": _demo_summary,
    "demo-text": _demo_text,
    "demo-topics": _demo_topics,
    "train-gpu": _train_gpu,
    "train-gpu-ratios": _train_gpu_ratios,
    "price-of-memory": _price_of_memory,
    "price-of-attention": _price_of_attention,
    "memory-gpu": _memory_gpu,
    "score-gpu": _score_gpu,
    "fast-step": _fast_step,
    **{name: _comparison(name) for name in COMPARISONS},
    "rivals-pg19-short": lambda results: as_markdown(comparison_table.short(_rows(results, "rivals-pg19"))),
    "rivals-pg19-speeds": _speeds,
    "paper-best": _paper_best,
    "paper-all-counted": _paper_all_counted,
    "paper-line-ends": _paper_line_ends,
    "accounting": _accounting,
    "ours": _ours,
    "sweep-small-gains": lambda results: _gains_of_sweep(results, "wiki22k:train", _gain),
    "sweep-small-gains-pg19": lambda results: _gains_of_sweep(results, "pg19:train", _familiar_gain),
    "sweep-small-on-the-way": lambda results: _on_the_way(results, "sweep-small"),
    "sweep-pairs": lambda results: _pair(results, "sweep-pairs", "wiki22k:train"),
    "sweep-pairs-pg19": lambda results: _pair(results, "sweep-pairs", "pg19:train"),
    "sweep-pairs-on-the-way": lambda results: _on_the_way(results, "sweep-pairs"),
    "pairs-wiki22k-where": lambda results: _where_gained(results, "wiki22k-k200"),
    "pairs-wiki22k-past": lambda results: _how_far_back(results, "wiki22k-k200"),
    "pairs-pg19-where": lambda results: _where_gained(results, "pg19-k200"),
    "pairs-pg19-past": lambda results: _how_far_back(results, "pg19-k200"),
    "sweep-rereading": lambda results: _on_the_way(results, "sweep-rereading"),
    "rereading-where": lambda results: _where_gained(results, "much-width192"),
    "rereading-past": lambda results: _how_far_back(results, "much-width192"),
}
