"""The views: what generated regions of our pages contain, computed from the files in results/."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from logpast.analysis.labels import difference, span, spans
from logpast.analysis.saved import WAYS, read_analysis
from logpast.comparison import table as comparison_table
from logpast.ledger import row as ledger
from logpast.ledger.curves import above, read_curve
from logpast.ledger.documents import documents, estimate_difference, in_vocabulary_perplexity
from logpast.paper import printed
from logpast.paper.accounting import accounting_table
from logpast.paper.ours import ours_table
from logpast.reporting.differences import NEGATIVE_IS_LOWER, in_words, signed
from logpast.reporting.tables import Table, as_markdown
from logpast.util import schema
from logpast.util.errors import UserError
from tools import gap

Row = dict[str, Any]
View = Callable[[Path], str]  # results/ -> text of the region
COMPARISONS = ("rivals-toy", "rivals-pg19", "rivals-pg19-time", "rivals-wiki", "rivals-pg19-pilot")
QUARTERS = 4


def read_table(results: Path, file: str) -> dict[str, Any]:
    """A benchmark's table as in its file; a comparison's as system -> column -> number."""
    if file in COMPARISONS:
        return comparison_table.values(_rows(results, file, "comparison"))
    path = results / f"{file}.json"
    with schema.reading(f"{path} is not a table of results"):
        table = schema.parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise UserError(f"{path} is not a table of results: it should be {{…}}; restore it")
    return table


def _rows(results: Path, file: str, *required: str) -> list[Row]:
    """Rows of a ledger that all have the required fields."""
    if rows := ledger.read(results / f"{file}.jsonl", *required):
        return rows
    raise UserError(f"{results / file}.jsonl has no rows; restore them")


def _mean_and_deviation(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({statistics.stdev(values):{form.lstrip('+')}})"


def _minus_signs(text: str) -> str:
    """For sentences: − instead of a hyphen."""
    return text.replace("-", "−")


# The demo


DEMO = {"log_memory": "memory", "recent": "control"}


def _demo_rows(results: Path, file: str) -> dict[str, list[Row]]:
    """control, memory or recall -> rows of seeds 0, 1, …"""
    rows = defaultdict[str, list[Row]](list)
    for row in sorted(_rows(results, file), key=lambda row: row["seed"]):
        model = row["recipe"]["model"]
        rows["recall" if model.get("recall") else DEMO[model["system"]]].append(row)
    seeds = {name: [row["seed"] for row in group] for name, group in rows.items()}
    expected = list(range(max(map(len, seeds.values()))))
    if any(found != expected for found in seeds.values()):
        raise UserError(f"{file}.jsonl must have seeds 0, 1, … once for each system, and has {seeds}; restore it")
    return rows


def _demo_text(results: Path) -> str:
    rows = _demo_rows(results, "demo-text")
    systems, others = ("control", "memory", "recall"), ("memory", "recall")
    perplexities = {name: [row["scores"]["ppl_token"] for row in rows[name]] for name in systems}
    against = {name: [row["scores"]["against"] for row in rows[name]] for name in others}
    heads = ["seed", *(f"{name} ppl_token" for name in systems),
             *(f"{name} − control, nats per token ({NEGATIVE_IS_LOWER}) [95 % over chapters]" for name in others),
             *(f"{name} lower on" for name in others)]  # fmt: skip
    lines = [
        [str(seed), *(f"{perplexities[name][seed]:.2f}" for name in systems),
         *(signed(against[name][seed]["nats_per_token"], against[name][seed].get("interval")) for name in others),
         *(f"{against[name][seed]['documents_better']} of {against[name][seed]['documents']}" for name in others)]
        for seed in range(len(rows["control"]))
    ]  # fmt: skip
    means = [_mean_and_deviation(perplexities[name], ".2f") for name in systems]
    means += [_mean_and_deviation([one["nats_per_token"] for one in against[name]], "+.4f") for name in others]
    return as_markdown(Table(heads, [*lines, ["mean (standard deviation over seeds)", *means, "", ""]]))


def _demo_text_gains(results: Path) -> str:
    rows = _demo_rows(results, "demo-text")
    means = {
        name: statistics.mean(row["scores"]["against"]["nats_per_token"] for row in rows[name])
        for name in ("memory", "recall")
    }
    return "; ".join(f"{name}: {in_words(nats, digits=3)}" for name, nats in means.items())


def _demo_text_times(results: Path) -> str:
    rows = _demo_rows(results, "demo-text")
    seconds = {name: [row["train_seconds"] for row in group] for name, group in rows.items()}
    ratios = {
        name: [own / control for own, control in zip(seconds[name], seconds["control"], strict=True)]
        for name in ("memory", "recall")
    }
    return ", ".join(f"{name} {_mean_and_deviation(values, '.2f')}" for name, values in ratios.items())


def topics(results: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The two optima of the topics source, and control or memory -> nats per token of each seed."""
    rows = _demo_rows(results, "demo-topics")
    nats = {name: [math.log(row["scores"]["ppl_token"]) for row in group] for name, group in rows.items()}
    return read_table(results, "demo-topics-optima"), nats


def _demo_topics(results: Path) -> str:
    optima, nats = topics(results)
    seeds = len(nats["control"])

    def trained(name: str) -> list[str]:
        error = statistics.stdev(nats[name]) / seeds**0.5
        difference = statistics.mean(nats[name]) - optima["optimum_given_recent"]
        return [name, *(f"{value:.4f}" for value in nats[name]), f"{difference:+.4f} ({error:.4f})"]

    rows = [
        ["best possible, knowing the whole past", f"{optima['optimum_given_all']:.4f}", *[""] * seeds],
        trained("memory"),
        ["best possible, seeing what the control sees", f"{optima['optimum_given_recent']:.4f}", *[""] * seeds],
        trained("control"),
    ]
    last = "mean − second optimum (standard error over seeds)"
    return as_markdown(Table(["", *(f"seed {seed}" for seed in range(seeds)), last], rows))


def _demo_summary(results: Path) -> str:
    text, (optima, nats) = _demo_rows(results, "demo-text"), topics(results)
    systems = ("control", "memory", "recall")
    perplexities = [[row["scores"]["ppl_token"] for row in text[name]] for name in systems]
    above_optimum = [[each - optima["optimum_given_recent"] for each in nats[name]] for name in systems[:2]]
    chapters = text["control"][0]["scores"]["documents"]
    rows = [
        [f"King James text, {chapters} unseen chapters, perplexity per token ({len(perplexities[0])} seeds)",
         *(_mean_and_deviation(values, ".2f") for values in perplexities)],
        [f"drifting topics, nats above the best that the control's view allows ({len(above_optimum[0])} seeds)",
         *(_minus_signs(_mean_and_deviation(values, "+.4f")) for values in above_optimum), ""],
    ]  # fmt: skip
    return as_markdown(Table(["small models, equal text and steps", *systems], rows))


# Benchmarks on a GPU

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
    ms_per_token = {row["case"]: row["ms"] / row["loss_tokens"] for row in read_table(results, "train_gpu")["rows"]}
    longer, long = (ms_per_token[case] / ms_per_token["memory"] for case in ("full-8448", "full-4096"))
    return f"over 8,448 tokens {longer:.1f} times, over 4,096 {long:.1f} times"


def _kernels_gpu(results: Path) -> str:
    rows = [
        [", ".join(row["off"]) or "none", f"{row['ms']:.2f} [{row['ms_10']:.2f}, {row['ms_90']:.2f}]",
         f"{row['longer']:+.1%}"]
        for row in read_table(results, "kernels_gpu")["rows"]
    ]  # fmt: skip
    return as_markdown(Table(["switched off", "ms", "step time"], rows))


def _memory_accuracy(results: Path) -> str:
    """One row per device, type and path: the largest error over all lengths, by scale."""
    worst: dict[tuple[str, str, str], dict[float, float]] = {}
    for device in ("cpu", "gpu"):
        for row in read_table(results, f"memory_accuracy_{device}")["rows"]:
            by_scale = worst.setdefault((device.upper(), row["type"], row["path"]), {})
            by_scale[row["scale"]] = max(by_scale.get(row["scale"], 0.0), row["short"], row["padded"])
    scales = next(iter(worst.values()))
    rows = [[*key, *(f"{by_scale[scale]:.1e}" for scale in scales)] for key, by_scale in worst.items()]
    return as_markdown(Table(["device", "type", "path", *(f"scale {scale:,g}" for scale in scales)], rows))


def _ranks(results: Path) -> str:
    """The largest difference from one process over both launchers, by system, strategy and number of processes."""
    groups = defaultdict[tuple[str, str, int], list[Row]](list)
    for row in read_table(results, "ranks")["rows"]:
        groups[row["system"], row["strategy"], row["ranks"]].append(row)
    forms = {"loss": ".1e", "score": ".1e", "weight": ".1e", "held": ".0%"}
    lines = [
        [system, strategy, str(ranks), *(f"{max(row[name] for row in rows):{form}}" for name, form in forms.items())]
        for (system, strategy, ranks), rows in sorted(groups.items())
    ]
    return as_markdown(Table(["system", "strategy", "processes", "losses", "scores", "weights", "held"], lines))


def _memory_gpu(results: Path) -> str:
    rows = [
        [row["way"], f"{row['text'].split()[0].split(':')[0].replace('wiki22k', 'text')}, {row['horizon']:,} "
         f"({row['distinct_per_history']:,})", f"{row['forward_ms']:.3f}",
         f"{row['both_ms']:.3f}" if "both_ms" in row else "", str(row.get("extra_gib", ""))]
        for row in read_table(results, "memory_gpu")["rows"]
    ]  # fmt: skip
    return as_markdown(Table(["way", "tokens, past (distinct)", "forward", "forward + backward", "GiB"], rows))


def _score_gpu(results: Path) -> str:
    rows = [row for row in read_table(results, "score_gpu")["rows"] if row["batch_size"] == 64]
    seconds = {row["precision"]: row["seconds"] for row in rows}
    return f"{seconds['bfloat16']:.2f} s in bf16 and {seconds['float32']:.2f} s in float32"


def _fast_step(results: Path) -> str:
    logs = ("fast0", "plain0", "plain1")
    fast, plain, other_seed = (read_curve(results / "logs" / "fast-step" / f"{log}.jsonl").training for log in logs)
    ways, seeds = (list(map(abs, above(one, other).values())) for one, other in ((fast, plain), (plain, other_seed)))
    return (
        f"fast and plain with seed 0 differ by {statistics.mean(ways):.4f} nats in the mean and {max(ways):.4f} at "
        f"most; plain with seeds 0 and 1 by {statistics.mean(seeds):.4f} and {max(seeds):.4f}"
    )


def _controls(results: Path) -> str:
    ppl: dict[tuple[str, str, str], dict[str, float]] = {}
    for file in ("sweep-controls", "controls-in-domain"):
        for row in _rows(results, file):
            texts = row["train_data"]["name"], row["test_data"]["name"], str(row["seed"])
            ppl.setdefault(texts, {})[row["recipe"]["model"]["system"]] = row["scores"]["ppl_token"]
    rows = []
    for texts, by_system in ppl.items():
        if len(by_system) < 2:
            continue  # the control of a model with recall only
        control, memory = by_system["recent"], by_system["log_memory"]
        rows.append([*texts, f"{control:.2f}", f"{memory:.2f}", f"{math.log(memory / control):+.3f}"])
    heads = ["trained on", "scored on", "seed", "control ppl_token", "memory ppl_token", "memory − control, nats"]
    return as_markdown(Table(heads, rows))


def _recall_pilots(results: Path) -> str:
    """One row per form, best first: loss on both validation texts, and their mean minus that of the form `base`."""
    log = (results / "logs" / "recall-pilots" / "validation.jsonl").read_text(encoding="utf-8")
    validation = {line["run"]: line["validation_loss"] for line in map(schema.parse_json, log.splitlines())}
    return _forms(results, "recall-pilots", validation)


def _recall_pilots_2(results: Path) -> str:
    """The same for the second round."""
    rows = _rows(results, "recall-pilots-2-validation")
    return _forms(results, "recall-pilots-2", {row["run"]: math.log(row["scores"]["ppl_token"]) for row in rows})


def _forms(results: Path, file: str, validation: dict[str, float]) -> str:
    losses = {
        row["run"]: (validation[row["run"]], math.log(row["scores"]["ppl_token"])) for row in _rows(results, file)
    }
    means = {run: statistics.mean(pair) for run, pair in losses.items()}
    lines = [
        [*run.rsplit("-seed", 1), *(f"{loss:.4f}" for loss in losses[run]),
         f"{means[run] - base:+.4f}" if (base := means.get("base-seed" + run[-1])) else ""]
        for run in sorted(losses, key=lambda run: (run[-1], means[run]))
    ]  # fmt: skip
    return as_markdown(Table(["form", "seed", "WikiText-103 validation", "wiki22k:rest[:500]", "mean − base"], lines))


def _system(row: Row, file: str = "") -> str:
    """The system of a sweep's cell: recall, of the run wiki22k-recall-seed0; recall-mixture, trained on that loss."""
    system = str(row["run"]).partition("-")[2].rpartition("-")[0]
    return f"{system}-mixture" if "mixture" in file else system


def _recall_worth(results: Path) -> str:
    """One row per text and seed: losses of the control, the memory and recall, and differences from the control."""
    losses: dict[tuple[str, str, int], dict[str, float]] = {}
    recall = "sweep-recall", "sweep-recall-mixture", "recall-in-domain", "recall-mixture-in-domain"
    for file in ("sweep-controls", "controls-in-domain", *recall):
        for row in _rows(results, file):
            text, seed, system = row["test_data"]["name"], row["seed"], _system(row, file)
            key = row["train_data"]["name"], text, seed
            losses.setdefault(key, {})[system] = math.log(row["scores"]["ppl_token"])
            if text == "wikitext103:test":
                key = row["train_data"]["name"], "the same without `=` tokens", seed
                losses.setdefault(key, {})[system] = _without_equals(results, row, system)
    systems = {
        "k200": "memory",
        "recall": "recall",
        "recall-book": "recall, whole book",
        "k200-recall": "memory + recall",
        "recall-mixture": "recall, old loss",
    }
    rows = [
        [*key[:2], str(key[2]), f"{found['delta']:.4f}",
         *(f"{found[each]:.4f} ({found[each] - found['delta']:+.4f})" if each in found else "" for each in systems)]
        for key, found in losses.items()
    ]  # fmt: skip
    return as_markdown(Table(["trained on", "scored on", "seed", "control", *systems.values()], rows))


def _by_seed(results: Path, file: str, corpus: str, system: str) -> dict[int, dict[str, Any]]:
    """The scores of a system trained on this corpus."""
    rows = (row for row in _rows(results, file) if row["train_data"]["name"].startswith(corpus))
    return {row["seed"]: row["scores"] for row in rows if _system(row) == system}


def _recall_short(results: Path, corpus: str, in_domain: bool = False, system: str = "recall") -> str:
    """Perplexities on a test text with recall and of the control, means over the seeds that both have."""
    files = ("recall-in-domain", "controls-in-domain") if in_domain else ("sweep-recall", "sweep-controls")
    ours, control = _by_seed(results, files[0], corpus, system), _by_seed(results, files[1], corpus, "delta")
    means = (statistics.mean(each[seed]["ppl_token"] for seed in ours.keys() & control) for each in (ours, control))
    return " against ".join(f"{mean:.2f}" for mean in means)


def _without_equals(results: Path, row: Row, system: str) -> float:
    """The mean loss over the tokens of WikiText-103's test set without an equals sign, which marks headings."""
    name = f"{row['train_data']['name'].replace(':', '-')}-{system}-seed{row['seed']}"
    nats, equals = (
        load_file(results / "nats" / f"{file}.safetensors")["wikitext103_test"] for file in (name, "equals")
    )
    return float(nats[~equals].mean(dtype="float64"))


def _adaptive(results: Path) -> str:
    """One row per method: the loss on both texts minus the model's own, and the state."""
    found: dict[str, dict[str, Any]] = {}
    for row in read_table(results, "adaptive_baselines")["rows"]:
        found.setdefault(row["method"], {})[row["text"]["name"]] = row
    plain, rows = found.pop("plain"), []
    for method, by_text in found.items():
        line = [f"{by_text[text]['minus_plain']['nats_per_token']:+.3f}" for text in plain]
        rows.append([method, *line, f"{next(iter(by_text.values()))['state_bytes'] / 2**20:,.2f}"])
    keys = {"wikitext103:test": "wikitext103_test", "wiki22k:test": "wiki22k_test_first_300032"}
    for seed in (0, 1):
        nats = load_file(results / "nats" / f"wiki22k-rest-recall-seed{seed}.safetensors")
        line = [f"{nats[keys[text]].mean(dtype='float64') - plain[text]['nats_per_token']:+.3f}" for text in plain]
        rows.append([f"recall, trained with it (seed {seed})", *line, f"{4 * 8192 / 2**20:,.2f}"])
    return as_markdown(Table(["method", *plain, "MiB per text"], rows))


def _attach_gates(results: Path) -> str:
    """Loss of attached recall by the start of its gates."""
    rows = [
        [row["text"], row["start"], str(row.get("seed", "")), f"{row['own']:.4f}", f"{row['memory']:.4f}"]
        for row in read_table(results, "attach-gates")["rows"]
    ]
    return as_markdown(Table(["text", "gates", "seed", "own, nats/token", "with recall"], rows))


def _repetition(results: Path, files: Sequence[str]) -> str:
    """Repetition in text and in generated text, by decoding; the files, of one seed each, side by side."""
    rows = []
    for seeds in zip(*(read_table(results, file)["rows"] for file in files), strict=True):
        row = seeds[0]
        name = {"model": "recall"}.get(row["of"], row["of"])
        limited = f", copies at most {row['limit']:.0%}" if row.get("limit") not in (None, 1) else ""
        values = [(f"{row['rep_4']:.1%}", f"{row['longest_mean']:.1f}", str(row["longest_max"])) for row in seeds]
        columns = (" / ".join(dict.fromkeys(column)) for column in zip(*values, strict=True))
        rows.append([row.get("decoding", ""), name + limited, *columns])
    heads = ["decoding", "text of", "repeated 4-grams", "longest copy, mean", "longest copy, most"]
    return as_markdown(Table(heads, rows))


def _adaptive_books(results: Path) -> str:
    """The same for PG-19, one column per seed, with intervals over books."""
    lines: dict[str, list[str]] = {}
    for file in ("adaptive_baselines-pg19", "adaptive_baselines-pg19-seed1"):
        for row in read_table(results, file)["rows"][1:]:
            difference = signed(row["minus_plain"]["nats_per_token"], row["minus_plain"]["interval"])
            lines.setdefault(row["method"], []).append(difference)
    control = _by_seed(results, "sweep-controls", "pg19", "delta")
    for system, name in (("recall", "recall, trained with it"), ("recall-book", "the same over the whole book")):
        trained = _by_seed(results, "sweep-recall", "pg19", system)
        for one in ({seed: trained[seed]} for seed in sorted(trained)):
            found = estimate_difference(one, control, documents(one, control))
            lines.setdefault(name, []).append(found.text("+.4f") if found else "")
    return as_markdown(
        Table(["method", "seed 0", "seed 1"], [[name, *line, *[""] * (2 - len(line))] for name, line in lines.items()])
    )


def _calibration(results: Path) -> str:
    """By the weight of copies: part of the tokens, mean weight, and share of the targets' probability, per analysis."""
    runs = {"PG-19": "pg19-recall-seed0", "WikiText-103": "wiki22k-k200-recall-seed0"}
    gates = {text: read_analysis(results / "analyses" / run)["recall"]["gate"] for text, run in runs.items()}
    heads = [f"{text}: {what}" for text in gates for what in ("tokens", "weight", "share")]
    lines: dict[str, list[str]] = {}
    for gate in gates.values():
        found = gate["calibration"]
        columns = (found[name] for name in ("from", "to", "tokens", "weight", "share"))
        for low, high, tokens, weight, share in zip(*columns, strict=True):
            part = tokens / sum(found["tokens"])
            lines.setdefault(f"{low:.0%} to {high:.0%}", []).extend([f"{part:.1%}", f"{weight:.1%}", f"{share:.1%}"])
    return as_markdown(Table(["weight of copies", *heads], [[name, *line] for name, line in lines.items()]))


def _recall_rates(results: Path) -> str:
    """One row per window length: the loss of control and recall at each learning rate."""
    losses: dict[tuple[str, str], dict[str, float]] = {}
    for row in _rows(results, "sweep-recall-rates"):
        choices = row["sweep"]["choices"]
        key = str(choices["window"]), choices["recall"]
        losses.setdefault(key, {})[choices["rate"]] = math.log(row["scores"]["ppl_token"])
    rates = ("2e-3", "1e-3")
    rows = [
        [*key, *(f"{losses[key][rate]:.4f}" for rate in rates)]
        for key in sorted(losses, key=lambda key: (int(key[0]), key[1]))
    ]
    return as_markdown(Table(["window", "system", *rates], rows))


def _recall_loss(results: Path) -> str:
    """Validation loss of small models without recall, and with recall trained on either loss."""
    losses: dict[tuple[str, str], dict[str, float]] = {}
    for row in _rows(results, "recall-loss"):
        name, _, seed = row["run"].rpartition("-seed")
        system, column = ("memory", name.removeprefix("memory-")) if name.startswith("memory") else ("control", name)
        losses.setdefault((system, seed), {})[column] = math.log(row["scores"]["ppl_token"])
    columns = ("recall-mixture", "recall-own")
    rows = [
        [system, seed, f"{found[system]:.4f}",
         *(f"{found[each]:.4f} ({found[each] - found[system]:+.4f})" for each in columns)]
        for (system, seed), found in sorted(losses.items())
    ]  # fmt: skip
    heads = ["slots", "seed", "without recall", "recall, loss of the mixture", "recall, the model's own loss"]
    return as_markdown(Table(heads, rows))


def _recall_windows(results: Path, files: Sequence[str]) -> str:
    """One row per window length and seed: losses without and with recall on both test texts."""
    losses: dict[tuple[str, str, str], dict[tuple[str, bool], float]] = {}
    for row in (row for file in files for row in _rows(results, file)):
        if row["train_data"]["name"].startswith("wiki22k"):
            model = row["recipe"]["model"]
            window = f"{model['window']}, k200" if model["system"] == "log_memory" else str(model["window"])
            key = window, f"{row['train_tokens'] / 1e6:.0f}M", str(row["seed"])
            column = row["test_data"]["name"], bool(model.get("recall"))
            losses.setdefault(key, {})[column] = math.log(row["scores"]["ppl_token"])
    rows = []
    for key, found in losses.items():
        line = [*key]
        for text in ("wikitext103:test", "wiki22k:test"):
            control, recall = found[text, False], found[text, True]
            line += [f"{control:.4f}", f"{recall:.4f}", f"{recall - control:+.4f}"]
        rows.append(line)
    texts = ("WikiText-103 test", "wiki22k:test")
    heads = [f"{text}, {what}" for text in texts for what in ("control", "recall", "difference")]
    return as_markdown(Table(["window", "trained on", "seed", *heads], rows))


def _recall_price(results: Path) -> str:
    table = read_table(results, "recall_train_gpu")
    ms, ratio = {row["case"]: row["ms"] for row in table["rows"]}, table["step_time_ratios"]
    return (
        f"control {ms['delta']:.2f} ms; with recall of 8,192 tokens {ms['recall']:.2f} ms, "
        f"{ratio['recall / delta']:.3f} times; of 65,536 tokens {ratio['recall-65k / recall']:.3f} times that, of "
        f"1,048,576 tokens {ratio['recall-1m / recall']:.3f} times"
    )


def _recall_use(results: Path) -> str:
    rows = read_table(results, "recall_gpu")["rows"]
    seconds = {row["recall"]: row["seconds"] for row in rows if row["what"] == "score"}
    ms = {(row["recall"], row["past"]): row["ms_per_token"] for row in rows if row["what"] == "generate"}
    short, long = 1000, 10**6
    return (
        f"scoring WikiText-103's test set {seconds[0]:.2f} s without recall, {seconds[8192]:.2f} s with recall of "
        f"8,192 tokens, {seconds[2**20]:.2f} s of 1,048,576; generating a token {ms[0, short]:.1f} ms without recall, "
        f"{ms[2**20, short]:.1f} ms with it after {short:,} tokens, {ms[2**20, long]:.1f} ms after {long:,}"
    )


# Comparisons with the baselines


def _comparison(results: Path, *, file: str) -> str:
    return as_markdown(comparison_table.table(_rows(results, file, "comparison")))


def _comparison_short(results: Path) -> str:
    return as_markdown(comparison_table.short(_rows(results, "rivals-pg19", "comparison")))


def _speeds(results: Path) -> str:
    speed = {system: columns["tokens/s"] for system, columns in read_table(results, "rivals-pg19").items()}
    systems = ("Transformer-XL", "Compressive Transformer")
    return " and ".join(f"{speed[system] / speed['plain window']:.2f}" for system in systems)


# The paper


def _paper_best(results: Path) -> str:
    row = printed.sweep("A1").rows[-1]
    k, best = row.best
    control = f"against {row.delta.raw:.2f} for the control"
    return f"{best.raw:.2f} (L = {row.slots}, k = {k}) {control}, and {best.word:.2f} per word"


def _paper_all_counted(results: Path) -> str:
    sweep = printed.sweep("A1")
    best = sweep.rows[-1].best[1]
    return (
        f"{best.word:.2f} would read {printed.ppl_word_of_all_tokens(sweep, best.raw):.2f} on all {sweep.words:,} words"
    )


def _paper_line_ends(results: Path) -> str:
    sweep = printed.sweep("A1")
    row = sweep.rows[-1]
    cells = (row.best[1], row.delta)
    best, control = (printed.ppl_word_of_all_tokens(sweep, cell.raw, line_ends=True) for cell in cells)
    return f"it would read {best:.2f}, and the control's {row.delta.word:.2f} would read {control:.2f}"


def _accounting(results: Path) -> str:
    return as_markdown(accounting_table())


def _ours(results: Path) -> str:
    parts = []
    for name, corpus in (("A1", "WikiText-103 test"), ("A2", "PG-19 test")):
        table = ours_table(name, results)
        if table is None:
            parts.append(f"{corpus}: not measured yet.")
        else:
            parts += [f"{corpus}, perplexity per token/per word:", as_markdown(table), "  \n".join(table.notes)]
    return "\n\n".join(parts)


def _row_fields(results: Path) -> str:
    fields = [[f"`{field.name}`", "yes" if field.required else "", field.meaning] for field in ledger.FIELDS]
    return as_markdown(Table(["field", "required", "content"], fields))


# Sweeps: pairs of a memory and its control


def _pairs(results: Path, file: str) -> list[tuple[Row, Row]]:
    """(memory, control) rows of a sweep, by training text (in the order of the file), width, k, L and seed."""
    rows = _rows(results, file, "sweep")
    texts = list(dict.fromkeys(row["train_data"]["name"] for row in rows))
    cells: dict[tuple[int, int, float, int, int], Row] = {}
    for row in rows:
        model, text = row["recipe"]["model"], texts.index(row["train_data"]["name"])
        cell = text, model["width"], model.get("sharpness", 0.0), model["slots"], row["seed"]
        if cells.setdefault(cell, row)["scores"]["ppl_token"] != row["scores"]["ppl_token"]:
            raise UserError(
                f"{file}.jsonl has two rows of {row['sweep']['cell']} with other scores; remove one of them"
            )
    found = []
    for cell in sorted(cells):
        text, width, k, slots, seed = cell
        control = cells.get((text, width, 0.0, slots, seed))
        if k and control:
            found.append((cells[cell], control))
    return found


def _difference(memory: Row, control: Row) -> float:
    """Nats per token on the test text, negative where the memory's loss is lower."""
    return math.log(memory["scores"]["ppl_token"] / control["scores"]["ppl_token"])


def _difference_in_vocabulary(memory: Row, control: Row) -> float | None:
    """The same over in-vocabulary documents, if the test text also has others."""
    seeds = [{row["seed"]: row["scores"]} for row in (memory, control)]
    test = documents(*seeds)
    if not test.has_both_kinds:
        return None
    ours, theirs = (in_vocabulary_perplexity(each, test)[memory["seed"]] for each in seeds)
    return math.log(ours / theirs)


def _last_pair(results: Path, *, text: str) -> str:
    """Perplexities of the last pair of sweep-pairs on a training text, and their difference."""
    pairs = [pair for pair in _pairs(results, "sweep-pairs") if pair[0]["train_data"]["name"] == text]
    memory, control = pairs[-1]
    ours, theirs = (row["scores"]["ppl_token"] for row in (memory, control))
    return f"{ours:.2f} against {theirs:.2f}, {in_words(_difference(memory, control), digits=3)}"


def _by_length(results: Path, *, text: str, difference: Callable[[Row, Row], float | None]) -> str:
    """The difference of sweep-small's pairs with k = 100, mean over seeds, for each L."""
    found = defaultdict[int, list[float]](list)
    for memory, control in _pairs(results, "sweep-small"):
        model, value = memory["recipe"]["model"], difference(memory, control)
        if (memory["train_data"]["name"], model["sharpness"]) == (text, 100) and value is not None:
            found[model["slots"]].append(value)
    return _minus_signs(", ".join(f"{statistics.mean(each):+.3f} at L = {slots}" for slots, each in found.items()))


def _over_training(results: Path, *, file: str) -> str:
    """Differences within each pair: training loss by quarters, validation loss at the end, test loss.

    Both runs of a pair have the same batches, so their training losses can be compared step by step.
    """
    rows, tokens_per_quarter = [], 0.0
    for memory, control in _pairs(results, file):
        logs = [results / "logs" / file / f"{row['sweep']['cell']}.jsonl" for row in (memory, control)]
        ours, theirs = map(read_curve, logs)
        last, model, text = max(ours.training), memory["recipe"]["model"], memory["train_data"]
        tokens_per_quarter = ours.tokens[last] / QUARTERS
        differences = [
            *_by_quarter(above(ours.training, theirs.training), last),
            above(ours.validation, theirs.validation).get(last),
            _difference(memory, control),
            _difference_in_vocabulary(memory, control),
        ]
        rows.append([
            text["name"], f"{ours.tokens[last] / text['tokens']:.1f}", f"{memory['parameters'] / 1e6:.3g}M",
            f"{model['sharpness']:g}", str(model["slots"]), str(memory["seed"]),
            *("" if value is None else f"{value:+.4f}" for value in differences),
        ])  # fmt: skip
    heads = [
        "trained on", "epochs", "parameters", "k", "L", "seed", *_quarter_heads(tokens_per_quarter / 1e6), "validation",
        "test", "test, in-vocabulary",
    ]  # fmt: skip
    filled = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    return as_markdown(Table([heads[i] for i in filled], [[row[i] for i in filled] for row in rows]))


def _by_quarter(differences: dict[int, float], last: int) -> list[float]:
    quarters = defaultdict[int, list[float]](list)
    for step, value in differences.items():
        quarters[(step - 1) * QUARTERS // last].append(value)
    return [statistics.mean(quarters[quarter]) for quarter in range(QUARTERS)]


def _quarter_heads(millions: float) -> list[str]:
    digits = 0 if millions > 1 else 1
    ends = [f"{quarter * millions:.{digits}f}" for quarter in range(QUARTERS + 1)]
    return [f"{first}–{last}M tokens" for first, last in pairwise(ends)]


# Saved analyses


def _analyses(results: Path, name: str) -> dict[str, dict[str, Any]]:
    """seed -> saved analysis of a pair."""
    found = {folder: read_analysis(folder) for folder in sorted((results / "analyses").glob(f"{name}-seed*"))}
    if not found:
        raise FileNotFoundError(None, None, str(results / "analyses" / f"{name}-seed*"))
    for folder, each in found.items():
        if each["control"] is None or "absent" in each["lags"]:
            raise UserError(f"{folder} is not the analysis of a memory and its control; restore it")
    return {f"seed {each['model']['seed']}": each for each in found.values()}


def _compared_by_token(results: Path, *, name: str) -> str:
    """Memory − control by position in the window and by the token's last occurrence."""
    seeds = _analyses(results, name)

    def rows(labels: list[str], *keys: str) -> list[tuple[str, ...]]:
        parts = [reduce(getitem, keys, each) for each in seeds.values()]
        shares = [f"{tokens / sum(parts[0]['tokens']):.1%}" for tokens in parts[0]["tokens"]]
        columns = (_with_interval(difference(part["gain"]), "nats") for part in parts)
        return [*zip(labels, shares, *columns, strict=True)]

    first = next(iter(seeds.values()))
    positions = [span(a + 1, b + 1) for a, b in spans(first["position"]["binned"])]
    lines = [
        *rows(["all"], "scores", "all"),
        *rows([f"position in the window: {position}" for position in positions], "position", "binned"),
        *rows([f"last occurrence: {kind}" for kind in first["last_seen"]["where"]["kinds"]], "last_seen", "where"),
    ]
    heads = (f"memory − control ({NEGATIVE_IS_LOWER}), {seed}" for seed in seeds)
    return as_markdown(Table(["tokens", "share", *heads], lines))


def _loss_without_past(results: Path, *, name: str) -> str:
    """The increase of the loss when the past beyond a lag is changed."""
    seeds = _analyses(results, name)
    lags = next(iter(seeds.values()))["lags"]["lag"]
    columns = {
        f"{way}, {seed}": _with_interval(each["lags"][way], "increase")
        for way in WAYS
        for seed, each in seeds.items()
        if way in each["lags"]  # older analyses have only some
    }
    return as_markdown(Table(["beyond lag", *columns], [*zip(map(str, lags), *columns.values(), strict=True)]))


def _with_interval(part: dict[str, Any], what: str) -> list[str]:
    return [signed(*at) for at in zip(part[what], part["interval"], strict=True)]


def _streaming(results: Path, file: str) -> str:
    rows = {(row["system"], row["past"], row["what"]): row for row in read_table(results, file)["rows"]}
    lines = []
    for system, past in dict.fromkeys((system, past) for system, past, _ in rows):
        parts = [rows.get((system, past, what)) for what in ("generate", "read")]
        times = [f"{part['milliseconds']:.2f} ({part['ratio']:.2f})" if part else "" for part in parts]
        lines.append([system, f"{past:,}", f"{rows[system, past, 'generate']['state_bytes']:,}", *times])
    heads = ["system", "past, tokens", "state, bytes", "ms per new token (ratio)", "ms per 1,000 tokens read (ratio)"]
    return as_markdown(Table(heads, lines))


def _sketch(results: Path) -> str:
    """One row per bank: what is kept, and how far slots are from exact ones."""
    columns = {
        "sharpness": "sharpness", "reach": "reach", "blocks": "blocks of each size", "moments": "moments",
        "exact_vectors": "vectors in the horizon", "vectors": "vectors kept", "bound": "error",
        "noise": "with random inputs",
    }  # fmt: skip
    rows = [[row.get(name) for name in columns] for row in read_table(results, "sketch_cpu")["rows"]]
    lines = [["" if cell is None else f"{cell:,}" for cell in row] for row in rows]
    return as_markdown(Table(list(columns.values()), lines))


def _fuzz(results: Path) -> str:
    """What became of the odd inputs, by target."""
    table = read_table(results, "fuzz")
    rows = [
        [
            name,
            each["tool"],
            *(f"{each[count]:,}" for count in ("inputs", "accepted", "refused")),
            f"{each['slowest']:.1f}",
        ]
        for name, each in table["targets"].items()
    ]
    total = sum(each["inputs"] for each in table["targets"].values())
    rows.append(["**all**", "", f"{total:,}", "", "", ""])
    return as_markdown(Table(["input", "tool", "inputs", "accepted", "refused", "slowest, s"], rows))


def _retrieval(results: Path) -> str:
    """The systems of a GPU run, whose gates started alike, and recall as it is now."""
    before = {"window": "window", "full": "full", "slots": "slots", "recall": "recall, before", "both": "both, before"}
    rows = read_table(results, "retrieval")["rows"]
    now = read_table(results, "retrieval-now")["rows"]
    renamed = [row | {"system": before[row["system"]]} for row in rows if row["system"] in before]
    return _answers([*renamed, *now], [*before.values(), "recall", "unfitted"])


def _retrieval_validation(results: Path) -> str:
    rows = read_table(results, "retrieval-validation")["rows"]
    return _answers(rows, ["before-0", "before-1", "after-0", "after-1", "unfitted"])


def _answers(rows: list[dict[str, Any]], systems: list[str]) -> str:
    """One row per question and distance: exact answers and the loss of the answer, by system."""
    found = {(row["task"], row["wording"], row["length"], row["system"]): row for row in rows}
    lines = []
    for task, wording in dict.fromkeys((row["task"], row["wording"]) for row in rows):
        for length in (1000, 7500, 64_000, 1_000_000):
            cells = [found.get((task, wording, length, system)) for system in systems]
            if any(cells):
                texts = [f"{cell['exact_match']:.0%} ({abs(cell['nats']):.1f})" if cell else "" for cell in cells]
                lines.append([f"{task}, {wording}", f"{length:,}", *texts])
    return as_markdown(Table(["question", "tokens back", *systems], lines))


# Reliability


DAMAGES = ("flipped bit", "truncation")


def _faults(results: Path) -> str:
    """Faults of processes, disks, networks and clocks."""
    heads = ["fault", "times", "equal to the undisturbed run", "one line, nothing else", "seconds"]
    rows = [
        [fault, *(str(each[name]) for name in ("injected", "equal", "line", "seconds"))]
        for fault, each in read_table(results, "faults")["faults"].items()
        if not fault.startswith(DAMAGES)
    ]
    return as_markdown(Table(heads, rows))


def _damaged_files(results: Path) -> str:
    """Faults of files: one row per file."""
    faults = read_table(results, "faults")["faults"]
    heads = ["file", *(f"{damage}: {what}" for damage in DAMAGES for what in ("times", "no harm", "one line"))]
    files = [fault.removeprefix(f"{DAMAGES[0]}: ") for fault in faults if fault.startswith(DAMAGES[0])]
    rows = [
        [
            file,
            *(str(faults[f"{damage}: {file}"][name]) for damage in DAMAGES for name in ("injected", "equal", "line")),
        ]
        for file in files
    ]
    return as_markdown(Table(heads, rows))


def _fault_counts(results: Path) -> str:
    faults = read_table(results, "faults")["faults"].values()
    injected, equal, line = (sum(each[name] for each in faults) for name in ("injected", "equal", "line"))
    return f"{injected} faults: {equal} ended equal to the undisturbed run, {line} with one line"


VIEWS: dict[str, View] = {
    "faults": _faults,
    "damaged-files": _damaged_files,
    "fault-counts": _fault_counts,
    "row-fields": _row_fields,
    "demo-summary": _demo_summary,
    "demo-text": _demo_text,
    "demo-text-gains": _demo_text_gains,
    "demo-text-times": _demo_text_times,
    "demo-topics": _demo_topics,
    "train-gpu": _train_gpu,
    "train-gpu-ratios": _train_gpu_ratios,
    "price-of-memory": _price_of_memory,
    "price-of-attention": _price_of_attention,
    "kernels-gpu": _kernels_gpu,
    "memory-accuracy": _memory_accuracy,
    "memory-gpu": _memory_gpu,
    "ranks": _ranks,
    "score-gpu": _score_gpu,
    "fast-step": _fast_step,
    "controls": _controls,
    "recall-pilots": _recall_pilots,
    "recall-pilots-2": _recall_pilots_2,
    "recall-worth": _recall_worth,
    "recall-rates": _recall_rates,
    "adaptive": _adaptive,
    "adaptive-books": _adaptive_books,
    "attach-gates": _attach_gates,
    "repetition": partial(_repetition, files=["repetition_cpu", "repetition_cpu-seed1"]),
    "repetition-pg19": partial(_repetition, files=["repetition_gpu"]),
    "repetition-attached": partial(_repetition, files=["repetition-attached"]),
    "repetition-own": partial(_repetition, files=["repetition-own"]),
    "calibration": _calibration,
    "recall-loss": _recall_loss,
    "recall-short": partial(_recall_short, corpus="wiki22k"),
    "recall-short-in-domain": partial(_recall_short, corpus="wiki22k", in_domain=True),
    "recall-short-books": partial(_recall_short, corpus="pg19"),
    "recall-short-whole-books": partial(_recall_short, corpus="pg19", system="recall-book"),
    "recall-windows": partial(_recall_windows, files=["sweep-recall-windows", "recall-windows-in-domain"]),
    "recall-1024": partial(
        _recall_windows,
        files=[
            "sweep-controls",
            "controls-in-domain",
            "sweep-recall",
            "recall-in-domain",
            "sweep-recall-1024",
            "recall-1024-in-domain",
        ],
    ),
    "recall-price": _recall_price,
    "recall-use": _recall_use,
    "gap-pg19": partial(gap.view, file="pretrained_gap-pg19", text="pg19:test"),
    "gap-wikitext103": partial(gap.view, file="pretrained_gap-wiki", text="wikitext103:test"),
    "gap-wiki22k": partial(gap.view, file="pretrained_gap-wiki", text="wiki22k:test"),
    "gap-domains": partial(gap.short_view, files=[f"pretrained_gap-{text}" for text in ("code", "german", "recent")]),
    "gap-pg19-lora": partial(gap.view, file="pretrained_gap-pg19-lora", text="pg19:test"),
    "gap-wikitext103-lora": partial(gap.view, file="pretrained_gap-wiki-lora", text="wikitext103:test"),
    "gap-wiki22k-lora": partial(gap.view, file="pretrained_gap-wiki-lora", text="wiki22k:test"),
    "gap-perplexities": gap.perplexities,
    "retrieval": _retrieval,
    "retrieval-validation": _retrieval_validation,
    "sketch": _sketch,
    "streaming-cpu": partial(_streaming, file="streaming_cpu"),
    "streaming-cpu-long": partial(_streaming, file="streaming_cpu-long"),
    "fuzz": _fuzz,
    "streaming-gpu": partial(_streaming, file="streaming_gpu"),
    **{file: partial(_comparison, file=file) for file in COMPARISONS},
    "rivals-pg19-short": _comparison_short,
    "rivals-pg19-speeds": _speeds,
    "paper-best": _paper_best,
    "paper-all-counted": _paper_all_counted,
    "paper-line-ends": _paper_line_ends,
    "accounting": _accounting,
    "ours": _ours,
    "sweep-small-gains": partial(_by_length, text="wiki22k:train", difference=_difference),
    "sweep-small-gains-pg19": partial(_by_length, text="pg19:train", difference=_difference_in_vocabulary),
    "sweep-small-training": partial(_over_training, file="sweep-small"),
    "sweep-pairs": partial(_last_pair, text="wiki22k:train"),
    "sweep-pairs-pg19": partial(_last_pair, text="pg19:train"),
    "sweep-pairs-training": partial(_over_training, file="sweep-pairs"),
    "pairs-wiki22k-where": partial(_compared_by_token, name="wiki22k-k200"),
    "pairs-wiki22k-past": partial(_loss_without_past, name="wiki22k-k200"),
    "pairs-pg19-where": partial(_compared_by_token, name="pg19-k200"),
    "pairs-pg19-past": partial(_loss_without_past, name="pg19-k200"),
    "sweep-rereading": partial(_over_training, file="sweep-rereading"),
    "rereading-where": partial(_compared_by_token, name="much-width192"),
    "rereading-past": partial(_loss_without_past, name="much-width192"),
}
